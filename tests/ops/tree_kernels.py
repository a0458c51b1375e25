"""Tests of the CUDA kernels of src/ops/tree-delta-net and top-rows, wherever they run: against the CPU's ops.

tests/gpu/test_tree_ops_cuda.py runs them on a card, test_cuda_trees.py on a CPU, where some do less. Each
gives them a `backend` for ggml_graph.py, and `rng`. `errors` has relative error norms that a test found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml
from tests.ops import test_top_rows as tops
from tests.ops.commits import check_commits_of_layers
from tests.ops.test_tree_attention import random_moves
from tests.ops.test_tree_ops import SHAPES, SPARE_CELLS, Case
from tests.ops.trees import batch, every_tree, heavy_last, padded, preorder_of, random_tree

MODEL = (32, 16, 128)  # heads, key heads, size of 35B-A3B
TAKEN = (16, 32, 64, 128)  # head sizes that ggml-cuda's delta net has, and so has ours
BOUND = 1e-5  # of relative error norms, where sums run in another order than on the CPU
ORDERS = [preorder_of, heavy_last]
ON_CARD = "CUDA"  # where time allows all sizes

errors: list[float] = []


def both(backend, op, operands, shape, **rest):
    """Return what the CPU's op and the kernels give."""
    return tuple(ggml.run(op, operands, shape, backend=each, **rest) for each in ("CPU", backend))


def assert_near(found, wanted):
    """In norm; and NaN, which is poison, in the same places."""
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    found, wanted = np.nan_to_num(found).astype(np.float64), np.nan_to_num(wanted).astype(np.float64)
    error, norm = np.linalg.norm(found - wanted), np.linalg.norm(wanted)
    errors.append(float(error / (norm or 1.0)))
    assert error <= BOUND * norm


def trees_of(rng, n_seqs, n):
    """Return random trees, padded where they have fewer nodes than n."""
    return [padded(random_tree(rng, int(rng.integers(max(1, n // 2), n + 1))), n) for _ in range(n_seqs)]


def caterpillar(n, spine_first):
    """Return a path of which each node has one more child, before or behind the path's next node."""
    parents, spine = [-1], 0
    while len(parents) < n:
        leaf_and_next = len(parents), len(parents) + 1
        parents += [spine] * 2
        spine = leaf_and_next[0 if spine_first else 1]
    return parents[:n]


def check_delta_net(rng, backend, trees, shape, order=heavy_last):
    """Compare factors and outputs with the CPU's: copies exactly, and what lies behind the rows untouched."""
    case = Case(rng, len(trees), len(trees[0]), *shape)
    case.order = order
    operands = case.operands(trees)
    cpu, cuda = both(backend, ggml.custom("dw_tree_delta_net"), operands, operands[0][0].shape)
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


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2] in TAKEN])
@pytest.mark.parametrize("order", ORDERS)
def test_delta_net_is_near_the_cpu(rng, backend, shape, order):
    for n_seqs, n in ((1, 1), (1, 2), (1, 16), (1, 17), (1, 64), (2, 9), (3, 7), (2, 33)):
        check_delta_net(rng, backend, trees_of(rng, n_seqs, n), shape, order)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_delta_net_of_a_model(rng, backend, order):
    for n_seqs, n in ((1, 1), (1, 2), (1, 16), (1, 17), (1, 64), (2, 9), (3, 7), (2, 33)):
        check_delta_net(rng, backend, trees_of(rng, n_seqs, n), MODEL, order)


@pytest.mark.parametrize("order", ORDERS)
def test_every_small_tree_is_near_the_cpu(rng, backend, order):
    """A plan says what is kept, and when."""
    for n in range(1, 6):
        for parents in every_tree(n):
            check_delta_net(rng, backend, [parents], (1, 1, 16), order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spine_first", [True, False])
@pytest.mark.parametrize("size", [16, 128])
def test_what_is_not_kept_is_walked_to(rng, backend, size, spine_first, order):
    """All nodes of a long path wait for a second child: more states than are kept."""
    check_delta_net(rng, backend, [caterpillar(64, spine_first)], (2, 1, size), order)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_a_tree_in_company_is_the_tree_alone(rng, backend, n):
    case = Case(rng, 3, n, heads=4, key_heads=2, size=128, backend=backend)
    trees = [random_tree(rng, n) for _ in range(3)]
    _, out = case.tree(trees)
    for s, parents in enumerate(trees):
        _, alone = case.alone(s).tree([parents])
        assert np.array_equal(out[s], alone[0])


@pytest.mark.parametrize("shape", [*SHAPES, MODEL])
def test_commit_of_the_state_is_near_the_cpu(rng, backend, shape):
    """Of heads of any size. Decays are such that the end of a path still shows its first nodes."""
    heads, key_heads, size = shape
    op = ggml.custom("dw_tree_commit_state")
    for room, n in ((1, 1), (9, 0), (9, 4), (72, 64), (200, 150)):
        state = rng.standard_normal((heads, size, size)).astype(np.float32)
        k = rng.standard_normal((room, key_heads, size))
        u = rng.standard_normal((room, heads, size))
        g = -rng.exponential(2 / (n + 3), (room, heads))
        factors = np.concatenate([x.ravel() for x in (k, u, g)]).astype(np.float32)
        path = np.full(1 + room, 1 << 30, np.int32)
        path[: 1 + n] = [n, *np.sort(rng.permutation(room)[:n])]
        cpu, cuda = both(backend, op, [(state, "F32"), (factors, "F32"), (path, "I32")], state.shape)
        assert_near(cuda, cpu)
        assert np.array_equal(cuda, state) == (n == 0)


def test_layers_of_a_commit_are_each_alone(rng, backend):
    check_commits_of_layers(rng, backend)


def check_conv(rng, backend, n_seqs, n, channels, width):
    """Compare both ops of the convolution's inputs with the CPU's; they are copies."""
    rows, room = n_seqs * n, n_seqs * n + 3
    x = rng.standard_normal((rows, channels)).astype(np.float32)
    states = rng.standard_normal((n_seqs + SPARE_CELLS, channels * (width - 1))).astype(np.float32)
    cells = rng.permutation(len(states))[:n_seqs].astype(np.int32)
    shape = (rows, channels, width)
    tree = batch(trees_of(rng, n_seqs, n), room)
    operands = [(x, "F32"), (states, "F32"), (cells, "I32"), (tree, "I32")]
    cpu, cuda = both(backend, ggml.custom("dw_tree_conv_windows", shape), operands, shape)
    assert np.array_equal(cuda, cpu)
    assert np.isfinite(cuda).all()

    path = np.full(1 + room, 1 << 30, np.int32)
    path[: 1 + n] = [n, *np.sort(rng.permutation(rows)[:n])]
    state = states[0].reshape(channels, width - 1)
    operands = [(state, "F32"), (x, "F32"), (path, "I32")]
    cpu, cuda = both(backend, ggml.custom("dw_tree_commit_conv"), operands, state.shape)
    assert np.array_equal(cuda, cpu)
    assert not np.array_equal(cuda, state)


@pytest.mark.parametrize("width", [2, 3, 4, 9])
@pytest.mark.parametrize("channels", [10, 257, 8192])
def test_conv_is_the_cpus(rng, backend, channels, width):
    for n_seqs, n in ((1, 1), (1, 2), (1, 16), (1, 64), (3, 9)):
        if n * channels <= 64 * 257 or backend == ON_CARD:
            check_conv(rng, backend, n_seqs, n, channels, width)


def check_moves(rng, backend, n_streams, n_cells, n_embd, kind, n):
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
        cpu, cuda = both(backend, ggml.custom(f"dw_tree_commit_{name}"), operands, cache.shape, dtype=dtype)
        assert np.array_equal(cuda, cpu)
        assert not np.array_equal(cuda, cache) or n < 2


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize(("n_cells", "n_embd"), [(24, 32), (24, 96), (256, 512)])
def test_moves_are_the_cpus(rng, backend, kind, n_cells, n_embd):
    """One after another, whatever they read and write."""
    for n_streams, n in ((1, 0), (1, 1), (2, 7), (1, 8), (2, 9), (1, 64)):
        check_moves(rng, backend, n_streams, n_cells, n_embd, kind, n)


def test_moves_of_rows_of_odd_length(rng, backend):
    """Which no access of 16 bytes fits."""
    for kind, n_embd in (("F32", 5), ("F16", 7), ("F16", 1)):
        check_moves(rng, backend, 2, 24, n_embd, kind, 20)


def check_top_rows(rng, backend, kind, k, shapes):
    """Check them against float64, and ids against the CPU's, which cannot differ."""
    for shape in shapes:
        logits = kind(rng, shape).astype(np.float32)
        found = tops.top_rows(logits, k, backend=backend)
        tops.check(logits, k, found)
        assert np.array_equal(found[0], tops.top_rows(logits, k)[0])


@pytest.mark.parametrize("kind", tops.KINDS)
@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 33, 64])
def test_top_rows(rng, backend, kind, k):
    shapes = [(1, 64), (2, 257), (3, 8191), (2, 8192), (3, 24577), (1, 248320)]
    check_top_rows(rng, backend, kind, k, shapes)


@pytest.mark.parametrize("n_rows", [1, 8, 16, 64])
def test_top_rows_of_a_model(rng, backend, n_rows):
    check_top_rows(rng, backend, tops.normal, 64, [(n_rows, 248320)])


def test_top_rows_do_not_depend_on_each_other(rng, backend):
    """Nor on how many there are: a row has the same bits alone."""
    logits = tops.normal(rng, (5, 65537)).astype(np.float32)
    together, alone = (tops.top_rows(x, 64, backend=backend) for x in (logits, logits[2:3]))
    assert all(np.array_equal(x[2:3], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("n_vocab", [65536, 262144, 262145])
def test_top_rows_of_more_groups_than_threads(rng, backend, n_vocab):
    """Up to 262,144 logits a thread holds 16 groups of 64, beyond 64."""
    check_top_rows(rng, backend, tops.normal, 64, [(2, n_vocab)])


@pytest.mark.parametrize(("n_vocab", "k"), [(64, 64), (8193, 7), (62080, 64)])
def test_top_rows_of_few_tokens(rng, backend, n_vocab, k):
    tops.check_names(rng, n_vocab, k, backend=backend)


def test_top_rows_of_the_largest_vocabulary(rng, backend):
    check_top_rows(rng, backend, tops.normal, 64, [(1, tops.MOST)])


def wider(which: int, operands: list[tuple[np.ndarray, str]]) -> list[tuple[np.ndarray, str]]:
    """Return operands of which one has rows with a value more."""
    return [
        (np.append(o, o[..., :1], -1), kind) if i == which else (o, kind)
        for i, (o, kind) in enumerate(operands)
    ]


def with_odd_rows(which: int, operands: list[tuple[np.ndarray, str]]) -> Callable[..., Any]:
    """Return the delta net of these operands, where rows of one begin at no multiples of 16 bytes."""
    strides = wider(which, operands)[which][0].strides[:-1]

    def op(context: Any, *sources: Any) -> Any:
        odd = ggml.view(context, sources[which], operands[which][0].shape, strides)
        return ggml.custom("dw_tree_delta_net")(context, *sources[:which], odd, *sources[which + 1 :])

    return op


def test_what_cannot_be_run_is_refused(rng, backend):
    """The CPU runs it then: other head sizes, rows at odd addresses, an op that no card has, 65 tokens."""
    for shape in SHAPES:
        operands = Case(rng, 1, 3, *shape).operands([[-1, 0, 0]])
        op = ggml.custom("dw_tree_delta_net")
        assert ggml.supports(op, operands, backend) == (shape[2] in TAKEN)
    operands = Case(rng, 1, 3, 1, 1, 16).operands([[-1, 0, 0]])
    for which in (1, 2, 3):  # q, k, v
        assert not ggml.supports(with_odd_rows(which, operands), wider(which, operands), backend)
    scores = [(np.zeros((1, 1, 2, 8), np.float32), "F32"), (batch([[-1, 0]], 2, [0, 1]), "I32")]
    assert not ggml.supports(ggml.custom("dw_tree_scores"), scores, backend)
    logits = np.zeros((1, 100), np.float32)
    assert ggml.supports(ggml.custom("dw_top_rows", tops.shape_of(logits, 4)), [(logits, "F32")], backend)
    assert not ggml.supports(ggml.custom("dw_top_rows", (1, 132)), [(logits, "F32")], backend)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_smallest_shapes(rng, backend, size):
    """Every op once, quickly: for compute-sanitizer."""
    for order in ORDERS:
        check_delta_net(rng, backend, trees_of(rng, 2, 5), (2, 1, size), order)
    case = Case(rng, 1, 14, 1, 1, size)
    case.order, parents = preorder_of, caterpillar(14, spine_first=True)
    operands = case.operands([parents])
    cpu, cuda = both(backend, ggml.custom("dw_tree_delta_net"), operands, operands[0][0].shape)
    assert_near(cuda, cpu)
    wanted = case.commit(cpu[: case.n_factors], 0, [0, 1], 14)
    case.backend = backend
    assert_near(case.commit(cuda[: case.n_factors], 0, [0, 1], 14), wanted)
    for width in (3, 4):
        check_conv(rng, backend, 2, 3, size, width)
    for kind in ("F32", "F16", "Q8_0"):
        check_moves(rng, backend, 2, 24, 2 * size, kind, 12)
    check_top_rows(rng, backend, tops.normal, size, [(2, 8192 + size)])
