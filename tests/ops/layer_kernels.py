"""Tests of src/ops/layer-parts' CUDA kernels, wherever they run: against float64, and rows bit for bit.

tests/gpu/test_layer_parts_cuda.py runs them on a card, test_cuda_layers.py on a CPU, where some do less. Each
gives them a `backend` for ggml_graph.py, and `rng`. `errors` has what a test found with float weights.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.ops import attention_heads, cuda_on_cpu, flash_attention
from tests.ops import ggml_graph as ggml
from tests.ops import layer_parts as parts
from tests.ops.layer_part import BOUNDS, FLOATS, KINDS, Part
from tests.ops.trees import padded, random_tree

ROWS = 16  # dw::layer_parts::max_rows
Q4 = ("Q4_K", "Q4_K", "Q4_K", "Q4_K")
STRIPS = ("Q4_K", "Q6_K", "Q4_K", "Q6_K")  # as in a file of Q4_K_M
OF_TWO_TYPES = ("Q4_K", "Q4_K", "Q4_K", "Q6_K")  # and where all shared experts' down is Q6_K
OF_THREE_BITS = ("IQ3_XXS", "Q3_K", "Q8_0", "Q5_K")
MODEL = {
    "width": 2048,
    "hidden": 512,
    "shared": 512,
    "n_experts": 48,
    "n_used": 8,
}  # 35B-A3B, but for 256 experts

errors: list[float] = []


def check(backend: str, part: Part, is_float: bool) -> None:
    """Hold it against float64, which the CPU's tests are held against, too."""
    found = part.run(backend)
    assert np.isfinite(found).all()
    error = parts.distance(found, part.wanted)
    if is_float:
        errors.append(error)
    assert error <= BOUNDS[is_float], f"{part.name}: {error}"


def check_rows(rng, backend: str, part: Part) -> None:
    """Each row is the same beside any others."""
    whole = part.rows_of(part.run(backend))
    for n in (1, 2, 3, 5, 8, 9, 15) if backend == "CUDA" else (1, 9):
        rows = [int(row) for row in rng.permutation(ROWS)[:n]]
        some = part.of_rows(rows)
        assert np.array_equal(some.rows_of(some.run(backend)), whole[rows]), f"{part.name} of {n} rows"


def relative(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def launches(kernel: str, backend: str) -> int:
    """Return how many there were of kernels with this in their names; a card does not count them."""
    return 0 if backend == "CUDA" else cuda_on_cpu.launches(kernel)


def test_smallest(rng, backend):
    for kind in ("Q4_K", "F16", "IQ3_S"):
        for n in (1, 3):
            for part in parts.every_part(rng, n, kind):
                check(backend, part, kind in FLOATS)
    attention_heads.check(attention_heads.heads(rng, 3), backend)
    trees = [random_tree(rng, 5) for _ in range(2)]
    front = parts.delta_tree(rng, trees)
    assert parts.distance(front.run_and_write(backend)[0], front.wanted) < BOUNDS[True]
    attention = flash_attention.tree(rng, trees, 90, one_stream=True)
    assert relative(attention.run(backend), attention.wanted()) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_each_type_of_weights(rng, backend, n, kind):
    for part in parts.every_part(rng, n, kind):
        check(backend, part, kind in FLOATS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_number(rng, backend, kind):
    for part in parts.every_part(rng, ROWS, kind):
        check_rows(rng, backend, part)


@pytest.mark.parametrize("n", [1, 3, 16])
def test_types_that_become_bytes_beside_others(rng, backend, n):
    """Beside floats and others, with grids of their own, in wide rows, merged, and as an output head."""
    mixed, wide, three = ("IQ3_S", "Q3_K", "F32"), ("MXFP4", "Q8_0", "Q6_K"), ("IQ2_XXS", "Q4_K", "Q8_0")
    for part in (
        parts.delta_inputs(rng, n, mixed),
        parts.delta_inputs(rng, n, ("Q3_K", "Q4_K", "Q8_0"), n_qkv=300),
        parts.attention_inputs(rng, n, wide, width=4608),
        parts.attention_inputs(rng, n, three),
        parts.attention_inputs(rng, n, ("IQ2_XS", "IQ3_S", "IQ2_XXS")),
        parts.attention_inputs(rng, n, ("IQ3_XXS", "IQ2_S", "IQ3_XXS")),
        parts.feed_forward(rng, n, ("IQ4_NL", "Q4_0"), hidden=1536),
        parts.experts(rng, n, (*OF_THREE_BITS[:2], "IQ3_S", "IQ2_S"), is_joint=True),
        parts.product(rng, n, "IQ3_S", rows=(1 << 14) + 5),
    ):
        check(backend, part, is_float=False)
        if n > 1:
            alone = part.of_rows([n - 1])
            last = part.rows_of(part.run(backend))[-1:]
            assert np.array_equal(alone.rows_of(alone.run(backend)), last), part.name


@pytest.mark.parametrize("n_equals", [2, 64])
@pytest.mark.parametrize("n", [1, 6, 16])
def test_of_equal_logits_the_lowest_expert_is_chosen(rng, backend, n, n_equals):
    """In lanes of their own, and in one: experts 32 apart are a lane's."""
    part = parts.experts(
        rng, n, ("F16",) * 4, width=64, hidden=32, shared=32, n_experts=128, n_equals=n_equals
    )
    check(backend, part, is_float=True)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "F16"])
def test_heads_that_the_delta_rule_gates_give_the_same_bits(rng, backend, kind):
    shapes = [(64, 4), (128, 8), (32, 24)]  # (size, heads)
    shapes += [(32, 3)] if kind in ("Q8_0", "F16") else []  # an odd number of blocks
    shapes += [(32, 72), (128, 32)] if backend == "CUDA" else []
    for size, heads in shapes:
        output = parts.delta_output(rng, 1, kind, heads=heads, size=size)
        step = parts.delta_step(rng, 1, size=size, heads=heads, n_keys=2 - heads % 2)
        (_, z, norm, *others), n = output.operands, heads * size
        gating = replace(step, operands=[*step.operands, z, norm], shape=(n + n // 4 + n // 16 + n // 32,))
        found, state = gating.run_and_write(backend)
        wanted = step.run_and_write(backend)
        y = found[:n].reshape(1, heads, size)
        assert np.array_equal(y, wanted[0])
        assert np.array_equal(state, wanted[1])
        alone = replace(output, operands=[(y, "F32"), z, norm, *others])
        behind = replace(alone, operands=[*alone.operands, (found, "F32")])
        assert np.array_equal(behind.run(backend), alone.run(backend)), (size, heads)


@pytest.mark.parametrize("n_used", [2, 8, 16])
@pytest.mark.parametrize(
    "kinds",
    [
        STRIPS,
        Q4,
        OF_TWO_TYPES,
        ("Q4_K", "Q6_K", "Q4_K", "Q8_0"),
        ("Q4_K", "Q6_K", "Q4_K", "Q4_K"),
        OF_THREE_BITS,
    ],
)
def test_experts_whose_strips_of_down_lie_whole(rng, backend, kinds, n_used):
    part = parts.experts(rng, ROWS, kinds, width=256, hidden=512, shared=512, n_experts=40, n_used=n_used)
    check(backend, part, is_float=False)
    check_rows(rng, backend, part)


@pytest.mark.parametrize("n", [1, 2, 6, 16])
@pytest.mark.parametrize("kinds", [STRIPS, Q4, OF_TWO_TYPES])
def test_strips_of_down_that_lie_whole_give_the_bits_of_pieces(rng, backend, kinds, n):
    """Beside a wider shared expert all are multiplied in pieces; its weights of 0 add nothing.

    Which kernel ran is counted on a CPU alone.
    """
    wide = parts.experts(rng, n, kinds, hidden=512, shared=768, n_experts=40, n_used=8)
    *others, (gate, above), (up, _), (down, below) = wide.operands
    n_bytes = down.shape[1] // 3 * 2
    down[:, n_bytes:] = 0
    shared = [(gate[:512], above), (up[:512], above), (down[:, :n_bytes].copy(), below)]
    whole = replace(wide, operands=[*others, *shared])
    before = launches("project_down_strips", backend)
    wanted = wide.run(backend)
    assert launches("project_down_strips", backend) == before
    assert np.array_equal(whole.run(backend), wanted)
    assert launches("project_down_strips", backend) == before + (backend != "CUDA")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [Q4, STRIPS, ("Q4_K", "Q6_K", "Q8_0", "Q5_K"), ("IQ4_XS", "Q5_K", "Q8_0", "Q8_0"), OF_THREE_BITS]
)
def test_experts_at_model_shapes(rng, backend, kinds):
    part = parts.experts(rng, ROWS, kinds, **MODEL)
    check(backend, part, is_float=False)
    check_rows(rng, backend, part)


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("shape", [
    {"hidden": 32, "shared": 32, "n_experts": 24, "n_used": 2},
    {"hidden": 64, "shared": 96, "n_experts": 40, "n_used": 1},
])  # fmt: skip
def test_experts_of_whole_strips(rng, backend, shape, is_joint):
    """Of a few rows blocks have all weights of their hidden values in shared memory at once."""
    kinds = ("Q4_K", "F16", "Q4_K", "F16")
    part = parts.experts(rng, ROWS, kinds, width=2048, is_joint=is_joint, **shape)
    whole = part.rows_of(part.run(backend))
    for n in (2, 6):
        some = part.of_rows(list(range(n)))
        check(backend, some, is_float=False)
        assert np.array_equal(some.rows_of(some.run(backend)), whole[:n]), n


@pytest.mark.parametrize("n", [1, 2, 6, 16])
@pytest.mark.parametrize(
    "kinds", [Q4, ("F16",) * 4, ("Q4_K", "Q6_K", "Q8_0", "Q5_K"), STRIPS, OF_TWO_TYPES, OF_THREE_BITS]
)
def test_experts_in_a_pool_give_the_same_bits(rng, backend, n, kinds):
    large = [MODEL] if backend == "CUDA" else []
    if kinds in (STRIPS, OF_TWO_TYPES, OF_THREE_BITS):  # down's and gate's come whole, or as bytes
        large += [{"hidden": 512, "shared": 512, "n_experts": 40}]
        wide = {"width": 2048, "hidden": 256, "shared": 256, "n_experts": 6, "n_used": 2}
        large += [wide] if n < 16 else []
    for shape in ({}, {"is_joint": True}, {"n_experts": 33, "n_used": 16}, *large):
        part = parts.experts(rng, n, kinds, **shape)
        assert np.array_equal(parts.in_a_pool(rng, part, backend), part.run(backend)), shape


@pytest.mark.slow
@pytest.mark.parametrize("shape", [
    {"n_experts": 512, "n_used": 10}, {"n_experts": 33, "n_used": 16}, {"n_experts": 8, "n_used": 8},
    {"n_experts": 5, "n_used": 1, "width": 96, "hidden": 32, "shared": 160},
    {"is_joint": True, "width": 64, "hidden": 96, "shared": 32},
    {"width": 4096, "hidden": 64, "shared": 32, "n_experts": 20}, {"width": 5120, "hidden": 32, "shared": 32},
    {"width": 8192, "hidden": 32, "shared": 32, "n_experts": 8},
])  # fmt: skip
def test_experts_of_other_shapes(rng, backend, shape):
    for router in FLOATS if backend == "CUDA" else FLOATS[:1]:
        for n in (1, 4, 16):
            part = parts.experts(rng, n, ("F16", "F32", "BF16", "F16"), router=router, **shape)
            check(backend, part, is_float=True)
        check_rows(rng, backend, part)


@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_rows_that_end_within_a_tile(rng, backend, n):
    """Rows of Q8_0 are whole blocks of 32 values, not of 256."""
    kinds = ("Q8_0",) * 4
    for part in (
        parts.experts(rng, n, kinds, width=2048 + 96, hidden=96, shared=32),
        parts.feed_forward(rng, n, ("Q8_0", "Q8_0"), width=512 + 32, hidden=288),
        parts.product(rng, n, "Q8_0", width=320, rows=301),
        parts.attention_inputs(rng, n, ("Q8_0",) * 3, width=512 + 32),
    ):
        check(backend, part, is_float=False)


def test_rows_that_end_within_a_tile_do_not_depend_on_their_number(rng, backend):
    check_rows(rng, backend, parts.experts(rng, ROWS, ("Q8_0",) * 4, width=2048 + 96, hidden=96, shared=32))
    check_rows(rng, backend, parts.feed_forward(rng, ROWS, ("Q8_0", "Q8_0"), width=512 + 32, hidden=288))
    check_rows(rng, backend, parts.attention_inputs(rng, ROWS, ("Q8_0",) * 3, width=512 + 32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("n_weights", [1, 2, 8])
def test_several_layers_read_one_input(rng, backend, n_weights, kind):
    """As keys and values of a DFlash drafter's layers do. A kernel normalises several rows for all."""
    rows = tuple(16 * (i + 1) + i % 2 for i in range(n_weights))
    part = parts.attention_inputs(rng, ROWS, (kind,) * n_weights, width=512, rows=rows)
    before = launches("make_late", backend)
    check(backend, part, is_float=kind == "F16")
    assert launches("make_late", backend) == before + (backend != "CUDA" and kind != "F16")
    check_rows(rng, backend, part)


@pytest.mark.parametrize(("kinds", "hidden"), [(("Q8_0", "Q8_0"), 4096 + 32), (("Q4_K", "Q6_K"), 4096 + 256)])
def test_a_dense_networks_wide_rows(rng, backend, kinds, hidden):
    """Each block copies all rows of x, and hidden values that are too wide for it to make."""
    part = parts.feed_forward(rng, ROWS, kinds, width=256, hidden=hidden)
    before = [launches(kernel, backend) for kernel in ("make_hidden_dense", "late_quants")]
    check(backend, part, is_float=False)
    after = [launches(kernel, backend) for kernel in ("make_hidden_dense", "late_quants")]
    assert after == [n + (backend != "CUDA") for n in before]
    check_rows(rng, backend, part)


@pytest.mark.parametrize("scale", [1e-6, 1e5])
@pytest.mark.parametrize("n", [1, 6])
def test_rows_far_from_their_norm(rng, backend, n, scale):
    """Values of 8 bits are made before the norm is known, so their scales are as far from 1 as a row is."""
    for kinds in (("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "IQ4_XS", "Q5_K")):
        check(backend, parts.attention_inputs(rng, n, kinds, width=512, scale=scale), is_float=False)


def test_large_parts_and_wide_rows(rng, backend):
    """A block multiplies several strips of a part; its warps read what others made of a row."""
    check(backend, parts.product(rng, 9, "Q6_K", width=1024, rows=(1 << 14) + 17), is_float=False)
    wide = parts.attention_inputs(rng, 1, ("Q4_K", "Q4_K", "Q6_K"), width=2048, rows=(64, 32, 32))
    for width in (1024, 2048):  # one row is made by the product's blocks, several are not
        check_rows(rng, backend, parts.draft_input(rng, ROWS, "Q4_K", width=width, rows=40))
    check(backend, wide, is_float=False)
    for width in (4096, 5120):  # the widest that blocks make of several rows, and one more
        check_rows(rng, backend, parts.attention_inputs(rng, ROWS, ("Q4_K", "Q5_K", "Q4_K"), width=width))


@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_a_head_whose_strips_lie_whole(rng, backend, n):
    """It has the bits that it has with a row more, with which they do not."""
    n_rows = 1040 if backend == "CPU" else 27008
    more = parts.product(rng, n, "Q6_K", width=2048, rows=n_rows + 1)
    x, (stored, kind) = more.operands
    wanted = more.wanted[:, :n_rows]
    part = parts.Part("dw_product", [x, (stored[:n_rows], kind)], (n, n_rows), wanted, (0,), (n_rows,))
    check(backend, part, is_float=False)
    assert np.array_equal(part.run(backend), more.run(backend)[:, :n_rows])


@pytest.mark.slow
def test_mixers_and_dense_layers_at_model_shapes(rng, backend):
    for part in (
        parts.feed_forward(rng, ROWS, ("Q4_K", "Q6_K"), width=5120, hidden=1024),
        parts.product(rng, ROWS, "Q6_K", width=2048, rows=27000),
        *(
            parts.delta_inputs(rng, ROWS, ("Q4_K", "Q4_K", kind), width=2048, n_qkv=8192, n_z=4096, heads=32)
            for kind in ("F32", "Q8_0")
        ),
        parts.attention_inputs(rng, ROWS, ("Q4_K", "Q4_K", "Q6_K"), width=2048, rows=(8192, 512, 512)),
        parts.delta_output(rng, ROWS, "Q4_K", width=2048, heads=32, size=128),
        parts.attention_output(rng, ROWS, "Q6_K", width=2048, heads=16, size=256),
    ):
        check(backend, part, is_float=False)
        check_rows(rng, backend, part)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_the_front_of_a_chain_is_that_of_its_windows(rng, backend, n):
    for shape in ({}, {"size": 128, "n_keys": 16, "heads": 32}, {"size": 32, "n_keys": 1, "heads": 1}):
        part = parts.delta_front(rng, n, **shape)
        found, written = part.run_and_write(backend)
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert np.array_equal(written, part.wanted_target)
        x, states, cells, _, kernel = part.operands
        old = states[0][cells[0][0]].reshape(x[0].shape[1], 3)
        windows = np.concatenate([old, x[0].T], axis=1)
        trees = np.stack([windows[:, i : i + 4] for i in range(n)])
        of_trees = parts.delta_heads(rng, n, **shape)
        of_trees.operands = [(trees, "F32"), kernel]
        assert np.array_equal(of_trees.run(backend), found)


@pytest.mark.parametrize("n", [1, 2, 6, 16])
@pytest.mark.parametrize("n_seqs", [1, 2])
def test_heads_of_trees_are_those_of_their_windows(rng, backend, n_seqs, n):
    for shape in ({}, {"size": 128, "n_keys": 16, "heads": 32}, {"size": 32, "n_keys": 1, "heads": 1}):
        trees = [padded(random_tree(rng, int(rng.integers(1, n + 1))), n) for _ in range(n_seqs)]
        part = parts.delta_tree(rng, trees, **shape)
        if n_seqs * n > ROWS:
            assert not ggml.supports(part.op(), part.operands, backend)
            continue
        found, kept = part.run_and_write(backend)
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert np.array_equal(kept, part.wanted_target)
        windows_of = (n_seqs * n, part.operands[0][0].shape[1], 4)
        op = ggml.custom("dw_tree_conv_windows", windows_of)
        heads = parts.delta_heads(rng, n_seqs * n, **shape)
        windows = ggml.run(op, part.operands[:4], windows_of, backend=backend)
        heads.operands = [(windows, "F32"), part.operands[5]]
        assert np.array_equal(heads.run(backend), found)


def test_heads(rng, backend):
    for shape in (
        {},
        {"rows": 3},
        {"size": 32, "n_keys": 1, "heads": 1},
        {"size": 128, "n_keys": 16, "heads": 32},
    ):
        for n in (1, 5):
            check(backend, parts.delta_heads(rng, n, **shape), is_float=True)
    part = parts.delta_heads(rng, ROWS, size=128, n_keys=16, heads=32)
    check_rows(rng, backend, part)
    chain, tree = parts.delta_heads(rng, 1, rows=6), parts.delta_heads(rng, 6)
    windows, kernel = chain.operands[0][0], chain.operands[1][0]
    tree.operands = [(np.stack([windows[0, :, i : i + 4] for i in range(6)]), "F32"), (kernel, "F32")]
    assert np.array_equal(tree.run(backend), chain.run(backend))


def test_what_it_cannot_run_is_refused(rng, backend):
    part = parts.experts(rng, 17, Q4)
    assert not ggml.supports(part.op(), part.operands, backend)
    part = parts.attention_inputs(rng, 2, ("Q5_0", "Q4_K", "Q4_K"))
    assert not ggml.supports(part.op(), part.operands, backend)
    narrow = ("MXFP4", "Q8_0", "Q8_0")  # rows of 288 values, no whole tiles
    for part in (
        parts.attention_inputs(rng, 2, narrow, width=288),
        parts.experts(rng, 2, (*narrow, "Q8_0"), width=288),
        parts.experts(rng, 2, ("Q8_0", *narrow), hidden=288),
        parts.feed_forward(rng, 2, narrow[:2], width=288),
    ):
        assert not ggml.supports(part.op(), part.operands, backend), part.name
    assert ggml.supports((good := parts.experts(rng, 16, Q4)).op(), good.operands, backend)
