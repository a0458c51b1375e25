"""src/ops/tree-delta-net and top-rows on a device: tests/ops/tree_kernels.py, and what only a device shows.

That is bits of ggml-cuda's own delta net, replays, and what the door refuses.

`-k smallest` runs every op once, on the smallest shapes: for compute-sanitizer, whose tools take long
(--tool memcheck, --tool racecheck).
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

from tests.gpu.recorder import OP_ERROR
from tests.ops import delta_net
from tests.ops import ggml_graph as ggml
from tests.ops import test_top_rows as tops
from tests.ops.test_tree_ops import SHAPES, SPARE_CELLS, Case
from tests.ops.test_tree_ops import check as check_against_stock
from tests.ops.tree_kernels import *  # noqa: F403
from tests.ops.tree_kernels import MODEL, ORDERS, TAKEN, assert_near, caterpillar, errors
from tests.ops.trees import every_tree, heavy_last, padded, path_to, random_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


@pytest.fixture
def backend() -> str:
    return "CUDA"


@pytest.fixture
def rng(record_property):
    """Random numbers from a new seed, which a failure prints; the largest error goes into the row."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    errors.clear()
    yield np.random.default_rng(seed)
    if errors:
        record_property(OP_ERROR, max(errors))


@pytest.mark.parametrize("shape", [*(s for s in SHAPES if s[2] in TAKEN), MODEL])
def test_paths_and_commits_are_ggmls(rng, shape):
    """Each path of a tree equals ggml-cuda's GATED_DELTA_NET along it, and a commit the state behind it."""
    for n_seqs, n in ((1, 2), (1, 16), (2, 9), (1, 64)) if shape != MODEL else ((1, 12), (2, 5)):
        case = Case(rng, n_seqs, n, *shape, backend="CUDA")
        case.order = heavy_last
        check_against_stock(case, [random_tree(rng, n) for _ in range(n_seqs)])


@pytest.mark.parametrize("n", range(1, 6))
def test_every_small_tree(rng, n):
    case = Case(rng, 1, n, heads=2, key_heads=1, size=16, backend="CUDA")
    for parents in every_tree(n):
        check_against_stock(case, [parents])


def test_pairs_of_small_trees(rng):
    case = Case(rng, 2, 3, heads=2, key_heads=1, size=32, backend="CUDA")
    for trees in itertools.product(every_tree(3), repeat=2):
        check_against_stock(case, trees)


def test_trees_of_unlike_sizes_are_padded(rng):
    trees = [padded([-1], 12), padded([-1, 0, 1, 2], 12), padded(random_tree(rng, 9), 12), padded([-1], 12)]
    check_against_stock(Case(rng, len(trees), 12, heads=2, key_heads=1, size=64, backend="CUDA"), trees)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spine_first", [True, False])
@pytest.mark.parametrize("size", [16, 128])
def test_more_states_than_are_kept(rng, size, spine_first, order):
    """All nodes of a long path wait for a second child: most of their states are walked to again."""
    case = Case(rng, 1, 64, heads=2, key_heads=1, size=size, backend="CUDA")
    case.order = order
    parents = caterpillar(64, spine_first)
    _, out = case.tree([parents])
    for i in (*range(0, 64, 5), 62, 63):
        stock, _ = delta_net.run(case.along(0, path_to(parents, i)), 1, backend="CUDA")
        assert np.array_equal(out[0, i], stock[0, -1]), i


def test_a_replayed_graph_reads_new_trees(rng):
    """ggml-cuda captures what is computed again and again; then all that varies must come from tensors."""
    n, shape = 12, (4, 2, 64)
    case = Case(rng, 1, n, *shape)
    trees = [random_tree(rng, n) for _ in range(8)]
    first = case.operands(trees[:1])
    op = ggml.custom("dw_tree_delta_net")
    with ggml.Graph(op, first, backend="CUDA") as graph:
        for parents in trees:
            case.cells = rng.permutation(1 + SPARE_CELLS)[:1].astype(np.int32)
            operands = case.operands([parents])
            graph.set(0, operands[0][0])
            graph.set(7, case.cells)
            graph.set(8, operands[8][0])
            graph.compute()
            wanted = ggml.run(op, operands, first[0][0].shape)
            assert_near(graph.get(wanted.shape), wanted)


def launches():
    """Return (ggml graphs computed, of these CUDA graphs replayed as they were)."""

    class Launches(ctypes.Structure):
        _fields_ = [("all", ctypes.c_int64), ("replayed", ctypes.c_int64)]

    found = ctypes.CFUNCTYPE(Launches)(ggml.symbol("CUDA", "dw_cuda_launches"))()
    return found.all, found.replayed


def test_replays_are_counted(rng):
    logits = tops.normal(rng, (2, 999)).astype(np.float32)
    op = ggml.custom("dw_top_rows", tops.shape_of(logits, 4))
    n_all, n_replayed = launches()
    with ggml.Graph(op, [(logits, "F32")], backend="CUDA") as graph:
        for _ in range(20):
            graph.compute()
    now_all, now_replayed = launches()
    assert now_all == n_all + 20
    assert n_replayed <= now_replayed <= n_replayed + 20  # none, where CUDA graphs are off


def test_a_replayed_graph_keeps_its_workspace(rng):
    """Nodes of one graph share the pool, and the second needs more of it. Logits are new each time."""
    few, many = 4, 64
    shapes = [(2, 999), (3, 24577), (2, 999)]
    batches = [[tops.normal(rng, shape).astype(np.float32) for shape in shapes] for _ in range(8)]
    sizes = [few, many, few]

    def op(context, *logits):
        return [
            ggml.custom("dw_top_rows", tops.shape_of(x, k))(context, tensor)
            for x, k, tensor in zip(batches[0], sizes, logits, strict=True)
        ]

    with ggml.Graph(op, [(x, "F32") for x in batches[0]], backend="CUDA") as graph:
        for batch_of in batches:
            for i, logits in enumerate(batch_of):
                graph.set(i, logits)
            graph.compute()
            for logits, k, node in zip(batch_of, sizes, graph.nodes, strict=True):
                found = graph.bytes_of(node).view(np.float32).reshape(tops.shape_of(logits, k))
                tops.check(logits, k, tops.split(found, k))


def test_what_is_not_ours_is_refused():
    """Other numbers of operands, nodes made for the CPU, strangers' userdata."""
    logits = np.zeros((1, 100), np.float32)
    operands, shape = [(logits, "F32")], tops.shape_of(logits, 4)
    known, ours = ggml.descriptor("dw_top_rows"), ggml.symbol("CUDA", "dw_top_rows")

    def node(userdata):
        return lambda context, *sources: ggml.custom_node(context, known.cpu, userdata, sources, shape)

    assert ggml.supports(node(ours), operands, "CUDA")
    assert not ggml.supports(node(ours), operands * 2, "CUDA")  # one operand too many
    assert not ggml.supports(node(ours), [], "CUDA")
    copied = ggml.Descriptor.from_buffer_copy(ggml.descriptor("dw_top_rows", "CUDA"))
    for stranger in (None, 8, ctypes.addressof(copied), ctypes.addressof(known)):
        assert not ggml.supports(node(stranger), operands, "CUDA")
