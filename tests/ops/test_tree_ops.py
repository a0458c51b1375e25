"""src/ops/tree-delta-net: paths of a tree are bit-equal to the stock ops, a commit to plain decoding."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from tests.ops import delta_net
from tests.ops import ggml_graph as ggml
from tests.ops.commits import check_commits_of_layers
from tests.ops.trees import batch, every_tree, heavy_last, padded, path_to, preorder_of, random_tree

WIDTH = 4  # of the convolution
SPARE_CELLS = 2  # of the state cache, of sequences that are not in the batch
SHAPES = [(2, 1, 128), (4, 2, 64), (3, 3, 32), (2, 1, 33), (6, 2, 16), (1, 1, 256)]  # heads, key heads, size


class Case:
    """Random inputs of a layer for n_seqs trees of n nodes, and a cache with a state for each tree."""

    def __init__(self, rng, n_seqs, n, heads, key_heads, size, backend="CPU"):
        self.backend, self.order = backend, preorder_of
        self.heads, self.key_heads, self.size = heads, key_heads, size
        *self.qkvgb, self.state = delta_net.inputs(rng, n_seqs, n, heads, key_heads, size)
        self.cells = rng.permutation(n_seqs + SPARE_CELLS)[:n_seqs].astype(np.int32)
        self.states = rng.standard_normal((n_seqs + SPARE_CELLS, heads * size * size)).astype(np.float32)
        self.states[self.cells] = self.state.reshape(n_seqs, -1)
        self.room = n_seqs * n + int(rng.integers(0, 9))  # rows that a scratch has room for

    def alone(self, s):
        """Return the case of sequence s only, its state in the cell where it was."""
        case = copy.copy(self)
        case.qkvgb = [x[s : s + 1] for x in self.qkvgb]
        case.state, case.cells = self.state[s : s + 1], self.cells[s : s + 1]
        return case

    @property
    def n_factors(self):
        return self.room * (self.key_heads * self.size + self.heads * self.size + self.heads)

    def operands(self, trees):
        """Return those of the tree op, a poisoned scratch of factors and output first."""
        scratch = np.full(self.n_factors + self.qkvgb[2].size, np.nan, np.float32)
        return [
            (scratch, "F32"),
            *((x, "F32") for x in self.qkvgb),
            (self.states, "F32"),
            (self.cells, "I32"),
            (batch(trees, self.room, order=self.order), "I32"),
        ]

    def tree(self, trees, n_threads=2):
        """Run the tree op; return factors f32[n_factors], out [n_seqs, N, heads, size]."""
        shape = (len(trees), len(trees[0]), self.heads, self.size)
        operands = self.operands(trees)
        op = ggml.custom("dw_tree_delta_net")
        found = ggml.run(op, operands, operands[0][0].shape, backend=self.backend, n_threads=n_threads)
        return found[: self.n_factors], found[self.n_factors :].reshape(shape)

    def along(self, s, path):
        """Return the six inputs of the stock op for the nodes of a path in sequence s."""
        return [*(x[s : s + 1, path] for x in self.qkvgb), self.state[s : s + 1]]

    def commit(self, factors, s, path, n, n_threads=1):
        """Run the commit op on the state of sequence s, the s-th tree of n nodes; return the new one."""
        rows = np.full(1 + self.room, 1 << 30, np.int32)
        rows[: 1 + len(path)] = [len(path), *(s * n + i for i in path)]
        operands = [(self.state[s], "F32"), (factors, "F32"), (rows, "I32")]
        op = ggml.custom("dw_tree_commit_state")
        return ggml.run(op, operands, self.state[s].shape, backend=self.backend, n_threads=n_threads)


def check(case, trees, n_threads=1):
    """Check each path of each tree against the stock op, bit for bit, and the longest against float64."""
    factors, out = case.tree(trees, n_threads)
    for s, parents in enumerate(trees):
        n = len(parents)
        for i in range(n):
            path = path_to(parents, i)
            stock_out, stock_states = delta_net.run(case.along(s, path), 1, backend=case.backend)
            assert np.array_equal(out[s, i], stock_out[0, -1]), (trees, s, i)
            kept = case.commit(factors, s, path, n, n_threads)
            assert np.array_equal(kept, stock_states[0, 0]), (trees, s, path)
        exact_out, exact_states = delta_net.oracle(case.along(s, path))
        np.testing.assert_allclose(out[s, n - 1], exact_out[0, -1], rtol=0, atol=2e-4)
        np.testing.assert_allclose(kept, exact_states[-1, 0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("n", range(1, 7))
def test_every_small_tree(n):
    case = Case(np.random.default_rng(), 1, n, heads=2, key_heads=1, size=16)
    for parents in every_tree(n):
        check(case, [parents])


@pytest.mark.parametrize("n", range(1, 5))
def test_every_pair_of_small_trees(n):
    case = Case(np.random.default_rng(), 2, n, heads=2, key_heads=1, size=16)
    for trees in itertools.product(every_tree(n), repeat=2):
        check(case, trees)


@pytest.mark.parametrize(("heads", "key_heads", "size"), SHAPES)
def test_random_trees_of_every_head_shape(heads, key_heads, size):
    rng = np.random.default_rng()
    for n_seqs, n, n_threads in ((1, 2, 1), (1, 16, 3), (1, 64, 2), (2, 9, 3), (3, 7, 2)):
        trees = [random_tree(rng, n) for _ in range(n_seqs)]
        check(Case(rng, n_seqs, n, heads, key_heads, size), trees, n_threads)


def test_trees_of_unlike_sizes_are_padded():
    """A plain step, a chain and a larger tree in one batch: what pads them has a path of its own."""
    rng = np.random.default_rng()
    trees = [padded([-1], 12), padded([-1, 0, 1, 2], 12), padded(random_tree(rng, 9), 12), padded([-1], 12)]
    check(Case(rng, len(trees), 12, heads=2, key_heads=1, size=32), trees)


@pytest.mark.parametrize("n_seqs", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_a_tree_in_company_is_the_tree_alone(n_seqs, n):
    rng = np.random.default_rng()
    case = Case(rng, n_seqs, n, heads=2, key_heads=1, size=32)
    trees = [random_tree(rng, n) for _ in range(n_seqs)]
    factors, out = case.tree(trees, n_threads=3)
    for s, parents in enumerate(trees):
        alone = case.alone(s)
        own_factors, own_out = alone.tree([parents], n_threads=1)
        assert np.array_equal(out[s], own_out[0])
        for i in range(n):
            path = path_to(parents, i)
            assert np.array_equal(
                case.commit(factors, s, path, n, n_threads=3), alone.commit(own_factors, 0, path, n)
            )


@pytest.mark.parametrize("n", [2, 5, 9, 64])
def test_any_preorder_will_do(n):
    """That in which states are kept for the shortest time, too."""
    rng = np.random.default_rng()
    case = Case(rng, 2, n, heads=2, key_heads=1, size=16)
    trees = [random_tree(rng, n) for _ in range(2)]
    factors, out = case.tree(trees)
    case.order = heavy_last
    ordered_factors, ordered_out = case.tree(trees)
    assert np.array_equal(factors, ordered_factors, equal_nan=True)
    assert np.array_equal(out, ordered_out)


def test_rows_behind_the_batch_are_left_alone():
    """The rest of a scratch, whose factors another size of batch will use, keeps its poison."""
    rng = np.random.default_rng()
    case = Case(rng, 2, 3, heads=2, key_heads=1, size=16)
    case.room = 8
    factors, out = case.tree([random_tree(rng, 3) for _ in range(2)])
    sizes = [case.key_heads * case.size, case.heads * case.size, case.heads]
    for part, size in zip(np.split(factors, np.cumsum(sizes)[:-1] * case.room), sizes, strict=True):
        rows = part.reshape(case.room, size)
        assert np.isfinite(rows[:6]).all()
        assert np.isnan(rows[6:]).all()
    assert np.isfinite(out).all()


def conv_windows(x, states, cells, trees, room, width=WIDTH, backend="CPU"):
    """Run the op on x [rows, channels]; return the windows [rows, channels, width]."""
    operands = [(x, "F32"), (states, "F32"), (cells, "I32"), (batch(trees, room), "I32")]
    shape = (*x.shape, width)
    op = ggml.custom("dw_tree_conv_windows", shape)
    return ggml.run(op, operands, shape, backend=backend, n_threads=2)


@pytest.mark.parametrize("n_seqs", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 5, 9, 64])
def test_conv_windows_hold_ancestors_then_the_old_inputs(n, n_seqs):
    rng = np.random.default_rng()
    channels = 10
    for _ in range(10):
        x = rng.standard_normal((n_seqs * n, channels)).astype(np.float32)
        states = rng.standard_normal((n_seqs + SPARE_CELLS, channels * (WIDTH - 1))).astype(np.float32)
        cells = rng.permutation(len(states))[:n_seqs].astype(np.int32)
        trees = [padded(random_tree(rng, int(rng.integers(1, n + 1))), n) for _ in range(n_seqs)]
        found = conv_windows(x, states, cells, trees, n_seqs * n + 3)
        for s, parents in enumerate(trees):
            own = slice(s * n, (s + 1) * n)
            old = states[cells[s]].reshape(channels, WIDTH - 1)
            for i in range(n):
                seen = np.concatenate([old, x[own][path_to(parents, i)].T], axis=1)
                assert np.array_equal(found[own][i], seen[:, -WIDTH:])
            alone = conv_windows(x[own], states, cells[s : s + 1], [parents], n)
            assert np.array_equal(found[own], alone)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 64])
def test_commit_keeps_the_last_conv_inputs(n):
    rng = np.random.default_rng()
    channels, room = 10, 72
    x = rng.standard_normal((room, channels)).astype(np.float32)
    old = rng.standard_normal((channels, WIDTH - 1)).astype(np.float32)
    path = sorted(rng.permutation(room)[:n].tolist())  # of any tree of a batch
    rows = np.full(1 + room, 1 << 30, np.int32)
    rows[: 1 + n] = [n, *path]
    operands = [(old, "F32"), (x, "F32"), (rows, "I32")]
    op = ggml.custom("dw_tree_commit_conv")
    found = ggml.run(op, operands, old.shape, use_ref=False, n_threads=3)
    assert np.array_equal(found, np.concatenate([old, x[path].T], axis=1)[:, -(WIDTH - 1) :])


def test_layers_of_a_commit_are_each_alone():
    check_commits_of_layers(np.random.default_rng(), "CPU")


def test_a_commit_of_nothing_changes_nothing():
    """And that of one node does: the comparisons above would see an op that did not run."""
    case = Case(np.random.default_rng(), 1, 2, heads=2, key_heads=1, size=16)
    factors, _ = case.tree([[-1, 0]])
    assert np.array_equal(case.commit(factors, 0, [], 2), case.state[0])
    assert not np.array_equal(case.commit(factors, 0, [0], 2), case.state[0])
