"""src/ops/mul-mat-rows: against a float64 oracle, and bit-equal whatever the batch size or thread count."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml

# f32 sums of n products: the bound of their rounding, with a margin of 4 for the order
EPS = 4 * np.finfo(np.float32).eps


def mul_mat(weights, kind, x, *, use_ref=True, n_threads=2):
    """weights stored [m3, m2, rows, n], x f32 [b3, b2, cols, n] -> [b3, b2, cols, rows]."""
    shape = (*x.shape[:-1], weights.shape[-2])
    operands = [(weights, kind), (x, "F32")]
    return ggml.run(ggml.base.ggml_mul_mat, operands, shape, use_ref=use_ref, n_threads=n_threads)


def mul_mat_id(weights, kind, x, ids, *, use_ref=True, n_threads=2):
    """weights [experts, rows, n], x f32 [tokens, slots | 1, n], ids i32 [tokens, slots] -> [.., rows]."""
    shape = (*ids.shape, weights.shape[-2])
    operands = [(weights, kind), (x, "F32"), (ids, "I32")]
    return ggml.run(ggml.base.ggml_mul_mat_id, operands, shape, use_ref=use_ref, n_threads=n_threads)


def bound(weights, kind, x):
    """The oracle's error bound for a plain product: eps * sum |w| |x|, per element."""
    return (
        EPS
        * x.shape[-1] ** 0.5
        * np.abs(x.astype(np.float64))
        @ np.abs(ggml.decode(weights, kind)).swapaxes(-1, -2)
    )


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("n", [1, 7, 16, 31, 32, 256, 257])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 40])
def test_against_float64(kind, n, rows):
    rng = np.random.default_rng([n, rows])
    weights = ggml.encode(rng.standard_normal((1, 1, rows, n)), kind)
    x = rng.standard_normal((1, 1, 5, n)).astype(np.float32)
    oracle = x.astype(np.float64) @ ggml.decode(weights, kind).swapaxes(-1, -2)
    found = mul_mat(weights, kind, x)
    assert (np.abs(found - oracle) <= bound(weights, kind, x) + 1e-30).all()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_broadcast_of_heads(kind, n_threads):
    """Grouped heads: 2 matrices of weights for 6 of activations, as attention over a KV cache has them."""
    rng = np.random.default_rng(11)
    weights = ggml.encode(rng.standard_normal((1, 2, 33, 64)), kind)
    x = rng.standard_normal((1, 6, 4, 64)).astype(np.float32)
    oracle = np.einsum("bhcn,bhrn->bhcr", x.astype(np.float64), ggml.decode(weights, kind).repeat(3, axis=1))
    found = mul_mat(weights, kind, x, n_threads=n_threads)
    np.testing.assert_allclose(found, oracle, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("shared_input", [True, False])
def test_experts_against_float64(kind, shared_input):
    rng = np.random.default_rng(5)
    weights = ggml.encode(rng.standard_normal((6, 20, 48)), kind)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(9)]).astype(np.int32)
    x = rng.standard_normal((9, 1 if shared_input else 3, 48)).astype(np.float32)
    found = mul_mat_id(weights, kind, x, ids)
    oracle = np.einsum(
        "tsn,tsrn->tsr", np.broadcast_to(x, (9, 3, 48)).astype(np.float64), ggml.decode(weights, kind)[ids]
    )
    np.testing.assert_allclose(found, oracle, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_rows_do_not_depend_on_the_batch(kind):
    rng = np.random.default_rng(8)
    weights = ggml.encode(rng.standard_normal((1, 1, 50, 200)), kind)
    x = rng.standard_normal((1, 1, 64, 200)).astype(np.float32)
    whole = mul_mat(weights, kind, x)
    for cols in [*range(1, 9), 16, 33, 64]:
        for n_threads in (1, 2):
            part = mul_mat(weights, kind, x[:, :, :cols], n_threads=n_threads)
            assert np.array_equal(part, whole[:, :, :cols])


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_expert_rows_do_not_depend_on_the_batch(kind):
    rng = np.random.default_rng(9)
    weights = ggml.encode(rng.standard_normal((5, 24, 80)), kind)
    ids = np.stack([rng.permutation(5)[:2] for _ in range(12)]).astype(np.int32)
    x = rng.standard_normal((12, 1, 80)).astype(np.float32)
    whole = mul_mat_id(weights, kind, x, ids)
    for tokens in range(1, 12):
        assert np.array_equal(mul_mat_id(weights, kind, x[:tokens], ids[:tokens]), whole[:tokens])


def test_stock_path_is_untouched_without_use_ref():
    """The kernel answers only where use_ref is set: F16 stock rounds its input, ours does not."""
    rng = np.random.default_rng(3)
    weights = ggml.encode(rng.standard_normal((1, 1, 64, 512)), "F16")
    x = rng.standard_normal((1, 1, 1, 512)).astype(np.float32)
    assert not np.array_equal(mul_mat(weights, "F16", x), mul_mat(weights, "F16", x, use_ref=False))
