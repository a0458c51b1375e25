"""sample() by hand: the row of the position asked for or an error in words. Generations stay as they are.

Upstream ends the process where a row has no logits, and takes another position's where one was set back.
"""

from __future__ import annotations

import itertools

import pytest
from draftwood import OptionError

from tests.model.texts import STOCK, P, fresh


@pytest.fixture(params=["off", "mtp", "tree", "ngram", "stock"])
def any_llm(request, llama):
    if request.param == "stock":
        return llama(**STOCK)
    return llama(speculation=request.param)


def test_sample_between_two_tokens_of_a_generation(any_llm):
    """It sees the row of the newest token, and the text is the same."""
    expected = fresh(any_llm, 20)
    for at in (1, 2, 3, 7, None):  # None: after each one
        any_llm.reset()
        got = []
        for token in itertools.islice(any_llm.generate(P, temp=0.0), 20):
            got.append(token)
            if at in (None, len(got)):
                assert any_llm.sample(temp=0.0) == token
                assert any_llm.sample(temp=0.0, idx=any_llm.n_tokens - 1) == token
        assert got == expected


def test_sample_counts_nothing(on):
    fresh(on, 1)
    before = on.speculation_stats.emitted
    on.sample(temp=0.0)
    assert on.speculation_stats.emitted == before


def test_a_row_that_was_set_back_from(any_llm):
    any_llm.eval(P)
    first = any_llm.sample(temp=0.0)
    any_llm.eval([5])
    any_llm.n_tokens -= 1
    with pytest.raises(OptionError, match=f"no logits of position {len(P) - 1}"):
        any_llm.sample(temp=0.0)
    any_llm.n_tokens += 1
    assert any_llm.sample(temp=0.0) >= 0
    any_llm.reset()
    any_llm.eval(P)
    assert any_llm.sample(temp=0.0) == first


def test_a_loaded_state_has_no_row(any_llm):
    any_llm.eval(P)
    state, first = any_llm.save_state(), any_llm.sample(temp=0.0)
    any_llm.eval([5, 6, 7])
    any_llm.load_state(state)
    with pytest.raises(OptionError, match="no logits of position"):
        any_llm.sample(temp=0.0)
    any_llm.reset()
    any_llm.eval(P)
    assert any_llm.sample(temp=0.0) == first


def test_a_state_loaded_before_anything_was_decoded(any_llm, llama):
    other = llama(speculation="off")
    other.eval(P)
    any_llm.load_state(other.save_state())
    with pytest.raises(OptionError, match="no logits of position"):
        any_llm.sample(temp=0.0)


def test_sample_of_an_empty_context(any_llm):
    with pytest.raises(OptionError, match="the context holds 0 tokens"):
        any_llm.sample()


@pytest.mark.parametrize("idx", [0, -1, len(P), 100])
def test_rows_that_are_not_there(any_llm, idx):
    any_llm.eval(P)
    with pytest.raises(OptionError, match="expected"):
        any_llm.sample(temp=0.0, idx=idx)
    assert any_llm.sample(temp=0.0) == any_llm.sample(temp=0.0, idx=len(P) - 1)


@pytest.mark.parametrize("settings", [{"speculation": "mtp"}, {"speculation": "off"}, STOCK])
def test_all_rows_of_an_eval(llama, settings):
    llm = llama(logits_all=True, **settings)
    expected = [fresh(llm, 1, P[: n + 1])[0] for n in range(len(P))]
    llm.reset()
    llm._sampler = None
    llm.eval(P)
    assert [llm.sample(temp=0.0, idx=i) for i in range(len(P))] == expected
    for idx in (-1, 100):
        with pytest.raises(OptionError, match=f"position {idx};"):
            llm.sample(temp=0.0, idx=idx)
