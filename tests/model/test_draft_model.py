"""A caller's own draft_model: drafts by llama-cpp-python's protocol, on any model, never another text."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from draftwood import Llama, OptionError
from draftwood._llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tests.model.rig import PROMPT


def text(llm, n=60, **sampling):
    sampling.setdefault("temp", 0.0)
    return list(islice(llm.generate(list(PROMPT), **sampling), n))


class Oracle:
    """Knows the text; every third draft has a wrong token in it. Keeps what it was shown."""

    def __init__(self, tokens, n=6):
        self.tokens, self.n, self.shown = [*PROMPT, *tokens], n, []

    def __call__(self, input_ids, /, **kwargs):
        self.shown.append(list(input_ids))
        draft = np.array(self.tokens[len(input_ids) : len(input_ids) + self.n], dtype=np.intc)
        if len(self.shown) % 3 == 0 and len(draft) > 2:
            draft[2] = (draft[2] + 1) % 500
        return draft


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("preset", ["moe-mtp", "planted-dense", "dense-plain"])
def test_the_same_text(llama, preset, temp):
    expected = text(llama(preset, speculation="off"), temp=temp)
    oracle = Oracle(expected)
    llm = llama(preset, draft_model=oracle)
    assert llm.speculation == "draft_model"
    assert text(llm, temp=temp) == expected
    stats = llm.speculation_stats
    assert stats.accepted > 20
    assert stats.accepted < stats.drafted, "wrong tokens were refused"
    held = [*PROMPT, *expected]
    assert all(shown == held[: len(shown)] for shown in oracle.shown), (
        "it sees the text, the newest token last"
    )
    assert len(oracle.shown) == stats.rounds


def test_attention_only(llama_arch):
    made = [
        Llama(llama_arch, n_ctx=256, n_threads=1, verbose=False, **s) for s in ({"speculation": "off"}, {})
    ]
    expected = text(made[0])
    made.append(Llama(llama_arch, n_ctx=256, n_threads=1, verbose=False, draft_model=Oracle(expected)))
    assert text(made[2]) == expected
    assert made[2].speculation_stats.accepted > 20
    for llm in made:
        llm.close()


def test_prompt_lookup(llama):
    """llama-cpp-python's own; upstream's loop wants logits_all for it, which we do not pay for."""
    off = llama("planted-moe", speculation="off")
    llm = llama("planted-moe", draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5))
    assert text(llm, 120) == text(off, 120)
    assert llm.speculation_stats.drafted > 0
    assert len(llm.speculation_stats.drafted_by_depth) == 5
    assert not llm._logits_all


def test_long_drafts_are_cut(llama):
    expected = text(llama(speculation="off"))
    assert text(llama(draft_model=Oracle(expected, n=200))) == expected
    short = llama(draft_model=Oracle(expected, n=200), draft_tokens=3)
    assert text(short) == expected
    assert len(short.speculation_stats.drafted_by_depth) == 3


def test_off_asks_nobody(llama):
    oracle = Oracle([])
    llm = llama(speculation="off", draft_model=oracle)
    text(llm)
    assert oracle.shown == []


@pytest.mark.parametrize("bad", [[999999], [-1], None, ["x"], [float("inf")], [[1, 2], [3]], "text"])
def test_what_is_no_draft(llama, bad):
    llm = llama(draft_model=lambda ids: bad)
    with pytest.raises(OptionError, match="from draft_model=; expected token ids"):
        text(llm)
    llm.draft_model = None
    assert text(llm) == text(llama(speculation="off")), "the context is as good as before"


@pytest.mark.parametrize("nothing", [[], np.array([], dtype=np.intc), ()])
def test_an_empty_draft_is_a_plain_step(llama, nothing):
    llm = llama(draft_model=lambda ids: nothing)
    assert text(llm) == text(llama(speculation="off"))
    assert llm.speculation_stats.drafted == 0


def test_a_draft_model_that_raises(llama):
    def broken(ids, /):
        if len(ids) > len(PROMPT) + 5:
            raise KeyError("mine")
        return ids[:2]

    llm = llama(draft_model=broken)
    with pytest.raises(KeyError, match="mine"):
        text(llm)
    expected = text(llama(speculation="off"))
    llm.draft_model = Oracle(expected)
    assert text(llm) == expected


def test_refused_where_nothing_continues_text(gguf):
    with pytest.raises(OptionError, match=r"found 'd.gguf' as draft_model=; expected a LlamaDraftModel"):
        Llama(gguf("moe-mtp"), draft_model="d.gguf", verbose=False)
    with pytest.raises(OptionError, match="expected one way of drafting"):
        Llama(gguf("moe-mtp"), speculation="ngram", draft_model=Oracle([]), verbose=False)
    llm = Llama(gguf("moe-mtp"), embedding=True, draft_model=Oracle([]), verbose=False)
    assert "embedding=True" in llm.speculation_reason
    llm.close()
