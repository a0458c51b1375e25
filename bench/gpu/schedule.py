"""Acceptance by a schedule: how many drafts a round keeps, whatever the target sampled.

Random weights agree with their drafter almost never, so lengths that trained models reach are prescribed, and
the text that comes out is not the model's. The probabilities are those of llama-server's --spec-synth-rates
(common/speculative.cpp at the pin): rates[j] is how often a round keeps at least j + 1 drafts.
Must not know: models, clocks. Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from draftwood.errors import OptionError

Rates = tuple[float, ...]


def geometric(length: float, n_drafts: int) -> Rates:
    """Return rates of n_drafts positions, each accepted with one chance, that yield `length` tokens a round.

    length: mean tokens of a round, the target's own included. Errors: OptionError for one out of reach.
    """
    if not 1.0 <= length <= n_drafts + 1:
        raise OptionError(
            f"found a mean length of {length} with {n_drafts} drafts; expected 1 to {n_drafts + 1}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**j for j in range(1, n_drafts + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return tuple(high**j for j in range(1, n_drafts + 1))


def mean_length(rates: Sequence[float]) -> float:
    """Return the tokens that a round yields on average, the target's own included."""
    return 1.0 + sum(rates)


def accepted(rates: Sequence[float], n_rounds: int, seed: int) -> list[int]:
    """Return how many drafts each of n_rounds keeps, in an order that `seed` shuffles.

    Evenly spaced quantiles instead of draws: the mean is the schedule's to within half a round a position, so
    two segments differ by the machine only.
    """
    quantiles = [(i + 0.5) / n_rounds for i in range(n_rounds)]
    random.Random(seed).shuffle(quantiles)
    return [sum(rate > quantile for rate in rates) for quantile in quantiles]
