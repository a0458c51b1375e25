"""src/ops/*/*.cu on a device: against the CPU reference, and bit for bit against ggml-cuda's own delta net.

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
from tests.ops.test_tree_attention import random_moves
from tests.ops.test_tree_ops import SHAPES, SPARE_CELLS, Case
from tests.ops.test_tree_ops import check as check_against_stock
from tests.ops.trees import batch, every_tree, heavy_last, padded, path_to, preorder_of, random_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]

MODEL = (32, 16, 128)  # heads, key heads, size of 35B-A3B
TAKEN = (16, 32, 64, 128)  # head sizes that ggml-cuda's delta net has, and so has ours
BOUND = 1e-5  # of relative error norms, where sums run in another order than on the CPU
ORDERS = [preorder_of, heavy_last]


norms: list[float] = []  # relative errors that a test found


@pytest.fixture
def rng(record_property):
    """Random numbers from a new seed, which pytest prints when a test fails; `norms` go into the row."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    norms.clear()
    yield np.random.default_rng(seed)
    if norms:
        record_property(OP_ERROR, max(norms))


def both(op, operands, shape, **rest):
    """Return what the CPU and the device give."""
    return tuple(ggml.run(op, operands, shape, backend=backend, **rest) for backend in ("CPU", "CUDA"))


def assert_near(found, wanted):
    """In norm; and NaN, which is poison, in the same places."""
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    found, wanted = np.nan_to_num(found).astype(np.float64), np.nan_to_num(wanted).astype(np.float64)
    error, norm = np.linalg.norm(found - wanted), np.linalg.norm(wanted)
    norms.append(float(error / (norm or 1.0)))
    assert error <= BOUND * norm


def trees_of(rng, n_seqs, n):
    """Return random trees, padded where they have fewer nodes than n."""
    return [padded(random_tree(rng, int(rng.integers(max(1, n // 2), n + 1))), n) for _ in range(n_seqs)]


def check_delta_net(rng, n_seqs, n, shape, order=heavy_last):
    """Compare factors and outputs with the CPU's: copies exactly, and what lies behind the rows untouched."""
    case = Case(rng, n_seqs, n, *shape)
    case.order = order
    operands = case.operands(trees_of(rng, n_seqs, n))
    cpu, cuda = both(ggml.custom("dw_tree_delta_net"), operands, operands[0][0].shape)
    sizes = [
        case.room * case.key_heads * case.size,
        case.room * case.heads * case.size,
        case.room * case.heads,
    ]
    at = np.cumsum(sizes)
    (k, u, g, out), wanted = np.split(cuda, at), np.split(cpu, at)
    assert np.array_equal(k, wanted[0], equal_nan=True)
    assert np.array_equal(g, wanted[2], equal_nan=True)
    assert_near(u, wanted[1])
    assert_near(out, wanted[3])
    assert np.isfinite(out).all()


@pytest.mark.parametrize("shape", [*(s for s in SHAPES if s[2] in TAKEN), MODEL])
@pytest.mark.parametrize("order", ORDERS)
def test_delta_net_is_near_the_cpu(rng, shape, order):
    for n_seqs, n in ((1, 1), (1, 2), (1, 16), (1, 64), (2, 9), (3, 7), (2, 32)):
        check_delta_net(rng, n_seqs, n, shape, order)


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


def caterpillar(n, spine_first):
    """Return a path of which each node has one more child, before or behind the path's next node."""
    parents, spine = [-1], 0
    while len(parents) < n:
        leaf_and_next = len(parents), len(parents) + 1
        parents += [spine] * 2
        spine = leaf_and_next[0 if spine_first else 1]
    return parents[:n]


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


@pytest.mark.parametrize("n", [1, 7, 64])
def test_a_tree_in_company_is_the_tree_alone(rng, n):
    case = Case(rng, 3, n, heads=4, key_heads=2, size=128, backend="CUDA")
    trees = [random_tree(rng, n) for _ in range(3)]
    _, out = case.tree(trees)
    for s, parents in enumerate(trees):
        _, alone = case.alone(s).tree([parents])
        assert np.array_equal(out[s], alone[0])


@pytest.mark.parametrize("shape", [*SHAPES, MODEL])
def test_commit_of_the_state_is_near_the_cpu(rng, shape):
    """Of heads of any size."""
    heads, key_heads, size = shape
    op = ggml.custom("dw_tree_commit_state")
    for room, n in ((1, 1), (9, 0), (9, 4), (72, 64), (200, 150)):
        state = rng.standard_normal((heads, size, size)).astype(np.float32)
        k = rng.standard_normal((room, key_heads, size))
        u = rng.standard_normal((room, heads, size))
        g = -rng.exponential(0.5, (room, heads))
        factors = np.concatenate([x.ravel() for x in (k, u, g)]).astype(np.float32)
        path = np.full(1 + room, 1 << 30, np.int32)
        path[: 1 + n] = [n, *np.sort(rng.permutation(room)[:n])]
        cpu, cuda = both(op, [(state, "F32"), (factors, "F32"), (path, "I32")], state.shape)
        assert_near(cuda, cpu)
        assert np.array_equal(cuda, state) == (n == 0)


def check_conv(rng, n_seqs, n, channels, width):
    """Compare both ops of the convolution's inputs with the CPU's; they are copies."""
    rows, room = n_seqs * n, n_seqs * n + 3
    x = rng.standard_normal((rows, channels)).astype(np.float32)
    states = rng.standard_normal((n_seqs + SPARE_CELLS, channels * (width - 1))).astype(np.float32)
    cells = rng.permutation(len(states))[:n_seqs].astype(np.int32)
    shape = (rows, channels, width)
    tree = batch(trees_of(rng, n_seqs, n), room)
    operands = [(x, "F32"), (states, "F32"), (cells, "I32"), (tree, "I32")]
    cpu, cuda = both(ggml.custom("dw_tree_conv_windows", shape), operands, shape)
    assert np.array_equal(cuda, cpu)
    assert np.isfinite(cuda).all()

    path = np.full(1 + room, 1 << 30, np.int32)
    path[: 1 + n] = [n, *np.sort(rng.permutation(rows)[:n])]
    state = states[0].reshape(channels, width - 1)
    operands = [(state, "F32"), (x, "F32"), (path, "I32")]
    cpu, cuda = both(ggml.custom("dw_tree_commit_conv"), operands, state.shape)
    assert np.array_equal(cuda, cpu)
    assert not np.array_equal(cuda, state)


@pytest.mark.parametrize("width", [2, 3, 4, 9])
@pytest.mark.parametrize("channels", [10, 257, 8192])
def test_conv_is_the_cpus(rng, channels, width):
    for n_seqs, n in ((1, 1), (1, 2), (1, 16), (1, 64), (3, 9)):
        check_conv(rng, n_seqs, n, channels, width)


def check_moves(rng, n_streams, n_cells, n_embd, kind, n):
    """Compare moves of rows, and of columns where the type has them, with the CPU's."""
    dtype = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16, "Q8_0": np.uint8}[kind]
    values, n_bytes = ggml.BLOCKS.get(kind, (1, 1))
    width = n_embd // values * n_bytes
    moves = random_moves(rng, n_streams * n_cells, n)
    for name, shape in (("rows", (n_cells, width)), ("columns", (width, n_cells))):
        if kind == "Q8_0" and name == "columns":
            continue
        cache = rng.integers(0, 200, (n_streams, *shape)).astype(dtype)
        operands = [(cache, kind), (moves, "I32")]
        cpu, cuda = both(ggml.custom(f"dw_tree_commit_{name}"), operands, cache.shape, dtype=dtype)
        assert np.array_equal(cuda, cpu)
        assert not np.array_equal(cuda, cache) or n < 2


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize(("n_cells", "n_embd"), [(24, 32), (24, 96), (256, 512)])
def test_moves_are_the_cpus(rng, kind, n_cells, n_embd):
    """One after another, whatever they read and write."""
    for n_streams, n in ((1, 0), (1, 1), (2, 7), (1, 8), (2, 9), (1, 64)):
        check_moves(rng, n_streams, n_cells, n_embd, kind, n)


def test_moves_of_rows_of_odd_length(rng):
    """Which no access of 16 bytes fits."""
    for kind, n_embd in (("F32", 5), ("F16", 7), ("F16", 1)):
        check_moves(rng, 2, 24, n_embd, kind, 20)


def check_top_rows(logits, k):
    """Check the device's against float64, and its ids against the CPU's, which cannot differ."""
    found = tops.top_rows(logits, k, backend="CUDA")
    tops.check(logits, k, found)
    assert np.array_equal(found[0], tops.top_rows(logits, k)[0])


@pytest.mark.parametrize("kind", tops.KINDS)
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 33, 64])
def test_top_rows(rng, kind, k):
    for n_rows, n_vocab in ((1, 64), (2, 257), (3, 8191), (2, 8192), (3, 24577), (1, 248320)):
        check_top_rows(kind(rng, (n_rows, n_vocab)).astype(np.float32), k)


@pytest.mark.parametrize("n_rows", [1, 8, 16, 64])
def test_top_rows_of_a_model(rng, n_rows):
    check_top_rows(tops.normal(rng, (n_rows, 248320)).astype(np.float32), 64)


@pytest.mark.parametrize(("n_vocab", "k"), [(64, 64), (8193, 7), (62080, 64)])
def test_top_rows_of_few_tokens(rng, n_vocab, k):
    tops.check_names(rng, n_vocab, k, backend="CUDA")


def test_top_rows_of_the_largest_vocabulary(rng):
    check_top_rows(tops.normal(rng, (1, 128 * tops.PART)).astype(np.float32), 64)


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


def test_what_is_not_taken(rng):
    """It runs on the CPU then: other head sizes, nodes made for the CPU, strangers' userdata."""
    for shape in SHAPES:
        operands = Case(rng, 1, 3, *shape).operands([[-1, 0, 0]])
        op = ggml.custom("dw_tree_delta_net")
        assert ggml.supports(op, operands, "CUDA") == (shape[2] in TAKEN)
    cpu_only = ggml.custom("dw_tree_scores")
    scores = [(np.zeros((1, 1, 2, 8), np.float32), "F32"), (batch([[-1, 0]], 2, [0, 1]), "I32")]
    assert not ggml.supports(cpu_only, scores, "CUDA")

    logits = np.zeros((1, 100), np.float32)
    operands, shape = [(logits, "F32")], tops.shape_of(logits, 4)
    good = ggml.custom("dw_top_rows", shape)
    assert ggml.supports(good, operands, "CUDA")
    assert not ggml.supports(ggml.custom("dw_top_rows", (1, 132)), operands, "CUDA")  # 65 tokens
    known, ours = ggml.descriptor("dw_top_rows"), ggml.symbol("CUDA", "dw_top_rows")

    def node(userdata):
        return lambda context, *sources: ggml.custom_node(context, known.cpu, userdata, sources, shape)

    assert ggml.supports(node(ours), operands, "CUDA")
    assert not ggml.supports(node(ours), operands * 2, "CUDA")  # one operand too many
    assert not ggml.supports(node(ours), [], "CUDA")
    copied = ggml.Descriptor.from_buffer_copy(ggml.descriptor("dw_top_rows", "CUDA"))
    for stranger in (None, 8, ctypes.addressof(copied), ctypes.addressof(known)):
        assert not ggml.supports(node(stranger), operands, "CUDA")


@pytest.mark.parametrize("size", [16, 32, 64])
def test_smallest_shapes(rng, size):
    """Every op once, quickly: for compute-sanitizer."""
    for order in ORDERS:
        check_delta_net(rng, 2, 5, (2, 1, size), order)
    case = Case(rng, 1, 14, 1, 1, size)
    case.order, parents = preorder_of, caterpillar(14, spine_first=True)
    operands = case.operands([parents])
    cpu, cuda = both(ggml.custom("dw_tree_delta_net"), operands, operands[0][0].shape)
    assert_near(cuda, cpu)
    case.backend = "CUDA"
    assert_near(
        case.commit(cuda[: case.n_factors], 0, [0, 1], 14),
        case.alone(0).commit(cpu[: case.n_factors], 0, [0, 1], 14),
    )
    for width in (3, 4):
        check_conv(rng, 2, 3, size, width)
    for kind in ("F32", "F16", "Q8_0"):
        check_moves(rng, 2, 24, 2 * size, kind, 12)
    check_top_rows(tops.normal(rng, (2, 8192 + size)).astype(np.float32), size)
