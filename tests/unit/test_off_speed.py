"""bench/off_speed.py's interval: it holds the true median as often as it promises."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from off_speed import interval


def test_known_ranks():
    """Ranks of the 95 % interval of a median as tables of the sign test give them."""
    for n, low, high in ((6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15)):
        values = [float(i) for i in range(1, n + 1)]
        random.Random(n).shuffle(values)
        assert interval(values) == (low, high)


def test_it_holds_the_median():
    dice = random.Random(4)
    held = 0
    for _ in range(2000):
        low, high = interval([dice.expovariate(1.0) for _ in range(9)])
        held += low <= 0.6931 <= high
    assert held / 2000 >= 0.94


def test_too_few():
    with pytest.raises(ValueError, match="found 5 values; expected at least 6"):
        interval([1.0] * 5)
