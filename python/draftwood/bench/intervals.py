"""Medians and how sure they are, whatever the distribution. Must not know: models, modes.

The interval is the one of the sign test, from order statistics: the median lies between the k-th smallest
and the k-th largest of n values unless fewer than k of them fall on one side of it, and how many fall there
is binomial(n, 1/2). No resampling, so the same values always give the same interval.
Test: tests/unit/test_bench_figures.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_PAIRS = 9
"""Paired repeats that a claim about speed needs (design section 10)."""
FEWEST = 6
"""Paired repeats that an interval needs."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios and its 95 % interval; None where the pairs are too few for one."""

    median: float
    low: float | None
    high: float | None

    def figures(self, digits: int = 3) -> tuple[float, float | None, float | None]:
        """Return median, low and high as a row of results holds them."""
        low, high = (None if each is None else round(each, digits) for each in (self.low, self.high))
        return round(self.median, digits), low, high


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return an interval that holds the median with at least 95 % probability, whatever the distribution.

    It runs from the k-th smallest to the k-th largest value; 2nd and 8th of 9, which holds with 96.1 %.
    Errors: ValueError under 6 values, where even smallest to largest holds less.
    """
    n = len(values)
    if n < FEWEST:
        raise ValueError(f"found {n} values; expected at least {FEWEST}")
    under = [sum(math.comb(n, i) for i in range(k)) / 2**n for k in range(1, n // 2 + 1)]
    k = sum(tail <= 0.025 for tail in under)  # the k-th smallest lies over the median with `under[k - 1]`
    ordered = sorted(values)
    return ordered[k - 1], ordered[-k]


def paired(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[Ratio, list[float]]:
    """Return the candidate's speed over the baseline's, from seconds taken side by side, and each pair's."""
    ratios = [slow / fast for slow, fast in zip(baseline, candidate, strict=True)]
    low, high = interval(ratios) if len(ratios) >= FEWEST else (None, None)
    return Ratio(statistics.median(ratios), low, high), ratios
