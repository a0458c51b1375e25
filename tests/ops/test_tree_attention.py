"""src/ops/tree-attention: a tree's attention is bit-equal to ggml's own on cells in the order of the path;
commits move cells as numpy does.

Attention is that of llama.cpp without flash attention: scores K q, softmax with a mask, its weights times V.
Shapes are numpy's, slowest first.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml
from tests.ops.trees import batch, depths_of, every_tree, padded, path_to, random_tree

KINDS = ["F32", "F16", "BF16"]
SIZE = 20  # of a head: no multiple of what a kernel takes at once
CACHE = 96  # cells that a cache has for each stream, of which attention sees the first n_kv


class Case:
    """Random keys, values and queries for the trees of each stream, in a cache whose other cells hold a past.

    trees: by stream, of equal numbers of rows in all. cells: by row, ascending unless `scattered`.
    """

    def __init__(self, rng, trees, kind, heads=4, kv_heads=2, n_kv=72, scattered=False):
        self.trees, self.kind, self.heads, self.kv_heads, self.n_kv = trees, kind, heads, kv_heads, n_kv
        self.n_streams, self.n_rows = len(trees), sum(len(tree) for tree in trees[0])
        order = (lambda x: x) if scattered else np.sort
        self.cells = np.stack([order(rng.permutation(n_kv)[: self.n_rows]) for _ in trees])
        self.k = rng.standard_normal((self.n_streams, kv_heads, n_kv, SIZE))
        self.v = rng.standard_normal((self.n_streams, kv_heads, SIZE, CACHE)) * 3
        self.q = rng.standard_normal((self.n_streams, heads, self.n_rows, SIZE)).astype(np.float32)
        # the past that a tree sees: some cells that hold no tree's rows
        self.past = []
        for s, of_stream in enumerate(trees):
            free = np.setdiff1d(np.arange(n_kv), self.cells[s])
            self.past += [np.sort(rng.choice(free, len(free) // 2, replace=False)) for _ in of_stream]

    def each_row(self):
        """Yield (stream, row, past cells, cells of the path, cells where plain decoding has the path)."""
        tree = 0
        for s, of_stream in enumerate(self.trees):
            first = 0
            for parents in of_stream:
                for i in range(len(parents)):
                    path = path_to(parents, i)
                    cells = self.cells[s, first : first + len(parents)]
                    plain = cells[path[0] : path[0] + len(path)]  # a root's copy is a tree of its own
                    yield s, first + i, self.past[tree], cells[path], plain
                first += len(parents)
                tree += 1

    def operands(self, k, v, mask):
        arrays = [ggml.encode(k, self.kind), ggml.encode(v, self.kind)]
        rows = self.cells.reshape(-1)
        trees = [parents for of_stream in self.trees for parents in of_stream]
        return [
            *((x, self.kind) for x in arrays),
            (self.q, "F32"),
            (mask, "F32"),
            (batch(trees, len(rows) + 5, rows), "I32"),
        ]

    def attend(self, k, v, mask, *, arranged, n_threads=2):
        """Run attention with ggml's ops, or ours around the softmax; return [streams, heads, rows, SIZE]."""

        def op(context, k, v, q, mask, tree):
            seen = self.values_seen(context, v)
            scores = ggml.base.ggml_mul_mat(context, k, q)
            if arranged:
                scores = ggml.custom("dw_tree_scores")(context, scores, tree)
            weights = ggml.base.ggml_soft_max_ext(context, scores, mask, SIZE**-0.5, 0.0)
            if not arranged:
                return ggml.base.ggml_mul_mat(context, seen, weights)
            return ggml.custom("dw_tree_values", shape)(context, seen, weights, tree)

        shape = (self.n_streams, self.heads, self.n_rows, SIZE)
        return ggml.run(op, self.operands(k, v, mask), shape, use_ref=True, n_threads=n_threads)

    def values_seen(self, context, v):
        """The first n_kv cells of a transposed cache, as llama.cpp views it."""
        width = 4 if self.kind == "F32" else 2
        strides = tuple(n * width for n in (self.kv_heads * SIZE * CACHE, SIZE * CACHE, CACHE))
        return ggml.view(context, v, (self.n_streams, self.kv_heads, SIZE, self.n_kv), strides)

    def mask(self, *, of_paths):
        """0 or -inf [streams, 1, rows, n_kv]: the past, and the path where plain decoding has it, or not."""
        mask = np.full((self.n_streams, 1, self.n_rows, self.n_kv), -np.inf, np.float32)
        for s, row, past, path, plain in self.each_row():
            mask[s, 0, row, past] = mask[s, 0, row, path if of_paths else plain] = 0
        return mask


def check(case, n_threads=1):
    """Check each row against ggml's attention on a cache in which its path lies in order, bit for bit."""
    mask = case.mask(of_paths=False)
    found = case.attend(case.k, case.v, mask, arranged=True, n_threads=n_threads)
    for s, row, _, path, plain in case.each_row():
        k, v = case.k.copy(), case.v.copy()
        k[s, :, plain], v[s, :, :, plain] = case.k[s, :, path], case.v[s, :, :, path]
        stock = case.attend(k, v, mask, arranged=False, n_threads=1)
        assert np.array_equal(found[s, :, row], stock[s, :, row]), (case.trees, case.cells, s, row)


def oracle(case):
    """Attention of each row over its past and its path in float64: [streams, heads, rows, SIZE]."""
    k, v = (ggml.decode(ggml.encode(x, case.kind), case.kind) for x in (case.k, case.v))
    out = np.empty((case.n_streams, case.heads, case.n_rows, SIZE))
    for s, row, past, path, _ in case.each_row():
        seen = np.concatenate([past, path])
        for h in range(case.heads):
            shared = h * case.kv_heads // case.heads
            weights = np.exp(k[s, shared, seen] @ case.q[s, h, row] / SIZE**0.5)
            out[s, h, row] = v[s, shared][:, seen] @ (weights / weights.sum())
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", range(1, 6))
def test_every_small_tree(n, kind):
    rng = np.random.default_rng()
    for parents in every_tree(n):
        check(Case(rng, [[parents]], kind, heads=2, kv_heads=1, n_kv=24))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("n_streams", [1, 2])
@pytest.mark.parametrize("scattered", [False, True], ids=["ascending", "scattered"])
def test_random_trees(kind, heads, kv_heads, n_streams, scattered):
    """One tree to a stream; and batches in which two trees and a plain row share one."""
    rng = np.random.default_rng()
    for sizes, n_threads in (((17,), 3), ((5, 1, 8), 2)):
        trees = [[random_tree(rng, n) for n in sizes] for _ in range(n_streams)]
        check(Case(rng, trees, kind, heads, kv_heads, scattered=scattered), n_threads)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_unlike_sizes_are_padded(kind):
    rng = np.random.default_rng()
    check(Case(rng, [[padded([-1], 8), padded(random_tree(rng, 6), 8), padded([-1, 0, 1], 8)]], kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_streams", [1, 2])
def test_near_float64(kind, n_streams):
    rng = np.random.default_rng()
    for sizes in ((64,), (20, 30)):
        trees = [[random_tree(rng, n) for n in sizes] for _ in range(n_streams)]
        case = Case(rng, trees, kind, scattered=True)
        found = case.attend(case.k, case.v, case.mask(of_paths=False), arranged=True)
        np.testing.assert_allclose(found, oracle(case), rtol=0, atol=2e-5)


def test_a_mask_alone_rounds_otherwise():
    """Why the ops are there: ggml's attention over the path where it lies is near, and not equal."""
    rng = np.random.default_rng(0)
    case = Case(rng, [[random_tree(rng, 40)]], "F16")
    masked = case.attend(case.k, case.v, case.mask(of_paths=True), arranged=False)
    ours = case.attend(case.k, case.v, case.mask(of_paths=False), arranged=True)
    np.testing.assert_allclose(masked, ours, rtol=0, atol=2e-5)
    assert not np.array_equal(masked, ours)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_scores_move_and_nothing_else(n_threads):
    rng = np.random.default_rng()
    for n_streams in (1, 2):
        trees = [[random_tree(rng, n) for n in (9, 4)] for _ in range(n_streams)]
        case = Case(rng, trees, "F32", scattered=True)
        scores = rng.standard_normal((n_streams, case.heads, case.n_rows, case.n_kv)).astype(np.float32)
        tree = case.operands(case.k, case.v, case.mask(of_paths=True))[-1]
        op = ggml.custom("dw_tree_scores")
        found = ggml.run(op, [(scores, "F32"), tree], scores.shape, use_ref=True, n_threads=n_threads)
        wanted = scores.copy()
        for s, row, _, path, plain in case.each_row():
            wanted[s, :, row, plain] = scores[s, :, row, path]
        assert np.array_equal(found, wanted)
        branched = any(depths_of(parents)[-1] != len(parents) - 1 for each in trees for parents in each)
        assert np.array_equal(found, scores) != branched


@pytest.mark.parametrize("kind", KINDS)
def test_values_alone(kind):
    """Weights of any value, each row's on its own path: ggml's product with the values in order."""
    rng = np.random.default_rng()
    case = Case(rng, [[[-1, 0, 0, 1, 2, 4]]], kind)
    weights = rng.standard_normal((1, case.heads, case.n_rows, case.n_kv)).astype(np.float32)
    shape = (1, case.heads, case.n_rows, SIZE)

    def run(v, arranged):
        def op(context, v, weights, tree):
            seen = case.values_seen(context, v)
            if arranged:
                return ggml.custom("dw_tree_values", shape)(context, seen, weights, tree)
            return ggml.base.ggml_mul_mat(context, seen, weights)

        tree = case.operands(case.k, case.v, case.mask(of_paths=True))[-1]
        operands = [(ggml.encode(v, kind), kind), (weights, "F32"), tree]
        return ggml.run(op, operands, shape, use_ref=True, n_threads=2)

    found, as_they_lie = run(case.v, True), run(case.v, False)
    for _, row, _, path, plain in case.each_row():
        v = case.v.copy()
        v[0, :, :, plain] = case.v[0, :, :, path]
        assert np.array_equal(found[0, :, row], run(v, False)[0, :, row])
        assert np.array_equal(found[0, :, row], as_they_lie[0, :, row]) == np.array_equal(path, plain)


def random_moves(rng, n_cells, n):
    """Return moves i32[1 + 2 M], n (from, to) pairs and room for more; some read what others wrote."""
    moves = np.full(1 + 2 * (n + 3), 1 << 30, np.int32)
    moves[0] = n
    moves[1 : 1 + 2 * n] = rng.integers(0, n_cells, 2 * n)
    return moves


def moved(cells, moves):
    """Return what `cells` [n_cells, ...] hold after the moves."""
    cells = cells.copy()
    for i in range(moves[0]):
        cells[moves[2 + 2 * i]] = cells[moves[1 + 2 * i]]
    return cells


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_streams", [1, 2])
@pytest.mark.parametrize(
    ("kind", "dtype", "width"), [("F32", np.float32, 48), ("F16", np.uint16, 48), ("Q8_0", np.uint8, 3 * 34)]
)
def test_rows_move_one_after_another(kind, dtype, width, n_streams, n_threads):
    rng = np.random.default_rng()
    n_cells = 24
    for n in (0, 1, 7, 40):
        cache = rng.integers(0, 200, (n_streams, n_cells, width)).astype(dtype)
        moves = random_moves(rng, n_streams * n_cells, n)
        op = ggml.custom("dw_tree_commit_rows")
        operands = [(cache, kind), (moves, "I32")]
        found = ggml.run(op, operands, cache.shape, use_ref=False, n_threads=n_threads, dtype=dtype)
        wanted = moved(cache.reshape(-1, width), moves).reshape(cache.shape)
        assert np.array_equal(found, wanted)
        assert not np.array_equal(found, cache) or n < 2


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_streams", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), [("F32", np.float32), ("F16", np.uint16), ("BF16", np.uint16)])
def test_columns_move_one_after_another(kind, dtype, n_streams, n_threads):
    rng = np.random.default_rng()
    n_cells, n_embd = 24, 10
    for n in (0, 1, 7, 40):
        cache = rng.integers(0, 60000, (n_streams, n_embd, n_cells)).astype(dtype)
        moves = random_moves(rng, n_streams * n_cells, n)
        op = ggml.custom("dw_tree_commit_columns")
        operands = [(cache, kind), (moves, "I32")]
        found = ggml.run(op, operands, cache.shape, use_ref=False, n_threads=n_threads, dtype=dtype)
        by_cell = cache.transpose(0, 2, 1)
        wanted = moved(by_cell.reshape(-1, n_embd), moves).reshape(by_cell.shape).transpose(0, 2, 1)
        assert np.array_equal(found, wanted)
        assert not np.array_equal(found, cache) or n < 2


def test_columns_of_a_cache_that_is_declared_by_rows():
    """llama.cpp gives a transposed cache the shape of the other kind; the commit takes a view of it."""
    rng = np.random.default_rng()
    n_streams, n_cells, n_embd = 2, 24, 10
    cache = rng.integers(0, 60000, (n_streams, n_embd, n_cells)).astype(np.uint16)
    moves = random_moves(rng, n_streams * n_cells, 9)

    def op(context, v, moves):
        columns = ggml.view(context, v, cache.shape, (2 * n_embd * n_cells, 2 * n_cells))
        return ggml.custom("dw_tree_commit_columns")(context, columns, moves)

    operands = [(cache.reshape(n_streams, n_cells, n_embd), "F16"), (moves, "I32")]
    found = ggml.run(op, operands, cache.shape, use_ref=False, n_threads=2, dtype=np.uint16)
    by_cell = cache.transpose(0, 2, 1)
    wanted = moved(by_cell.reshape(-1, n_embd), moves).reshape(by_cell.shape).transpose(0, 2, 1)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", ["dw_tree_commit_rows", "dw_tree_commit_columns"])
def test_moves_do_move(name):
    """A cell that is moved arrives: an op that did nothing would fail here."""
    cache = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    op = ggml.custom(name)
    operands = [(cache, "F32"), (np.array([1, 2, 0], np.int32), "I32")]
    found = ggml.run(op, operands, cache.shape, use_ref=False, n_threads=1)
    wanted = cache.copy()
    if name == "dw_tree_commit_rows":
        wanted[0, 0] = cache[0, 2]
    else:
        wanted[0, :, 0] = cache[0, :, 2]
    assert np.array_equal(found, wanted)
