"""src/ops/top-rows/top-rows.*: the best tokens of rows of logits, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml

PART = 8192  # DW_TOP_ROWS_PART, logits that a block of a GPU looks at
THREADS = 256  # of such a block: thread t has logits t, t + THREADS ...


def operands(logits, k):
    """Return the op's, a poisoned scratch last."""
    n_rows, n_vocab = logits.shape
    n_scratch = n_rows * -(-n_vocab // PART) * (2 * k + 2)
    return [(logits, "F32"), (np.full(n_scratch, np.nan, np.float32), "F32")]


def top_rows(logits, k, *, backend="CPU", n_threads=2):
    """Return ids i32 [R, k], their logits [R, k], greatest [R] and log-sum-exp [R] of logits [R, n]."""
    shape = (len(logits), 2 * k + 2)
    op = ggml.custom("dw_top_rows", shape)
    found = ggml.run(op, operands(logits, k), shape, backend=backend, n_threads=n_threads, scratch=(1,))
    return split(found, k)


def split(found, k):
    """Return the four parts of rows as the op writes them."""
    return found[:, :k].copy().view(np.int32), found[:, k : 2 * k], found[:, 2 * k], found[:, 2 * k + 1]


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


def few_threads_have_all(rng, shape):
    """As many of a block's groups of threads as there are wanted tokens hold its better half, all of it."""
    groups = rng.permutation(THREADS // 2)[: THREADS // 4]
    chosen = np.isin(np.arange(shape[-1]) % THREADS // 2, groups)
    return np.where(chosen, 10 + rng.standard_normal(shape), rng.standard_normal(shape))


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
    few_threads_have_all,
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
