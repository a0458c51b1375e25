"""tools/tiny_moe/yarn.py by hand: which frequencies YaRN keeps, which it divides, and the magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny_moe.yarn import Yarn, frequencies, rotate


def test_plain_rope():
    inverse, magnitude = frequencies(8, 1e4)
    np.testing.assert_allclose(inverse, [1, 0.1, 0.01, 0.001], rtol=1e-12)
    assert magnitude == 1


@pytest.mark.parametrize("original", [512, 4096, 32768])
def test_fast_pairs_stay_and_slow_pairs_are_divided(original):
    plain, _ = frequencies(64, 1e4)
    inverse, magnitude = frequencies(64, 1e4, Yarn(64, original))
    turns = original * plain / (2 * math.pi)
    kept = inverse / plain
    # The borders are rounded outwards to whole pairs: one pair beyond them the rule holds strictly.
    fast, slow = turns > 32 * plain[0] / plain[1], turns < plain[1] / plain[0]
    assert fast.any()
    assert slow.any() or original > 4096
    np.testing.assert_allclose(kept[fast], 1)
    np.testing.assert_allclose(kept[slow], 1 / 64)
    assert (np.diff(kept) <= 1e-12).all()
    assert magnitude == pytest.approx(1.4158883, abs=1e-7)


def test_a_factor_of_one_changes_nothing():
    plain, one = frequencies(64, 1e4), frequencies(64, 1e4, Yarn(1, 512))
    np.testing.assert_allclose(one[0], plain[0], rtol=1e-15)
    assert one[1] == plain[1] == 1


def test_scores_depend_on_distance_and_carry_the_magnitude_twice():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 64))
    yarn = Yarn(64, 512)

    def score(i, j):
        return float((rotate(q, np.array([i]), 1e4, yarn) * rotate(k, np.array([j]), 1e4, yarn)).sum())

    assert score(30_000, 29_900) == pytest.approx(score(100, 0), rel=1e-9)
    assert score(7, 7) == pytest.approx(float((q * k).sum()) * frequencies(64, 1e4, yarn)[1] ** 2)
