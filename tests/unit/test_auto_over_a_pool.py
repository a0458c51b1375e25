"""What "auto" makes of rounds over a pool of experts: a simulated card, with times measured on an H100.

Times of loading are of one token again and again, whose experts are there: half of what text takes. Contract:
src/round/cost_model.h. Must not know: how a choice is made.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from bench.testing_api import CostModel
from tests.unit.cost_curves import curve

DRAFT = {1: 190.0, 2: 320.0, 3: 450.0, 4: 580.0, 5: 710.0}
LONGEST = max(DRAFT)
ROUNDS, TEXTS = 72, 12


@dataclass
class Card:
    """Microseconds of a round by its rows, and how far a round's time is from the mean."""

    at_load: dict[int, float]
    on_text: dict[int, float]
    spread: float
    catch_up: float = 1200.0
    graph: float = 15_000.0
    """Of the first two rounds of a size: built, and captured."""
    copies_experts: bool = True
    seen: Counter[int] = field(default_factory=Counter)

    def verify(self, chance: random.Random, n_rows: int) -> float:
        self.seen[n_rows] += 1
        builds = self.graph if n_rows > 1 and self.seen[n_rows] <= 2 else 0.0
        return builds + self.on_text[n_rows] * max(0.6, chance.gauss(1.0, self.spread))


QUARTER = {
    "at_load": {1: 2300.0, 2: 2900.0, 4: 4500.0, 6: 9700.0},
    "on_text": {1: 5400.0, 2: 9700.0, 3: 12_900.0, 4: 16_300.0, 5: 20_000.0, 6: 22_800.0},
    "spread": 0.25,
}
TWO_THIRDS = {
    "at_load": {1: 2270.0, 2: 2870.0, 4: 3670.0, 6: 8090.0},
    "on_text": {1: 2720.0, 2: 3900.0, 3: 5000.0, 4: 6000.0, 5: 7400.0, 6: 8900.0},
    "spread": 0.2,
}
ALL = {
    "at_load": {1: 1880.0, 2: 2250.0, 4: 3000.0, 6: 3500.0},
    "on_text": {1: 1880.0, 2: 2250.0, 3: 2650.0, 4: 3000.0, 5: 3300.0, 6: 3550.0},
    "spread": 0.02,
    "copies_experts": False,
}


def speed(card: Card, acceptance: float, seed: int) -> float:
    """Return the speed over plain decode's, of texts behind the first one."""
    chance = random.Random(seed)
    times = curve(DRAFT, card.at_load)
    model = CostModel(n_warmup=2, shares_cores=False, copies_experts=card.copies_experts, curve=times)
    took = tokens = 0.0
    drafted_before = False
    for text in range(TEXTS + 1):
        model.session_prompt(64)
        for _ in range(ROUNDS):
            model.update()  # as a session does with each round
            _, n = model.choose(LONGEST)
            verify = card.verify(chance, n + 1)
            behind = card.catch_up if n and not drafted_before else 0.0
            drafted_before = n > 0
            accepted = 0
            while accepted < n and chance.random() < acceptance:
                accepted += 1
            model.add_acceptance(n, accepted)
            if n and not behind:
                model.session_draft(n, DRAFT[n])
            model.session_round(n + 1, verify + behind, drafted=n > 0, n_tokens=accepted + 1)
            if text:
                took += verify + behind + DRAFT.get(n, 0.0)
                tokens += accepted + 1
    return tokens * card.on_text[1] / took


@pytest.mark.parametrize(
    ("card", "acceptance", "least"),
    [
        pytest.param(QUARTER, 0.0, 0.99, id="a quarter, no draft accepted"),
        pytest.param(QUARTER, 0.3, 0.98, id="a quarter, 0.3"),
        pytest.param(QUARTER, 0.6, 0.98, id="a quarter, 0.6"),
        pytest.param(QUARTER, 0.9, 1.04, id="a quarter, 0.9"),
        pytest.param(TWO_THIRDS, 0.0, 0.995, id="two thirds, no draft accepted"),
        pytest.param(TWO_THIRDS, 0.3, 0.99, id="two thirds, 0.3"),
        pytest.param(TWO_THIRDS, 0.6, 1.0, id="two thirds, 0.6"),
        pytest.param(TWO_THIRDS, 0.9, 1.35, id="two thirds, 0.9"),
        pytest.param(ALL, 0.0, 0.99, id="all, no draft accepted"),
        pytest.param(ALL, 0.3, 0.99, id="all, 0.3"),
        pytest.param(ALL, 0.9, 1.9, id="all, 0.9"),
    ],
)
def test_auto_is_not_slower_than_plain_decode(card, acceptance, least):
    """But for what its trials take, and the graphs of sizes that it has not run yet."""
    found = [speed(Card(**card), acceptance, seed) for seed in range(7)]
    assert statistics.median(found) >= least, found
