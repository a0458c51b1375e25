"""DFlash drafters whose layers have sliding windows: their caches forget, texts stay the same."""

from __future__ import annotations

from itertools import islice

import pytest
from draftwood import Llama

from tests.model.test_dflash import DRAFTER, TARGET, heldout, with_windows

N_KEPT = (
    700,
    400,
    650,
    100,
    699,
)  # tokens of one text: each prompt cuts the one before, or goes on behind it
SETTINGS = {"chain": {}, "tree": {"tree_budget": 16}, "small batches": {"n_batch": 64, "n_ubatch": 64}}


def load(**settings):
    common = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "seed": 3, "verbose": False}
    return Llama(str(TARGET), **{**common, **settings})


def texts(llm, story):
    return [list(islice(llm.generate(story[:n], temp=0.0), 100)) for n in N_KEPT]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return with_windows(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def plain():
    llm = load(speculation="off")
    story = heldout(llm, 700)
    yield story, texts(llm, story)
    llm.close()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_the_same_text(plain, windowed, settings):
    """The cache of a window forgets what is behind it, also where a later prompt cuts a longer one."""
    story, expected = plain
    on = load(speculation="dflash", drafter=windowed, **settings)
    assert texts(on, story) == expected
    stats = on.speculation_stats
    assert (stats.failed_drafts, stats.cold_rounds) == (0, 0)
    assert stats.tokens_per_round > 2.0
    on.close()


def test_a_window_takes_less_memory(windowed):
    """Two of three layers have cells for a window and a batch, not for the context."""
    n_bytes = []
    for drafter in (DRAFTER, windowed):
        llm = load(speculation="dflash", drafter=drafter, n_ctx=8192, n_ubatch=64, n_batch=64)
        n_bytes.append(llm.speculation_stats.drafter_bytes)
        llm.close()
    layer = 8192 * 2 * 2 * 64 * 2  # keys and values of two heads of 64, F16
    assert n_bytes[0] - n_bytes[1] > 1.8 * layer


def test_a_state_that_was_saved(plain, windowed):
    story, expected = plain
    on = load(speculation="dflash", drafter=windowed)
    first = list(islice(on.generate(story, temp=0.0), 40))
    state = on.save_state()
    list(islice(on.generate(story[:100], temp=0.0), 40))
    on.load_state(state)
    assert first + list(islice(on.generate([*story, *first], temp=0.0), 60)) == expected[0]
    assert on.speculation_stats.failed_drafts == 0
    on.close()
