"""src/ops/layer-parts on a device: against the CPU's reference, and rows bit for bit whatever their number.

`-k smallest` runs every op once: for compute-sanitizer.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

from bench import testing_api as api
from tests.gpu.recorder import OP_ERROR
from tests.model.test_fused_layers import ALWAYS, OF_TINY, TINY
from tests.ops import ggml_graph as ggml
from tests.ops import layer_parts as parts
from tests.ops.layer_part import FLOATS, KINDS, Part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]

ROWS = 16  # dw::layer_parts::max_rows
BOUNDS = {
    True: 1e-5,
    False: 3e-3,
}  # of float weights; of others, where values of 8 bits round to their neighbours
Q4 = ("Q4_K", "Q4_K", "Q4_K", "Q4_K")
MODEL = {
    "width": 2048,
    "hidden": 512,
    "shared": 512,
    "n_experts": 48,
    "n_used": 8,
}  # 35B-A3B, but for 256 experts

errors: list[float] = []


@pytest.fixture
def rng(record_property):
    """Random numbers from a new seed, which a failure prints; the largest error goes into the row."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    errors.clear()
    yield np.random.default_rng(seed)
    if errors:
        record_property(OP_ERROR, max(errors))


def check(part: Part, is_float: bool) -> None:
    """Hold it against float64, which the CPU's tests are held against, too."""
    found = part.run("CUDA")
    assert np.isfinite(found).all()
    error = parts.distance(found, part.wanted)
    if is_float:
        errors.append(error)
    assert error <= BOUNDS[is_float], f"{part.name}: {error}"


def check_rows(rng, part: Part) -> None:
    """Each row is the same beside any others."""
    whole = part.rows_of(part.run("CUDA"))
    for n in (1, 2, 3, 5, 8, 9, 15):
        rows = [int(row) for row in rng.permutation(ROWS)[:n]]
        some = part.of_rows(rows)
        assert np.array_equal(some.rows_of(some.run("CUDA")), whole[rows]), f"{part.name} of {n} rows"


def test_smallest(rng):
    for kind in ("Q4_K", "F16"):
        for n in (1, 3):
            for part in parts.every_part(rng, n, kind):
                check(part, kind in FLOATS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_each_type_of_weights(rng, n, kind):
    for part in parts.every_part(rng, n, kind):
        check(part, kind in FLOATS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_their_number(rng, kind):
    for part in parts.every_part(rng, ROWS, kind):
        check_rows(rng, part)


@pytest.mark.parametrize("kinds", [Q4, ("Q4_K", "Q6_K", "Q8_0", "Q5_K"), ("IQ4_XS", "Q5_K", "Q8_0", "Q8_0")])
def test_experts_at_model_shapes(rng, kinds):
    part = parts.experts(rng, ROWS, kinds, **MODEL)
    check(part, is_float=False)
    check_rows(rng, part)


@pytest.mark.parametrize("n", [1, 2, 6, 16])
@pytest.mark.parametrize("kinds", [Q4, ("F16",) * 4, ("Q4_K", "Q6_K", "Q8_0", "Q5_K")])
def test_experts_in_a_pool_give_the_same_bits(rng, n, kinds):
    for shape in ({}, {"is_joint": True}, {"n_experts": 33, "n_used": 16}, MODEL):
        part = parts.experts(rng, n, kinds, **shape)
        assert np.array_equal(parts.in_a_pool(rng, part, "CUDA"), part.run("CUDA")), shape


@pytest.mark.parametrize("router", FLOATS)
@pytest.mark.parametrize("shape", [
    {"n_experts": 512, "n_used": 10}, {"n_experts": 33, "n_used": 16}, {"n_experts": 8, "n_used": 8},
    {"n_experts": 5, "n_used": 1, "width": 96, "hidden": 32, "shared": 160},
    {"is_joint": True, "width": 64, "hidden": 96, "shared": 32},
    {"width": 4096, "hidden": 64, "shared": 32, "n_experts": 20}, {"width": 5120, "hidden": 32, "shared": 32},
])  # fmt: skip
def test_experts_of_other_shapes(rng, shape, router):
    for n in (1, 4, 16):
        part = parts.experts(rng, n, ("F16", "F32", "BF16", "F16"), router=router, **shape)
        check(part, is_float=True)
    check_rows(rng, part)


@pytest.mark.parametrize("n", [1, 2, 6, 16])
def test_rows_that_end_within_a_tile(rng, n):
    """Rows of Q8_0 are whole blocks of 32 values, not of 256."""
    kinds = ("Q8_0",) * 4
    for part in (
        parts.experts(rng, n, kinds, width=2048 + 96, hidden=96, shared=32),
        parts.feed_forward(rng, n, ("Q8_0", "Q8_0"), width=512 + 32, hidden=288),
        parts.product(rng, n, "Q8_0", width=320, rows=301),
    ):
        check(part, is_float=False)


def test_rows_that_end_within_a_tile_do_not_depend_on_their_number(rng):
    check_rows(rng, parts.experts(rng, ROWS, ("Q8_0",) * 4, width=2048 + 96, hidden=96, shared=32))
    check_rows(rng, parts.feed_forward(rng, ROWS, ("Q8_0", "Q8_0"), width=512 + 32, hidden=288))


def test_mixers_and_dense_layers_at_model_shapes(rng):
    for part in (
        parts.feed_forward(rng, ROWS, ("Q4_K", "Q6_K"), width=5120, hidden=1024),
        parts.product(rng, ROWS, "Q6_K", width=2048, rows=27000),
        parts.delta_inputs(rng, ROWS, ("Q4_K", "Q4_K", "F32"), width=2048, n_qkv=8192, n_z=4096, heads=32),
        parts.attention_inputs(rng, ROWS, ("Q4_K", "Q4_K", "Q6_K"), width=2048, rows=(8192, 512, 512)),
        parts.delta_output(rng, ROWS, "Q4_K", width=2048, heads=32, size=128),
        parts.attention_output(rng, ROWS, "Q6_K", width=2048, heads=16, size=256),
    ):
        check(part, is_float=False)
        check_rows(rng, part)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16])
def test_the_front_of_a_chain_is_that_of_its_windows(rng, n):
    for shape in ({}, {"size": 128, "n_keys": 16, "heads": 32}, {"size": 32, "n_keys": 1, "heads": 1}):
        part = parts.delta_front(rng, n, **shape)
        found, written = part.run_and_write("CUDA")
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert np.array_equal(written, part.wanted_target)
        x, states, cells, _, kernel = part.operands
        old = states[0][cells[0][0]].reshape(x[0].shape[1], 3)
        windows = np.concatenate([old, x[0].T], axis=1)
        trees = np.stack([windows[:, i : i + 4] for i in range(n)])
        of_trees = parts.delta_heads(rng, n, **shape)
        of_trees.operands = [(trees, "F32"), kernel]
        assert np.array_equal(of_trees.run("CUDA"), found)


def test_heads(rng):
    for shape in (
        {},
        {"rows": 3},
        {"size": 32, "n_keys": 1, "heads": 1},
        {"size": 128, "n_keys": 16, "heads": 32},
    ):
        for n in (1, 5):
            check(parts.delta_heads(rng, n, **shape), is_float=True)
    part = parts.delta_heads(rng, ROWS, size=128, n_keys=16, heads=32)
    check_rows(rng, part)
    chain, tree = parts.delta_heads(rng, 1, rows=6), parts.delta_heads(rng, 6)
    windows, kernel = chain.operands[0][0], chain.operands[1][0]
    tree.operands = [(np.stack([windows[0, :, i : i + 4] for i in range(6)]), "F32"), (kernel, "F32")]
    assert np.array_equal(tree.run("CUDA"), chain.run("CUDA"))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_steps_are_ggmls(rng, size):
    """Near float64, and equal to the tree's walk of a chain, which is equal to ggml-cuda's own op."""
    for n in (1, 2, 9, 16):
        part = parts.delta_step(rng, n, size=size)
        found, written = part.run_and_write("CUDA")
        assert parts.distance(found, part.wanted) < BOUNDS[True]
        assert parts.distance(written, part.wanted_target) < BOUNDS[True]
        q, k, v, g, beta, states, cells, _ = part.operands
        state = states[0][cells[0][0]].reshape(1, -1, size, size)
        stock = ggml.run(
            lambda context, *sources: ggml.base.ggml_gated_delta_net(context, *sources, 1),
            [*((each[None], kind) for each, kind in (q, k, v, g, beta)), (state, "F32")],
            (found.size + written.size,), backend="CUDA",
        )  # fmt: skip
        assert np.array_equal(stock, np.concatenate([found.ravel(), written]))


def test_the_same_input_gives_the_same_bits(rng):
    part = parts.experts(rng, 6, Q4, **MODEL)
    with ggml.Graph(part.op(), part.operands, backend="CUDA") as graph:
        graph.compute()
        first = graph.get(part.shape)
        for _ in range(50):
            graph.compute()
            assert np.array_equal(graph.get(part.shape), first)


def test_what_it_cannot_run_is_refused(rng):
    part = parts.experts(rng, 17, Q4)
    assert not ggml.supports(part.op(), part.operands, "CUDA")
    part = parts.attention_inputs(rng, 2, ("Q4_0", "Q4_K", "Q4_K"))
    assert not ggml.supports(part.op(), part.operands, "CUDA")
    assert ggml.supports((good := parts.experts(rng, 16, Q4)).op(), good.operands, "CUDA")


def test_a_model_on_the_card_is_made_of_them():
    """The same parts as tests/model/test_fused_layers.py finds on a CPU."""
    for way, settings in {"off": {}, "mtp": {"draft_tokens": 3}, "tree": {"tree_budget": 12}}.items():
        llm = Llama(
            TINY, n_gpu_layers=-1, n_ctx=512, verbose=False, flash_attn=True, speculation=way, **settings
        )
        prompt = llm.tokenize(b"import os\nimport sys\n\n\ndef main():\n", add_bos=False)
        assert len(list(islice(llm.generate(prompt, temp=0.0), 64))) == 64
        parts_of = {name: n for name, n in api.fused(llm._engine).items() if n}
        assert parts_of == (OF_TINY if way == "off" else ALWAYS)
        llm.close()
