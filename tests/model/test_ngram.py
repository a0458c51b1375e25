"""N-gram drafting: what is drafted, and the same text as without, on hybrid and on attention-only models."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp.llama import LogitsProcessorList
from draftwood.engine import _capi

from tests.model.rig import PROMPT

NGRAM = _capi.DRAFTER_NGRAM


@pytest.fixture
def lookup(rig):
    """lookup(text) -> the draft after a text, from an engine that evaluated all but its last token."""
    r = rig("moe-plain", drafter=NGRAM, draft_tokens=4)

    def draft(text):
        r.engine.reset()
        r.engine.eval(text[:-1], 0)
        r.engine.propose(text[-1])
        return r.engine.draft()

    return draft


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([5, 6, 7, 8, 9, 10, 11, 5, 6, 7], [8, 9, 10, 11]),
        ([6, 7, 8, 9, 5, 6, 7], []),  # two tokens are too few
        ([5, 6, 7], []),
        ([1, 2, 3, 20, 1, 2, 3, 21, 4, 1, 2, 3], [21, 4, 1, 2]),  # the newest of equals
        ([9, 1, 2, 3, 20, 1, 2, 3, 21, 9, 1, 2, 3], [20, 1, 2, 3]),  # the longest
        ([7, 7, 7, 7, 7], [7, 7, 7, 7]),  # goes on into itself
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
    ],
)
def test_what_is_drafted(lookup, text, draft):
    assert lookup(text) == draft


def test_rejected_drafts_leave_the_text(rig, run_of):
    """The history is what was kept: after wrong drafts, and after a trim."""
    run = run_of("moe-plain")
    r = rig("moe-plain", drafter=NGRAM, draft_tokens=4)
    r.start()
    done = 1
    while done < 60:
        r.engine.propose(run.tokens[done - 1])
        r.engine.verify()
        while r.engine.row() is not None:
            assert r.engine.next(r.sampler) == run.tokens[done]
            done += 1
        r.engine.commit()
    text = [*PROMPT, *run.tokens[:done]]
    r.engine.propose(text[-1])
    continued = r.engine.draft()
    r.engine.reset()
    r.engine.eval(text[:-1], 0)
    r.engine.propose(text[-1])
    assert r.engine.draft() == continued


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("model", ["planted-moe", "dense-plain", "llama"])
def test_the_same_text(gguf, llama_arch, model, temp):
    path = llama_arch if model == "llama" else gguf(model)

    def few_words(_, scores):  # random weights do not repeat themselves
        scores[3:] = -np.inf
        return scores

    def text(speculation):
        llm = Llama(path, speculation=speculation, n_ctx=256, n_threads=1, seed=5, verbose=False)
        try:
            words = llm.generate(PROMPT, temp=temp, logits_processor=LogitsProcessorList([few_words]))
            return list(islice(words, 120)), llm.speculation_stats
        finally:
            llm.close()

    drafted, stats = text("ngram")
    assert drafted == text("off")[0]
    assert stats.accepted > 0
