"""Tests of the CUDA kernels of src/ops/expert-slots, wherever they run: against their model in Python.

tests/gpu/test_expert_pool_cuda.py runs them on a card, test_cuda_slots.py on a CPU. Each gives them a
`backend` for expert_slots.py, and `rng`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.expert_model import random_ids
from tests.ops.expert_slots import LEAST_STAGED_ROWS, Layer, check
from tests.ops.test_expert_guess import MORE
from tests.ops.test_expert_slots import CASES, STEPS


@pytest.mark.parametrize("policy", ["frequency", "lru"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_op_is_its_model(rng, backend, case, policy):
    check(backend, rng, **case, policy=policy, steps=STEPS)


@pytest.mark.parametrize("policy", ["frequency", "lru"])
@pytest.mark.parametrize("case", MORE.values(), ids=MORE)
def test_guesses_are_their_model(rng, backend, case, policy):
    check(backend, rng, **case, policy=policy, steps=[8, *STEPS], guess=True)


def test_a_warm_up_fills_nothing(rng, backend):
    """llama.cpp's warm-up chooses every expert."""
    check(backend, rng, n_experts=8, k=8, n_slots=3, policy="frequency", sizes=[32], steps=[1, 1])


def test_smallest(rng, backend):
    """For compute-sanitizer."""
    check(backend, rng, n_experts=16, k=3, n_slots=6, sizes=[96, 34], policy="frequency", steps=[1, 4, 65])


def places(layer: Layer, ids: np.ndarray) -> np.ndarray:
    """Return where the op sends each pick: an expert, or behind all of them a slot, wherever slots begin."""
    found = layer.run(ids)[0]
    first, n_experts = layer.first_slots[0], layer.layer.n_experts
    return np.where(found < first, found, found - first + n_experts)


@pytest.mark.parametrize("policy", ["frequency", "lru"])
def test_many_steps_choose_as_the_cpu_does(rng, backend, policy):
    """Steps of drafts and of one token, sometimes a prompt, over many halvings of a count."""
    parts = [rng.integers(0, 256, (64, 32), np.uint8)]
    with Layer("CPU", 20, parts, policy=policy) as wanted, Layer(backend, 20, parts, policy=policy) as found:
        for _ in range(250):
            ids = random_ids(rng, int(rng.choice([1, 1, 4, 16, 70])), 6, 64)
            assert np.array_equal(places(wanted, ids), places(found, ids))
            for name in ("counted", "step", "n_fills", "entries"):
                assert np.array_equal(wanted.table()[name], found.table()[name]), name


@pytest.mark.parametrize(("n_slots", "sizes"), [(20, [96, 210]), (5, [96, 210]), (20, [32, 64, 64])])
def test_prompts_are_staged(rng, backend, n_slots, sizes):
    """By kernels, or by copies of all experts where few are in slots."""
    steps = [1, 4, LEAST_STAGED_ROWS, 1, LEAST_STAGED_ROWS - 1, LEAST_STAGED_ROWS + 100, 1]
    check(backend, rng, n_experts=32, k=4, n_slots=n_slots, sizes=sizes, policy="frequency", steps=steps,
          staged=True)  # fmt: skip
