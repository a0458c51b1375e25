"""Tests of the CUDA kernels of src/ops/expert-slots, wherever they run: against their model in Python.

tests/gpu/test_expert_pool_cuda.py runs them on a card, test_cuda_slots.py on a CPU. Each gives them a
`backend` for expert_slots.py, and `rng`.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np
import pytest

from tests.ops.expert_model import TABLE, random_ids
from tests.ops.expert_slots import LEAST_STAGED_ROWS, Layer, check
from tests.ops.layer_part import Part
from tests.ops.layer_parts import size_of_choice
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


def random_choice(rng: np.random.Generator, n: int, n_experts: int, k: int, has_next: bool) -> Part:
    """Return a dw_choice that leaves its result to be read; two experts have equal logits."""
    x, norm, own = (rng.normal(0, 1, shape).astype(np.float32) for shape in ((n, 64), 64, (1, 64)))
    router = rng.normal(0, 1, (n_experts, 64)).astype(np.float32)
    router[n_experts // 2] = router[3]
    operands = [x, norm, router, own, *([norm[::-1].copy(), router[::-1].copy()] if has_next else [])]
    shape = (size_of_choice(n_experts, n, 64),)
    return Part("dw_choice", [(each, "F32") for each in operands], shape, x, (0,), (64,), k, kind="I32")


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


@pytest.mark.parametrize(
    ("n", "n_experts", "k", "has_next"),
    [
        *(
            (*case, x)
            for case in [(1, 16, 4), (1, 256, 8), (2, 32, 6), (8, 256, 8), (2, 512, 10)]
            for x in (0, 1)
        ),
        (16, 64, 8, False),
        (16, 512, 10, False),
    ],
)
def test_an_open_choice_is_made_as_a_closed_one(rng, backend, n, n_experts, k, has_next):
    """Slots, tables of both layers and the rows of the choice, of several steps."""
    parts = [rng.integers(0, 256, (n_experts, 64), np.uint8)]
    n_slots = min(n_experts // 2, n * k + 3)
    with ExitStack() as stack:
        made = [stack.enter_context(Layer(backend, n_slots, parts)) for _ in range(4)]
        for layer, following in (made[:2], made[2:]):
            layer.layer.next = ctypes.addressof(following.layer)
        for _ in range(4):
            choice = random_choice(rng, n, n_experts, k, has_next)
            found, rows = made[0].choose(choice, is_open=True)
            wanted, rows_wanted = made[2].choose(choice, is_open=False)
            assert np.array_equal(found, wanted)
            n_written = (3 if has_next else 2) * k + 1
            assert np.array_equal(rows[:, :n_written], rows_wanted[:, :n_written])
            for layer, as_wanted in zip(made[:2], made[2:], strict=True):
                found_table, wanted_table = layer.table(), as_wanted.table()
                for name in set(TABLE.names) - {"n_arrived", "n_all_arrived"}:  # copies may go on
                    assert np.array_equal(found_table[name], wanted_table[name]), name


@pytest.mark.parametrize(("n_slots", "sizes"), [(20, [96, 210]), (5, [96, 210]), (20, [32, 64, 64])])
def test_prompts_are_staged(rng, backend, n_slots, sizes):
    """By kernels, or by copies of all experts where few are in slots."""
    steps = [1, 4, LEAST_STAGED_ROWS, 1, LEAST_STAGED_ROWS - 1, LEAST_STAGED_ROWS + 100, 1]
    check(backend, rng, n_experts=32, k=4, n_slots=n_slots, sizes=sizes, policy="frequency", steps=steps,
          staged=True)  # fmt: skip
