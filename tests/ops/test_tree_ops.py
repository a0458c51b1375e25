"""src/ops/tree-ops.*: paths of a tree are bit-equal to the stock ops, a commit to plain decoding."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.ops import delta_net
from tests.ops import ggml_graph as ggml

N_CELLS, CELL, ROOM = 3, 1, 16  # cells of the state cache, the one in use, nodes that a scratch has room for
WIDTH = 4  # of the convolution


def every_tree(n):
    """Yield all parent lists in BFS order of n nodes."""
    for rest in itertools.product(*(range(i) for i in range(1, n))):
        if list(rest) == sorted(rest):
            yield [-1, *rest]


def random_tree(rng, n):
    parents = [-1]
    for i in range(1, n):
        parents.append(int(rng.integers(max(0, parents[-1]), i)))
    return parents


def path_to(parents, i):
    path = []
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path[::-1]


class Case:
    """Random inputs of a layer: arrays of delta_net.inputs for N nodes, and a cache of N_CELLS states."""

    def __init__(self, rng, n, heads, key_heads, size):
        self.n, self.heads, self.key_heads, self.size = n, heads, key_heads, size
        *self.qkvgb, state = delta_net.inputs(rng, 1, n, heads, key_heads, size)
        self.states = rng.standard_normal((N_CELLS, state.size)).astype(np.float32)
        self.states[CELL] = state.reshape(-1)
        self.state = state
        self.n_factors = ROOM * (key_heads * size + heads * size + heads)

    def tree(self, parents, n_threads=2):
        """Run the tree op; return factors f32[n_factors], out [N, heads, size]."""
        scratch = np.full(self.n_factors + self.n * self.heads * self.size, np.nan, np.float32)
        index = [np.array([CELL], np.int32), np.array(parents, np.int32)]
        operands = [
            (scratch, "F32"),
            *((x, "F32") for x in self.qkvgb),
            (self.states, "F32"),
            *((x, "I32") for x in index),
        ]
        found = ggml.run(
            ggml.custom("dw_tree_delta_net"), operands, scratch.shape, use_ref=False, n_threads=n_threads
        )
        return found[: self.n_factors], found[self.n_factors :].reshape(self.n, self.heads, self.size)

    def along(self, path):
        """Return the six inputs of the stock op for the nodes of a path."""
        return [*(x[:, path] for x in self.qkvgb), self.state]

    def commit(self, factors, path, n_threads=2):
        """Run the commit op on the state; return the new one [heads, size, size]."""
        nodes = np.zeros(1 + ROOM, np.int32)
        nodes[: 1 + len(path)] = [len(path), *path]
        operands = [(self.state[0], "F32"), (np.array(factors), "F32"), (nodes, "I32")]
        op = ggml.custom("dw_tree_commit_state")
        shape = self.state[0].shape
        return ggml.run(op, operands, shape, use_ref=False, n_threads=n_threads, in_place=True)


def check(case, parents, n_threads=2):
    factors, out = case.tree(parents, n_threads)
    for i in range(case.n):
        path = path_to(parents, i)
        inputs = case.along(path)
        stock_out, stock_states = delta_net.run(inputs, 1, use_ref=False, n_threads=1)
        assert np.array_equal(out[i], stock_out[0, -1]), (parents, i)
        assert np.array_equal(case.commit(factors, path, n_threads), stock_states[0, 0]), (parents, path)
    exact_out, exact_states = delta_net.oracle(inputs)
    np.testing.assert_allclose(out[case.n - 1], exact_out[0, -1], rtol=0, atol=2e-4)
    np.testing.assert_allclose(case.commit(factors, path, n_threads), exact_states[-1, 0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("n", range(1, 7))
def test_every_small_tree(n):
    rng = np.random.default_rng()
    case = Case(rng, n, heads=2, key_heads=1, size=16)
    for parents in every_tree(n):
        check(case, parents)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size"), [(2, 1, 128), (4, 2, 64), (3, 3, 32), (2, 1, 33), (6, 2, 16), (1, 1, 256)]
)
def test_random_trees_of_every_head_shape(heads, key_heads, size):
    rng = np.random.default_rng()
    for n, n_threads in ((2, 1), (7, 3), (ROOM, 2)):
        parents = random_tree(rng, n)
        check(Case(rng, n, heads, key_heads, size), parents, n_threads)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_conv_windows_hold_ancestors_then_the_old_inputs(n):
    rng = np.random.default_rng()
    channels = 10
    x = rng.standard_normal((n, channels)).astype(np.float32)
    states = rng.standard_normal((N_CELLS, channels * (WIDTH - 1))).astype(np.float32)
    old = states[CELL].reshape(channels, WIDTH - 1)
    for _ in range(20):
        parents = random_tree(rng, n)
        operands = [
            (x, "F32"),
            (states, "F32"),
            (np.array([CELL], np.int32), "I32"),
            (np.array(parents, np.int32), "I32"),
        ]
        op = ggml.custom("dw_tree_conv_windows", (n, channels, WIDTH))
        found = ggml.run(op, operands, (n, channels, WIDTH), use_ref=False, n_threads=2)
        for i in range(n):
            seen = np.concatenate([old, x[path_to(parents, i)].T], axis=1)
            assert np.array_equal(found[i], seen[:, -WIDTH:])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_commit_keeps_the_last_conv_inputs(n):
    rng = np.random.default_rng()
    channels = 10
    x = rng.standard_normal((ROOM, channels)).astype(np.float32)
    old = rng.standard_normal((channels, WIDTH - 1)).astype(np.float32)
    path = [0, *sorted(rng.permutation(np.arange(1, ROOM))[: n - 1].tolist())]
    nodes = np.zeros(1 + ROOM, np.int32)
    nodes[: 1 + n] = [n, *path]
    operands = [(old, "F32"), (x, "F32"), (nodes, "I32")]
    op = ggml.custom("dw_tree_commit_conv")
    found = ggml.run(op, operands, old.shape, use_ref=False, n_threads=3, in_place=True)
    assert np.array_equal(found, np.concatenate([old, x[path].T], axis=1)[:, -(WIDTH - 1) :])
