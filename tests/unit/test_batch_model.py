"""src/round/batch_model.*: how many tokens each sequence of a batch drafts, by what rounds together take.

It runs without a context: bench/testing_api.py, draftwood-testing.h.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draftwood.engine.engine import Curve
from draftwood.errors import OptionError

from bench.testing_api import BatchModel, CostModel
from tests.unit.cost_curves import H200, TWO_CORES, curve, linear

Times = Callable[[int, int], float]  # of sequences, and of rows or tokens of each

UNKNOWN = curve({}, {})
FREE_ROWS = linear(row=1.0)
DEAR_ROWS = linear(row=1000.0)
LONGEST = 5
FIRST_PLAIN = 2  # rounds, until the time of plain steps together is known


def flat(base: float, row: float) -> Times:
    return lambda sequences, n: base + row * sequences * n


def world(
    solo: Curve, rates: list[float], verify: Times, draft: Times, n: int, *, on_gpu: bool = False
) -> list[list[int]]:
    """Let the model choose n rounds, each of which takes what verify and draft say; return its choices."""
    costs = CostModel(curve=solo, shares_cores=not on_gpu)
    model = BatchModel(costs, shares_cores=not on_gpu)
    chosen = []
    for _ in range(n):
        lengths = model.choose(rates, [LONGEST] * len(rates))
        chosen.append(lengths)
        drafting = [length for length in lengths if length > 0]
        if drafting:
            model.add_draft(len(drafting), max(drafting), draft(len(drafting), max(drafting)))
        rows = max(lengths) + 1
        model.add_verify(len(rates), rows, verify(len(rates), rows))
    return chosen


def test_first_rounds_are_plain_to_know_what_they_take():
    chosen = world(FREE_ROWS, [0.9] * 4, flat(1000, 1), flat(10, 1), 10)
    assert chosen[:FIRST_PLAIN] == [[0] * 4] * FIRST_PLAIN
    assert chosen[FIRST_PLAIN:] == [[LONGEST] * 4] * (10 - FIRST_PLAIN)


def test_nobody_drafts_where_rows_are_dear():
    """As with many sequences: the batch has as many rows as the device computes at once."""
    chosen = world(DEAR_ROWS, [0.9] * 8, flat(10, 1000), flat(10, 1), 30)
    assert chosen == [[0] * 8] * 30


def test_fewer_sequences_draft_further():
    """A batch that is bound by its rows: 1000 microseconds, and 60 for each."""
    lengths = {
        n: max(world(linear(60.0), [0.5] * n, flat(1000, 60), flat(20, 1), 20)[-1]) for n in (2, 4, 8, 16)
    }
    assert lengths[2] >= lengths[4] >= lengths[8] >= lengths[16]
    assert lengths[2] > lengths[16] == 0


def test_only_those_whose_drafts_are_accepted():
    """In one graph rows are everybody's, but a draft of no use takes time to make."""
    chosen = world(FREE_ROWS, [0.9, 0.01, 0.8, 0.0], flat(1000, 1), lambda n, k: 100.0 * n * k, 10)
    assert chosen[-1][0] > 0
    assert chosen[-1][2] > 0
    assert chosen[-1][1] == chosen[-1][3] == 0


def test_rounds_together_teach_what_a_sequence_alone_does_not_know():
    """Alone rows seem free; in the batch they are not: drafts end as soon as that is known."""
    chosen = world(FREE_ROWS, [0.7] * 4, flat(10, 1000), flat(10, 1), 40)
    assert chosen[FIRST_PLAIN] == [LONGEST] * 4
    assert chosen[-1] == [0] * 4


def test_a_curve_that_frightens_is_corrected_by_trials():
    """Alone a row seems to cost a step. A trial of the batch shows that it does not."""
    chosen = world(DEAR_ROWS, [0.9] * 4, flat(1000, 1), flat(10, 1), 120)
    assert chosen[:30] == [[0] * 4] * 30
    assert chosen[-1] != [0] * 4


def test_trials_become_seldom():
    chosen = world(DEAR_ROWS, [0.9] * 8, flat(10, 1000), flat(10, 1), 2000)
    trials = [lengths for lengths in chosen if any(lengths)]
    assert trials == [[2] * 8] * len(trials)
    assert 4 <= len(trials) <= 16


def test_plain_steps_are_timed_now_and_then():
    chosen = world(FREE_ROWS, [0.9] * 4, flat(1000, 1), flat(10, 1), 1000)
    plain = [i for i, lengths in enumerate(chosen) if not any(lengths)]
    assert plain[:FIRST_PLAIN] == list(range(FIRST_PLAIN))
    assert 2 <= len(plain) - FIRST_PLAIN <= 4


def test_without_any_times_they_are_measured():
    chosen = world(UNKNOWN, [0.9] * 4, flat(1000, 1), flat(10, 1), 20)
    assert chosen[:FIRST_PLAIN] == [[0] * 4] * FIRST_PLAIN
    assert any(chosen[FIRST_PLAIN])
    assert chosen[-1] == [LONGEST] * 4
    assert world(UNKNOWN, [0.5] * 4, flat(10, 1000), flat(10, 1), 20)[-1] == [0] * 4


@pytest.mark.parametrize("busy", [3.0, 0.4])
def test_a_machine_of_another_speed_is_no_reason_to_change(busy):
    """All sizes take longer, or less: what was measured before stands to what comes as it did."""
    costs = CostModel(curve=linear(60.0))
    model = BatchModel(costs)
    for rows in (1, 1, 2, 3, 4, 6, 1, 3):
        model.add_verify(4, rows, 1000 + 60 * 4 * rows)
    for tokens in (1, 2, 3, 5):
        model.add_draft(4, tokens, 40 * tokens)
    before = model.choose([0.8] * 4, [LONGEST] * 4)
    assert max(before) > 0
    for _ in range(20):
        rows = max(before) + 1
        model.add_verify(4, rows, busy * (1000 + 60 * 4 * rows))
        model.add_draft(4, max(before), busy * 40 * max(before))
        after = model.choose([0.8] * 4, [LONGEST] * 4)
        assert abs(max(after) - max(before)) <= 1


def test_one_round_that_was_held_up_changes_nothing():
    costs = CostModel(curve=linear(60.0))
    model = BatchModel(costs)
    for rows in (1, 1, 3, 3, 3, 3):
        model.add_verify(4, rows, 1000 + 60 * 4 * rows)
    model.add_draft(4, 2, 80)
    before = model.choose([0.8] * 4, [2] * 4)
    model.add_verify(4, 3, 200_000)
    assert model.choose([0.8] * 4, [2] * 4) == before == [2] * 4


@pytest.mark.parametrize(("solo", "on_gpu"), [(H200, True), (TWO_CORES, False)], ids=["h200", "two-cores"])
def test_machines_that_were_measured(solo, on_gpu):
    """One more sequence never makes drafts longer where times are those of as many rows alone."""
    costs = CostModel(curve=solo, shares_cores=not on_gpu)
    found = []
    for n in (2, 4, 8):
        model = BatchModel(costs, shares_cores=not on_gpu)
        for _ in range(FIRST_PLAIN):
            model.add_verify(n, 1, solo.verify_us[1] + (n - 1) * (solo.verify_us[3] - solo.verify_us[1]) / 2)
        found.append(max(model.choose([0.8] * n, [LONGEST] * n)))
    assert found == sorted(found, reverse=True)


def test_bad_input():
    model = BatchModel(CostModel(curve=FREE_ROWS))
    with pytest.raises(OptionError, match="n_sequences is 0; expected 1 to"):
        model.add_verify(0, 1, 10)
    with pytest.raises(OptionError, match="n_rows is 65; expected 1 to 64"):
        model.add_verify(1, 65, 10)
    with pytest.raises(OptionError, match="longest is 64; expected 0 to 63"):
        model.choose([0.5], [64])
    assert model.choose([0.5, 0.5], [0, 0]) == [0, 0]
