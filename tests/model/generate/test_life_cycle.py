"""A `Llama` made, pickled and closed: what it drafts with, and uses after its end."""

from __future__ import annotations

import pickle

import pytest
from draftwood import ClosedError

from tests.model.texts import P, drain, text


def test_auto_picks_what_the_file_has(llama):
    assert llama("moe-mtp").speculation == "mtp"
    assert llama("moe-mtp").speculation_reason == ""
    plain = llama("moe-plain")
    assert plain.speculation == "off"
    assert "no MTP block" in plain.speculation_reason


def test_pickle(llama, off):
    llm = llama(speculation="mtp", draft_tokens=3, draft_p_min=0.25, exact=True, draft_vocab=99)
    copy = pickle.loads(pickle.dumps(llm))
    assert (copy.speculation, copy._options) == ("mtp", llm._options)
    assert text(copy, 30) == text(off, 30)
    assert copy.speculation_stats.draft_vocab == 99
    copy.close()
    plain = pickle.loads(pickle.dumps(off))
    assert plain.speculation == "off"
    plain.close()


def test_closing_twice(llama):
    llm = llama(speculation="mtp")
    llm.close()
    llm.close()
    assert llm.speculation_stats is None
    llm.reset_speculation_stats()


def test_use_after_close(python, gguf):
    """An exception, not the end of the process: upstream hands freed pointers to the library."""
    uses = (
        "next(llm.generate([1, 2, 3]))",
        "llm.eval([1, 2, 3])",
        "llm.sample()",
        "llm('one two', max_tokens=3)",
        "llm.create_chat_completion([{'role': 'user', 'content': 'hi'}], max_tokens=3)",
        "llm.tokenize(b'one two')",
        "llm.detokenize([1, 2, 3])",
        "llm.save_state()",
        "(llm.reset(), next(llm.generate([1, 2])))",
        "llm.n_ctx()",
        "llm.n_vocab()",
        "llm.token_eos()",
        "llm.ctx",
        "llm.model",
    )
    done = python(
        """
        import sys
        from draftwood import Llama
        llm = Llama(sys.argv[1], speculation="mtp", n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
        next(llm.generate([1, 2, 3]))
        llm.close()
        for use in sys.argv[2:]:
            try:
                eval(use)
            except Exception as error:
                print(type(error).__name__, use)
        """,
        gguf("planted-moe"),
        *uses,
    )
    assert done.returncode == 0, f"after {done.stdout!r}: {done.stderr[-500:]}"
    assert done.stdout.splitlines() == [f"ClosedError {use}" for use in uses]


def test_generator_outlives_close(llama):
    llm = llama(speculation="mtp")
    generator = llm.generate(P, temp=0.0)
    next(generator)
    llm.close()
    with pytest.raises(ClosedError, match="closed"):
        drain(generator, [])
    generator.close()
