"""dw_expert_slots on the CPU against its model in Python: results, table, counters, bytes in the slots."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.expert_slots import check

CASES = {
    "small": {"n_experts": 16, "k": 3, "n_slots": 6, "sizes": [96, 160]},
    "one slot": {"n_experts": 8, "k": 2, "n_slots": 1, "sizes": [48]},
    "all but one": {"n_experts": 16, "k": 4, "n_slots": 15, "sizes": [34, 34, 210]},
    "all": {"n_experts": 8, "k": 2, "n_slots": 8, "sizes": [64]},
    "many": {"n_experts": 256, "k": 8, "n_slots": 64, "sizes": [144, 144, 210]},
    "no multiple of a warp": {"n_experts": 60, "k": 4, "n_slots": 20, "sizes": [18]},
    "most": {"n_experts": 1024, "k": 10, "n_slots": 100, "sizes": [32]},
}
STEPS = [1, 1, 1, 4, 1, 16, 1, 64, 1, 65, 1, 200, 2, *[1] * 70]


@pytest.fixture
def draw():
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.mark.parametrize("policy", ["frequency", "lru"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_op_is_its_model(draw, case, policy):
    check("CPU", draw, **case, policy=policy, steps=STEPS)


def test_a_warm_up_fills_nothing(draw):
    """llama.cpp's warm-up chooses every expert."""
    check("CPU", draw, n_experts=8, k=8, n_slots=3, policy="frequency", sizes=[32], steps=[1, 1])
