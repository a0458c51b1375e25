"""src/tree/sampled.*: drawn children and the walk over them give exactly the target's distribution."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from draftwood.engine import _capi

N = 400_000


def walk(p, q, n_children, seed=1, n=N):
    """Return how often each token came out, as parts of 1."""
    counts = (ctypes.c_int64 * len(p))()
    doubles = ctypes.c_double * len(p)
    status = _capi.lib.dw_tree_walk_drawn(doubles(*p), doubles(*q), len(p), n_children, seed, n, counts)
    assert status == _capi.OK
    return np.array(counts) / n


def wrong_walk(p, q, n_children, rng, n):
    """Walk as if children were drawn with replacement from q and tested one by one against the same p."""
    counts = np.zeros(len(p))
    for _ in range(n):
        for child in rng.choice(len(q), size=n_children, p=q):
            if rng.random() * q[child] < p[child]:
                counts[child] += 1
                break
        else:
            counts[rng.choice(len(p), p=p)] += 1
    return counts / n


def chi_square(found, p, n=N):
    """Return the statistic over its degrees of freedom; tokens that cannot come must not have."""
    possible = p > 0
    assert found[~possible].sum() == 0
    return float((((found - p) ** 2)[possible] / p[possible]).sum() * n / max(1, possible.sum() - 1))


@pytest.mark.parametrize("n_children", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_the_walk_follows_the_target(n_children, sharpness):
    rng = np.random.default_rng(int(10 * sharpness) + n_children)
    logits = rng.standard_normal(8) * sharpness
    p = np.exp(logits) / np.exp(logits).sum()
    other = logits + rng.standard_normal(8)
    q = np.exp(other) / np.exp(other).sum()
    # 1 expected, 3.5 is beyond the 99.9th percentile of 7 degrees of freedom
    assert chi_square(walk(p, q, n_children), p) < 3.5


def test_the_distribution_test_sees_a_wrong_walk():
    """Testing every child against p itself, as for one child alone, is biased: the statistic shows it."""
    rng = np.random.default_rng(3)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4])
    found = wrong_walk(p, q, 3, rng, 20_000)
    assert chi_square(found, p, 20_000) > 10


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),  # nothing in common
        ([0.5, 0.5, 0.0], [0.0, 0.5, 0.5]),
        ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),  # the same
        ([0.0, 0.0, 1.0], [0.2, 0.3, 0.5]),
        ([0.2, 0.3, 0.5], [0.0, 0.0, 1.0]),  # fewer to draw than children asked for
    ],
)
def test_edges(p, q):
    p = np.array(p)
    for n_children in (1, 2, 3):
        assert chi_square(walk(p, np.array(q), n_children, n=50_000), p, 50_000) < 7


def test_children_of_the_same_distribution_are_always_taken():
    """Where the drafter is the target, the first child is the token: that is what drawing gains."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(walk(p, p, 1), p, atol=0.005)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 64])
def test_a_shape_has_no_more_nodes_than_asked_for(n):
    children = (ctypes.c_int32 * _capi.MAX_TREE)()
    size = _capi.lib.dw_tree_drawn_shape(n, 6, 8, children)
    shape = list(children[:size])
    assert size <= n
    assert sum(shape) == size - 1
    level, node, depth = 1, 0, 0
    while level and node < size:  # in BFS order: each level is what the one before has as children
        counts = shape[node : node + level]
        assert sum(c > 0 for c in counts) <= 8
        node, level, depth = node + level, sum(counts), depth + 1
    assert depth <= 7
