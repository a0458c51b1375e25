"""What a pool of experts would have copied: its policy on recorded choices, a token a step, without guesses.

The policy is src/ops/expert-slots/policy.h: the resident expert that was used least of late goes. Must not
know: models, pools, clocks. Test: tests/model/test_expert_plan.py (a pool that runs counts the same).
"""

from __future__ import annotations

import numpy as np

_EPOCH = 64  # steps in which a count halves
_USE = 256
_MOST = 65535


class Slots:
    """One layer's slots. Expert 0 is worth most at the start."""

    def __init__(self, n_experts: int, n_slots: int) -> None:
        self.heat = [0] * n_experts
        self.resident = set(range(n_slots))
        self.hits = self.misses = 0
        self._epoch = [0] * n_experts
        self._last = [n_slots - e if e < n_slots else 0 for e in range(n_experts)]
        self._step = 0

    def hot(self, expert: int) -> int:
        """Return its uses of late."""
        return self.heat[expert] >> (self._step // _EPOCH - self._epoch[expert])

    def step(self, chosen: list[int]) -> None:
        """Run a token's experts, the best first."""
        self._step += 1
        missing = sorted(set(chosen) - self.resident)
        self.hits += len(chosen) - len(missing)
        self.misses += len(missing)
        for expert in missing:
            free = self.resident - set(chosen)
            self.resident.remove(min(free, key=lambda e: (self.hot(e), self._last[e])))
            self.resident.add(expert)
        for place, expert in enumerate(chosen):
            self.heat[expert] = min(self.hot(expert) + _USE, _MOST)
            self._epoch[expert] = self._step // _EPOCH
            self._last[expert] = self._step * 2048 + place + 1


def misses(choices: np.ndarray, n_experts: int, n_slots: int, warm: int = 0) -> int:
    """Return how many experts pools of n_slots a layer would have copied for i32[n_layers, n_tokens, k].

    warm: tokens at the start that fill the slots and are not counted.
    """
    total = 0
    for layer in choices.tolist():
        slots = Slots(n_experts, n_slots)
        for chosen in layer[:warm]:
            slots.step(chosen)
        before = slots.misses
        for chosen in layer[warm:]:
            slots.step(chosen)
        total += slots.misses - before
    return total
