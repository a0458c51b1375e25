"""src/ops/top-rows/top-rows.*: the best tokens of rows of logits, against numpy in float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml

MOST = 1 << 20  # dw::top_rows::max_vocab, logits of a row on a GPU
GROUP = 64  # neighbouring logits whose best is found first
TEAMS = 128  # of groups: each puts up its best; team t has groups t, t + TEAMS ...


class Layout(ctypes.Structure):
    """dw::top_rows::row_layout: where the parts of a row begin, in values of four bytes."""

    _fields_ = [(part, ctypes.c_int64) for part in ("ids", "logits", "greatest", "log_sum", "n_values")]


def layout(k):
    """Return how the library packs a row of k tokens (src/ops/top-rows/row.h)."""
    return ctypes.CFUNCTYPE(Layout, ctypes.c_int64)(ggml.symbol("CPU", "dw_top_rows_layout"))(k)


def shape_of(logits, k):
    """Return the shape of the op's result for logits [R, n]."""
    return len(logits), layout(k).n_values


def top_rows(logits, k, tokens=None, *, backend="CPU", n_threads=2):
    """Return ids i32 [R, k], their logits [R, k], greatest [R] and log-sum-exp [R] of logits [R, n].

    With tokens i32 [n] ids are of these.
    """
    shape = shape_of(logits, k)
    op = ggml.custom("dw_top_rows", shape)
    operands = [(logits, "F32"), *([] if tokens is None else [(tokens, "I32")])]
    return split(ggml.run(op, operands, shape, backend=backend, n_threads=n_threads), k)


def split(found, k):
    """Return the four parts of rows as the op packs them."""
    at = layout(k)
    ids = found[:, at.ids : at.ids + k].copy().view(np.int32)
    return ids, found[:, at.logits : at.logits + k], found[:, at.greatest], found[:, at.log_sum]


def oracle(row, k):
    """Return ids, logits, greatest and log-sum-exp of one row in float64."""
    x = row.astype(np.float64)
    numbers = x[~np.isnan(x)]
    best = np.lexsort((np.arange(len(x)), np.where(np.isnan(x), 0, -x), np.isnan(x)))[:k]
    greatest = numbers.max(initial=-np.inf)
    if np.isinf(greatest):
        return best, x[best], greatest, greatest
    return best, x[best], greatest, greatest + np.log(np.exp(numbers - greatest).sum())


def check(logits, k, found):
    """Check what was found in each row: ids and logits exactly, sums to 1e-5."""
    for row, ids, best, greatest, total in zip(logits, *found, strict=True):
        wanted = oracle(row, k)
        assert np.array_equal(ids, wanted[0])
        assert np.array_equal(best, wanted[1], equal_nan=True)
        assert greatest == wanted[2]
        if np.isfinite(wanted[3]):
            assert abs(total - wanted[3]) <= 1e-5 * max(1.0, abs(wanted[3]))
        else:
            assert total == wanted[3]


def normal(rng, shape):
    return 3 * rng.standard_normal(shape) - 5


def ties(rng, shape):
    return rng.integers(-5, 6, shape)


def all_equal(rng, shape):
    return np.full(shape, rng.standard_normal())


def mostly_forbidden(rng, shape):
    """As a grammar leaves it; in rows of few tokens all may be forbidden."""
    return np.where(rng.random(shape) < 0.999, -np.inf, rng.standard_normal(shape))


def forbidden(rng, shape):
    return np.full(shape, -np.inf)


def with_nan(rng, shape):
    return np.where(rng.random(shape) < 0.1, rng.choice([np.nan, -np.nan], shape), normal(rng, shape))


def nothing_else_than_nan(rng, shape):
    return np.full(shape, np.nan)


def zeros_and_subnormals(rng, shape):
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    return rng.choice([0.0, -0.0, tiny, -tiny, -np.inf, np.nan], shape)


def with_infinity(rng, shape):
    return np.where(rng.random(shape) < 0.01, np.inf, normal(rng, shape))


def ascending(rng, shape):
    return np.sort(normal(rng, shape))


def descending(rng, shape):
    return -ascending(rng, shape)


def few_teams_have_all(rng, shape):
    """Half as many teams as there may be wanted tokens hold the better part of a row, all of it."""
    chosen = np.isin(np.arange(shape[-1]) // GROUP % TEAMS, rng.permutation(TEAMS)[: TEAMS // 4])
    return np.where(chosen, 10 + rng.standard_normal(shape), rng.standard_normal(shape))


def one_group_has_all(rng, shape):
    """Neighbours are the best, and what is left is far under them."""
    first = rng.integers(shape[-1]) // GROUP * GROUP
    chosen = np.isin(np.arange(shape[-1]) // GROUP, first // GROUP)
    return np.where(chosen, 10 + rng.standard_normal(shape), rng.standard_normal(shape))


def best_are_equal(rng, shape):
    """In all parts of a row, more of them than a block keeps."""
    return np.where(rng.random(shape) < 0.5, 3.0, rng.standard_normal(shape))


def large(rng, shape):
    """Sums that would overflow or vanish without the greatest taken off."""
    return 1e4 * rng.standard_normal(shape) + rng.choice([-1e6, 1e6])


KINDS = [
    normal,
    ties,
    all_equal,
    mostly_forbidden,
    forbidden,
    with_nan,
    nothing_else_than_nan,
    zeros_and_subnormals,
    with_infinity,
    ascending,
    descending,
    few_teams_have_all,
    one_group_has_all,
    best_are_equal,
    large,
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_vocab", "k"), [(1, 1), (5, 5), (64, 64), (257, 7), (8193, 64), (20011, 1)])
def test_near_float64(kind, n_vocab, k):
    rng = np.random.default_rng()
    for n_rows, n_threads in ((1, 1), (3, 2)):
        logits = kind(rng, (n_rows, n_vocab)).astype(np.float32)
        check(logits, k, top_rows(logits, k, n_threads=n_threads))


@pytest.mark.parametrize("k", range(1, 65))
def test_every_number_of_tokens(k):
    logits = ties(np.random.default_rng(), (2, 500)).astype(np.float32)
    check(logits, k, top_rows(logits, k))


def test_rows_of_a_model():
    logits = normal(np.random.default_rng(), (4, 248320)).astype(np.float32)
    check(logits, 64, top_rows(logits, 64))


def check_names(rng, n_vocab, k, **settings):
    """Check that ids are of the given tokens, in any order, and that nothing else changes."""
    logits = ties(rng, (3, n_vocab)).astype(np.float32)
    tokens = rng.permutation(248320)[:n_vocab].astype(np.int32)
    named, bare = (top_rows(logits, k, names, **settings) for names in (tokens, None))
    assert np.array_equal(named[0], tokens[bare[0]])
    assert all(np.array_equal(*each) for each in zip(named[1:], bare[1:], strict=True))


@pytest.mark.parametrize(("n_vocab", "k"), [(1, 1), (64, 64), (8193, 7), (62080, 64)])
def test_logits_of_few_tokens(n_vocab, k):
    check_names(np.random.default_rng(), n_vocab, k)


def test_a_row_begins_with_its_best_token():
    """Drafters copy that one value on the device. The parts lie side by side and fill a row."""
    for k in (1, 2, 64):
        at = layout(k)
        assert (at.ids, at.logits, at.greatest, at.log_sum) == (0, k, 2 * k, 2 * k + 1)
        assert at.n_values == 2 * k + 2
