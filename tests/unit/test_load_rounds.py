"""src/round/load_schedule.*: which rounds a load measures, by tables. Through draftwood-testing.h."""

from __future__ import annotations

import pytest

from bench.testing_api import load_rounds

QUICK = (0, 0)


@pytest.mark.parametrize(
    ("longest", "n_warmup", "slow", "fast_us", "expected"),
    [
        pytest.param(8, 1, QUICK, 1000, {0: 5, 8: 5, 1: 5, 3: 5, 7: 5}, id="CPU"),
        pytest.param(8, 2, QUICK, 1000, {0: 6, 8: 6, 1: 6, 3: 6, 7: 6}, id="GPU: a third warm-up round"),
        pytest.param(
            8, 2, (2, 400_000), 1000, {0: 6, 8: 6, 1: 6, 3: 6, 7: 6}, id="GPU: loading kernels does not count"
        ),
        pytest.param(4, 1, QUICK, 1000, {0: 5, 4: 5, 1: 5, 3: 5}, id="drafts up to 4"),
        pytest.param(1, 1, QUICK, 1000, {0: 5, 1: 5}, id="drafts of one"),
        pytest.param(8, 1, QUICK, 26_000, {0: 4, 8: 5, 1: 5, 3: 5}, id="26 ms a round: no drafts of 7"),
        pytest.param(8, 1, QUICK, 120_000, {0: 4, 8: 3}, id="0.12 s a round: one timed draft"),
        pytest.param(8, 1, QUICK, 10_000_000, {0: 2, 8: 3}, id="10 s a round: one of each"),
        pytest.param(8, 1, QUICK, 50_000, {0: 4, 8: 5, 1: 3}, id="300 ms are within the budget"),
    ],
)
def test_rounds_of_a_load(longest, n_warmup, slow, fast_us, expected):
    assert load_rounds(longest, n_warmup, slow=slow, fast_us=fast_us) == expected


@pytest.mark.parametrize(
    ("fast_us", "busy", "expected"),
    [
        pytest.param(1000, (0, 1), {0: 5, 8: 5, 1: 5, 3: 5, 7: 5}, id="a quiet machine"),
        pytest.param(1000, (20, 2), {0: 9, 8: 10, 1: 10, 3: 10, 7: 10}, id="another program ends: all again"),
        pytest.param(
            1000, (1000, 2), {0: 5, 8: 5, 1: 5, 3: 5, 7: 5}, id="it never ends: its load is the load"
        ),
        pytest.param(1000, (3, 2), {0: 5, 8: 5, 1: 5, 3: 5, 7: 5}, id="it ended within the plain steps"),
        pytest.param(26_000, (20, 2), {0: 4, 8: 5}, id="past the budget: as it is"),
    ],
)
def test_a_load_beside_another_program(fast_us, busy, expected):
    assert load_rounds(8, 1, slow=QUICK, fast_us=fast_us, busy=busy) == expected
