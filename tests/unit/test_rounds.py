"""draftwood/bench/rounds.py: what counts as a round, and which are left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftwood.bench.rounds import REPEAT, generate_rounds, mean_tokens, repeats


def test_repeats_wants_sixteen_tokens_seen_before():
    once = list(range(REPEAT))
    assert not repeats(once, REPEAT - 1)
    twice = once + once
    assert repeats(twice, 2 * REPEAT - 1)
    assert not repeats(twice, 2 * REPEAT - 2)


def test_repeated_rounds_are_left_out_and_counted():
    ids = list(range(40)) + list(range(40))
    rounds = [(20, 1), (30, 3), (79, 6)]  # the last one sits in the repetition
    assert mean_tokens([(ids, rounds)]) == (2.0, pytest.approx(1 / 3, abs=1e-3))
    assert mean_tokens([(ids, [(79, 6)])]) == (0.0, 1.0)


def test_rounds_are_read_off_the_counter():
    class Scripted:
        """Rounds 0 (prompt), 1 (three tokens), 2 (one), 3 (cut short)."""

        script = (0, 1, 1, 1, 2, 3)
        speculation_stats = SimpleNamespace(rounds=0)

        def reset(self):
            pass

        reset_speculation_stats = reset

        def generate(self, prompt, **sampling):
            for i, rounds in enumerate(self.script):
                self.speculation_stats = SimpleNamespace(rounds=rounds)
                yield 100 + i

    ids, rounds = generate_rounds(Scripted(), [7, 8], 6, temp=0.0)
    assert ids == [7, 8, 100, 101, 102, 103, 104, 105]
    assert rounds == [(2, 3), (5, 1)]


def test_training_machines_take_them_without_draftwood():
    code = """
import sys
sys.modules["draftwood"] = None  # any import of it fails
from bench.rounds import Rounds, mean_tokens
print(mean_tokens([([1, 2, 3], [(1, 2)])]), Rounds)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "(2.0, 0.0) list[tuple[int, int]]\n"
