"""src/llama/thread_choice.*: which threads verifies run on, by what they took.

It runs without a context: bench/testing_api.py, draftwood-testing.h.
"""

from __future__ import annotations

import itertools

from bench.testing_api import ThreadChoice

PROMPTS, STEPS = False, True


def runs(choice: ThreadChoice, n: int, *, prompts_us: int, steps_us: int, rows: int = 4) -> list[bool]:
    """Verify n times; return where each ran."""
    return [choice.verify(rows, prompts_us, steps_us)[0] for _ in range(n)]


def test_plain_steps_threads_are_tried_once_and_left():
    choice = ThreadChoice()
    first = runs(choice, 10, prompts_us=1000, steps_us=1800)
    assert first == [PROMPTS, PROMPTS, PROMPTS, STEPS, *[PROMPTS] * 6]


def test_they_are_kept_where_they_are_faster():
    choice = ThreadChoice()
    assert runs(choice, 70, prompts_us=1000, steps_us=900)[3:67] == [STEPS] * 64


def test_a_small_difference_is_noise():
    assert runs(ThreadChoice(), 60, prompts_us=1000, steps_us=960).count(STEPS) == 1


def test_trials_are_no_times_of_their_size():
    choice = ThreadChoice()
    trials = [choice.verify(4, 1000, 1800)[1] for _ in range(10)]
    assert trials == [False] * 3 + [True] + [False] * 6
    better = ThreadChoice()
    assert [better.verify(4, 1000, 500)[1] for _ in range(10)] == [False] * 3 + [True] + [False] * 6


def test_trials_become_seldom():
    ran = runs(ThreadChoice(), 5000, prompts_us=1000, steps_us=1800)
    at = [i for i, steps in enumerate(ran) if steps]
    gaps = [b - a - 1 for a, b in itertools.pairwise(at)]
    assert gaps == [64, 128, 256, 512, 1024, 1024, 1024][: len(gaps)]
    assert len(gaps) >= 6


def test_more_rows_need_no_trial_where_fewer_were_clearly_slower():
    choice = ThreadChoice()
    assert runs(choice, 8, prompts_us=1000, steps_us=1800, rows=2).count(STEPS) == 1
    assert runs(choice, 60, prompts_us=2000, steps_us=3600, rows=5).count(STEPS) == 0


def test_more_rows_have_a_trial_where_fewer_were_alike():
    choice = ThreadChoice()
    runs(choice, 8, prompts_us=1000, steps_us=1100, rows=2)
    assert runs(choice, 8, prompts_us=2000, steps_us=2600, rows=5).count(STEPS) == 1


def test_another_program_takes_the_cores_and_leaves_again():
    choice = ThreadChoice()
    runs(choice, 20, prompts_us=1000, steps_us=1800)
    busy = runs(choice, 40, prompts_us=4500, steps_us=2000)
    assert busy[:3] == [PROMPTS] * 3
    assert busy[3:] == [STEPS] * 37, "three of the newest five are slow"
    quiet = runs(choice, 200, prompts_us=1000, steps_us=1800)
    assert quiet[-100:].count(STEPS) <= 1, "a trial"


def test_a_size_without_a_trial_has_one_once_it_is_slow():
    choice = ThreadChoice()
    runs(choice, 8, prompts_us=1000, steps_us=1800, rows=2)
    runs(choice, 8, prompts_us=2000, steps_us=3600, rows=5)
    busy = runs(choice, 40, prompts_us=9000, steps_us=4000, rows=5)
    assert busy[-30:] == [STEPS] * 30


def test_one_verify_that_was_held_up_changes_nothing():
    choice = ThreadChoice()
    runs(choice, 20, prompts_us=1000, steps_us=1800)
    choice.verify(4, 50_000, 50_000)
    assert runs(choice, 40, prompts_us=1000, steps_us=1800).count(STEPS) == 0


def test_any_number_of_rows():
    for rows in (1, 64, 65, 1000):
        assert runs(ThreadChoice(), 3, prompts_us=10, steps_us=20, rows=rows) == [PROMPTS] * 3
