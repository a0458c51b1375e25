"""How a prompt is cut into batches: where it is without drafting, also where a draft needs larger ones."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.model.texts import text


@pytest.mark.parametrize("n_ubatch", [64, 128])
@pytest.mark.parametrize("length", [63, 64, 65, 66, 69, 70, 71, 127, 128, 129, 133, 200])
def test_prompts_are_cut_where_they_are_without_drafting(llama, length, n_ubatch):
    """A draft needs a larger batch than the caller gave; prompts are cut by the caller's."""
    prompt = [(7 * i * i + i) % 380 for i in range(length)]
    scores = []
    for speculation in ("mtp", "off"):
        llm = llama(speculation=speculation, n_batch=128, n_ubatch=n_ubatch, logits_all=True)
        tokens = text(llm, 12, prompt)
        scores.append((tokens, llm.scores[: llm.n_tokens].copy()))
        llm.close()
    assert scores[0][0] == scores[1][0]
    assert np.array_equal(scores[0][1], scores[1][1])


@pytest.mark.parametrize(
    "small", [{"n_batch": 1}, {"n_batch": 8}, {"n_ubatch": 3}, {"n_batch": 1, "n_ubatch": 1}]
)
def test_small_batches_are_raised_in_words(llama, off, small):
    with pytest.warns(UserWarning, match="a draft needs at least 18") as seen:
        on = llama(speculation="mtp", draft_tokens=16, **small)
    assert len(seen) == 1
    assert seen[0].filename == __file__ or "conftest" in seen[0].filename
    for name, value in small.items():
        assert f"{name}={value}" in str(seen[0].message)
    assert on.n_batch >= 18
    assert text(on, 40) == text(off, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(llama(speculation="off", **small), 40) == text(off, 40)


@pytest.mark.parametrize("small", [{"n_batch": 8}, {"n_ubatch": 64}, {"n_ubatch": 0}], ids=str)
@pytest.mark.filterwarnings("ignore:found n_:UserWarning")
def test_raised_batches_do_not_move_the_cut(llama, small):
    """The longest draft needs batches of 65, which are not row-exact; the prompt still enters as asked."""
    prompt = [(7 * i * i + 3 * i) % 380 for i in range(150)]
    seen = []
    for speculation in ("mtp", "off"):
        llm = llama("q4k", speculation=speculation, draft_tokens=63, logits_all=True, **small)
        seen.append((text(llm, 12, prompt), llm.scores[:150].copy()))
    assert llm.speculation == "off"
    assert seen[0][0] == seen[1][0]
    assert np.array_equal(seen[0][1], seen[1][1])


def test_a_pickled_llama_cuts_as_its_original(llama):
    with pytest.warns(UserWarning, match="a draft needs"):
        llm = llama(speculation="mtp", n_batch=3)
    assert llm.__getstate__()["n_batch"] == 3
