"""src/ops/layer-parts on the CPU, the reference: against float64, and rows against rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.ops import attention_heads, flash_attention
from tests.ops import layer_parts as parts
from tests.ops.layer_part import BOUNDS, FLOATS, KINDS, Part
from tests.ops.trees import padded, random_tree

MIXED = ("Q4_K", "Q6_K", "Q8_0", "Q5_K")


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def check(make: Callable[[], Part], is_float: bool = True) -> None:
    """Hold a node against float64. One of three draws has no value of 8 bits that rounds elsewhere."""
    errors: list[float] = []
    while len(errors) < (1 if is_float else 3) and min(errors, default=1) > BOUNDS[True]:
        part = make()
        errors.append(parts.distance(part.run(), part.wanted))
        assert errors[-1] <= BOUNDS[is_float], f"{part.name}: {errors}"
    assert min(errors) <= BOUNDS[True], f"{part.name}: {errors}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3])
def test_each_type_of_weights(rng, n, kind):
    for make in parts.EVERY_PART:
        check(lambda make=make: make(rng, n, kind), kind in FLOATS)


@pytest.mark.parametrize("router", FLOATS)
def test_experts_of_mixed_types_and_sizes(rng, router):
    sizes = {"hidden": 256, "shared": 512, "n_experts": 8, "n_used": 8}
    check(lambda: parts.experts(rng, 2, MIXED, router=router), is_float=False)
    check(lambda: parts.experts(rng, 2, MIXED, **sizes), is_float=False)
    floats = ("F16", "F32", "BF16", "F16")
    sizes = {"width": 64, "hidden": 32, "shared": 96, "n_experts": 5, "n_used": 1}
    check(lambda: parts.experts(rng, 16, floats, **sizes))


def test_gate_and_up_may_be_one_tensor(rng):
    check(lambda: parts.experts(rng, 2, MIXED, is_joint=True), is_float=False)
    sizes = {"width": 64, "hidden": 32, "shared": 32, "is_joint": True}
    check(lambda: parts.experts(rng, 3, ("F32",) * 4, **sizes))


@pytest.mark.parametrize("is_joint", [False, True], ids=["", "joint"])
@pytest.mark.parametrize("n", [1, 5])
def test_experts_in_a_pool_give_the_same_bits(rng, n, is_joint):
    part = parts.experts(rng, n, MIXED, is_joint=is_joint)
    assert np.array_equal(parts.in_a_pool(rng, part, "CPU"), part.run())


def test_of_equal_logits_the_lower_expert_comes_first(rng):
    part = parts.experts(rng, 1, ("F32",) * 4, width=64, hidden=32, shared=32, n_experts=8, n_used=3)
    router, kind = part.operands[2]
    part.operands[2] = (np.repeat(router[:1], 8, axis=0), kind)
    low = part.run()
    for i in (3, 4, 5):  # gate, up, down: only experts 0, 1 and 2 are read
        stored, kind = part.operands[i]
        stored = stored.copy()
        stored[3:] = np.nan
        part.operands[i] = (stored, kind)
    assert np.array_equal(part.run(), low)


def test_mixers_of_mixed_types(rng):
    check(lambda: parts.delta_inputs(rng, 4, ("Q4_K", "Q6_K", "F32")), is_float=False)
    check(lambda: parts.attention_inputs(rng, 4, ("Q4_K", "Q4_K", "Q6_K")), is_float=False)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_the_front_of_a_chain_and_the_state_behind_it(rng, n):
    part = parts.delta_front(rng, n)
    found, written = part.run_and_write()
    assert parts.distance(found, part.wanted) < BOUNDS[True]
    assert np.array_equal(written, part.wanted_target)


@pytest.mark.parametrize("n_seqs", [1, 3])
def test_heads_of_trees(rng, n_seqs):
    for n in (1, 2, 5, 12):
        trees = [padded(random_tree(rng, int(rng.integers(1, n + 1))), n) for _ in range(n_seqs)]
        part = parts.delta_tree(rng, trees)
        found, kept = part.run_and_write()
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert np.array_equal(kept, part.wanted_target)


@pytest.mark.parametrize("shape", [{}, {"rows": 3}, {"size": 32, "n_keys": 1, "heads": 1}, {"width": 2}])
def test_heads(rng, shape):
    for n in (1, 4):
        check(lambda n=n: parts.delta_heads(rng, n, **shape))


def test_attention_of_chains_and_trees(rng):
    """A masked cell changes nothing, so a node has the bits of plain decoding."""
    for n, n_cells, kind in ((1, 1, "F16"), (1, 70, "F16"), (4, 90, "F16"), (1, 70, "Q8_0"), (4, 90, "Q8_0")):
        case = flash_attention.chain(rng, n, n_cells, n_streams=2, kind=kind)
        np.testing.assert_allclose(case.run(), case.wanted(), rtol=0, atol=2e-6)
        np.testing.assert_allclose(case.run(stock=True), case.wanted(), rtol=0, atol=2e-2)
        case = replace(case, hadamard=64)
        np.testing.assert_allclose(case.run(), case.wanted(), rtol=0, atol=2e-6)
    case = flash_attention.chain(rng, 2, 70)
    case.k[0, np.flatnonzero(case.mask[0, 1] == 0).max()] = np.nan
    found = case.run()
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[0, 0]).all()
    trees = [random_tree(rng, 6) for _ in range(2)]
    for one_stream in (True, False):
        case = flash_attention.tree(rng, trees, 80, one_stream=one_stream)
        found = case.run()
        for i, node in ((0, 5), (1, 3)):
            alone = flash_attention.as_decoded(case, trees, i, node, one_stream=one_stream)
            at = (0, 6 * i + node) if one_stream else (i, node)
            assert np.array_equal(alone.run()[0, 0], found[at])


@pytest.mark.parametrize("shape", attention_heads.SHAPES)
@pytest.mark.parametrize("n", [1, 16])
def test_heads_of_attention(rng, n, shape):
    node = attention_heads.heads(rng, n, **shape)
    attention_heads.check(node, "CPU")
    if n > 1:
        attention_heads.check_rows(rng, node, "CPU")


@pytest.mark.parametrize("n", [1, 2, 9])
def test_steps_and_the_state_behind_them(rng, n):
    for size in (32, 64, 128):
        part = parts.delta_step(rng, n, size=size)
        found, written = part.run_and_write()
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert parts.distance(written, part.wanted_target) < BOUNDS[True]


def test_softplus_of_large_values_is_linear(rng):
    part = parts.delta_inputs(rng, 1, ("F32",) * 3)
    part.operands[6] = (np.full(6, 100, np.float32), "F32")
    alpha, a = part.run()[-6:], part.operands[7][0]
    assert np.allclose(alpha / a, 100, atol=10)
