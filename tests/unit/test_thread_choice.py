"""src/llama/thread_choice.*: n_threads or n_threads_batch for a verify, by what both took.

It runs without a context: bench/testing_api.py, draftwood-testing.h.
"""

from __future__ import annotations

import itertools

import pytest

from bench.testing_api import ThreadChoice

BATCH, FEW = False, True


def runs(choice: ThreadChoice, n: int, *, batch_us: int, few_us: int, rows: int = 4) -> list[bool]:
    """Verify n times; return where each ran."""
    return [choice.verify(rows, batch_us, few_us)[0] for _ in range(n)]


def test_n_threads_is_tried_once_and_left():
    """Behind a warm-up and four timed verifies, as many as model loading has."""
    assert runs(ThreadChoice(), 12, batch_us=1000, few_us=1800) == [BATCH] * 5 + [FEW] + [BATCH] * 6


def test_it_is_kept_where_it_is_faster_twice():
    ran = runs(ThreadChoice(), 74, batch_us=1000, few_us=900)
    assert ran[:10] == [BATCH] * 5 + [FEW] + [BATCH] * 4
    assert ran[10:] == [FEW] * 64


def test_a_small_difference_is_noise():
    assert runs(ThreadChoice(), 60, batch_us=1000, few_us=960).count(FEW) == 1


@pytest.mark.parametrize("few_us", [1800, 500])
def test_trials_are_told(few_us):
    choice = ThreadChoice()
    ran = [choice.verify(4, 1000, few_us) for _ in range(6)]
    assert ran == [(BATCH, False)] * 5 + [(FEW, True)]


@pytest.mark.parametrize(
    ("few_us", "expected"),
    [
        pytest.param(1300, [64, 128, 256, 512, 1024, 1024], id="slower: after longer and longer pauses"),
        pytest.param(1800, [1024, 1024, 1024], id="much slower: seldom"),
    ],
)
def test_trials_become_seldom(few_us, expected):
    at = [i for i, few in enumerate(runs(ThreadChoice(), 5000, batch_us=1000, few_us=few_us)) if few]
    gaps = [b - a - 1 for a, b in itertools.pairwise(at)]
    assert gaps[: len(expected)] == expected


def test_more_rows_need_no_trial_where_fewer_were_much_slower():
    choice = ThreadChoice()
    assert runs(choice, 8, batch_us=1000, few_us=1800, rows=2).count(FEW) == 1
    assert runs(choice, 60, batch_us=2000, few_us=3600, rows=5).count(FEW) == 0


def test_more_rows_have_a_trial_where_fewer_were_alike():
    choice = ThreadChoice()
    runs(choice, 8, batch_us=1000, few_us=1100, rows=2)
    assert runs(choice, 8, batch_us=2000, few_us=2600, rows=5).count(FEW) == 1


def test_another_program_takes_the_cores_and_leaves_again():
    choice = ThreadChoice()
    runs(choice, 20, batch_us=1000, few_us=1800)
    busy = runs(choice, 40, batch_us=4500, few_us=2000)
    assert busy[-25:] == [FEW] * 25
    quiet = runs(choice, 200, batch_us=1000, few_us=1800)
    assert quiet[-100:].count(FEW) <= 1, "a trial"


def test_a_slower_machine_is_no_reason_to_change():
    """Both take twice as long: what the trial took is old, so another one comes first."""
    choice = ThreadChoice()
    runs(choice, 20, batch_us=1000, few_us=1800)
    assert runs(choice, 100, batch_us=2000, few_us=3600).count(FEW) == 1


def test_a_size_without_a_trial_has_one_once_it_is_slow():
    choice = ThreadChoice()
    runs(choice, 8, batch_us=1000, few_us=1800, rows=2)
    runs(choice, 8, batch_us=2000, few_us=3600, rows=5)
    busy = runs(choice, 40, batch_us=9000, few_us=4000, rows=5)
    assert busy[-25:] == [FEW] * 25


def test_one_verify_that_was_held_up_changes_nothing():
    choice = ThreadChoice()
    runs(choice, 20, batch_us=1000, few_us=1800)
    choice.verify(4, 50_000, 50_000)
    assert runs(choice, 40, batch_us=1000, few_us=1800).count(FEW) == 0


def test_every_number_of_rows_has_times_of_its_own():
    choice = ThreadChoice()
    for rows in (64, 2):
        assert runs(choice, 6, batch_us=1000, few_us=900, rows=rows) == [BATCH] * 5 + [FEW]
