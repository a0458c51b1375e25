"""src/ops/mul-mat-rows, quantised weights: a float64 oracle, and bit-equality over batch sizes and threads.

Weights are random bytes: every scale, sign and minimum that a type has occurs. gguf's own numpy code decodes
them.
"""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.ops import cpus
from tests.ops import ggml_graph as ggml
from tests.ops.test_mul_mat_rows import mul_mat, mul_mat_id

KINDS = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
# where a block has F16 numbers; others: at 0
HALVES = {"Q3_K": [108], "Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "MXFP4": []}
EPS = float(np.finfo(np.float32).eps)


def random_weights(rng, shape, kind):
    """Return bytes u8 of weights [..., rows, n]."""
    values, n_bytes = ggml.BLOCKS[kind]
    *outer, n = shape
    blocks = rng.integers(0, 256, (*outer, n // values, n_bytes), np.uint8)
    for at in HALVES.get(kind, [0]):
        scales = rng.uniform(-1, 1, (*outer, n // values, 1)).astype(np.float16) / np.float16(64)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":  # powers of two: 2^-127, 2^-126, and 2^-6 to 2^-4
        blocks[..., 0] = rng.choice([0, 1, 121, 122, 123], blocks.shape[:-1])
    return blocks.reshape(*outer, n // values * n_bytes)


def decoded(weights, kind):
    """Return weights as float64 [..., rows, n]."""
    return dequantize(weights, GGMLQuantizationType[kind]).astype(np.float64)


def quantised(x, kind):
    """Return activations as the products take them, f64 of x's shape."""
    values = ggml.BLOCKS[kind][0]
    blocks = x.reshape(*x.shape[:-1], -1, values)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    d = most / np.float32(127)
    d = (d.astype(np.float16) if values == 32 else d).astype(np.float64)
    return (np.rint(blocks * inverse) * d).reshape(x.shape)


def assert_close(found, weights, kind, x):
    """Compare with weights . x in float64; x as quantised, [..., cols, n]."""
    w = decoded(weights, kind).swapaxes(-1, -2)
    # minima are subtracted from larger sums
    size = np.abs(x) @ (np.abs(w) + np.abs(w).max(-2, keepdims=True))
    assert (np.abs(found - x @ w) <= 4 * EPS * size + 1e-30).all()


def extremes(kind):
    """Yield weights and x [5, 512]: quants the largest or smallest, activations of one size."""
    values, n_bytes = ggml.BLOCKS[kind]
    n = 512
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        weights = np.full((32, n // values * n_bytes), byte, np.uint8)
        blocks = weights.reshape(-1, n_bytes)
        for at in HALVES.get(kind, [0]):
            blocks[:, at : at + 2] = np.float16([0.25]).view(np.uint8)
        for signs in (1.0, -1.0, np.resize([1.0, -1.0], n)):
            yield weights, np.broadcast_to(np.float32(3.0) * signs, (5, n)).astype(np.float32)


def skip_without_products():
    """Skip where ggml's own products answer: they take NaN for 0."""
    name = ggml.cpu_module().stem
    native = name.endswith("-cpu") and not {"avx2", "asimddp"} & cpus.features()
    if native or name.endswith(("-sse42", "-x64", "-armv8.0_1")):
        pytest.skip("this instruction set has no products of ours")


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("n_blocks", [1, 3, 8, 11])
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64])
def test_against_float64(kind, n_blocks, rows):
    rng = np.random.default_rng([n_blocks, rows])
    n = n_blocks * ggml.BLOCKS[kind][0]
    weights = random_weights(rng, (1, 1, rows, n), kind)
    for cols in (1, 13):
        x = rng.standard_normal((1, 1, cols, n)).astype(np.float32)
        assert_close(mul_mat(weights, kind, x), weights, kind, quantised(x, kind))


@every_kind
def test_extreme_quants(kind):
    for weights, x in extremes(kind):
        found = mul_mat(weights[None, None], kind, x[None, None])
        assert_close(found[0, 0], weights, kind, quantised(x, kind))


@every_kind
def test_zeros(kind):
    weights = random_weights(np.random.default_rng(1), (1, 1, 20, 256), kind)
    assert not mul_mat(weights, kind, np.zeros((1, 1, 3, 256), np.float32)).any()


@every_kind
def test_rows_do_not_depend_on_the_batch(kind):
    rng = np.random.default_rng(8)
    weights = random_weights(rng, (1, 1, 50, 2560), kind)
    x = rng.standard_normal((1, 1, 300, 2560)).astype(np.float32)
    whole = mul_mat(weights, kind, x)
    assert np.array_equal(mul_mat(weights, kind, x, n_threads=5), whole)
    for cols in [*range(1, 10), 16, 33, 64, 257]:
        for n_threads in (1, 2):
            part = mul_mat(weights, kind, x[:, :, :cols], n_threads=n_threads)
            assert np.array_equal(part, whole[:, :, :cols])


@every_kind
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(kind, value):
    skip_without_products()
    rng = np.random.default_rng(4)
    weights = random_weights(rng, (1, 1, 20, 512), kind)
    x = rng.standard_normal((1, 1, 3, 512)).astype(np.float32)
    whole = mul_mat(weights, kind, x)
    x[0, 0, 1, 300:310] = value
    found = mul_mat(weights, kind, x)
    assert not np.isfinite(found[0, 0, 1]).any()
    assert np.array_equal(found[:, :, ::2], whole[:, :, ::2])


@every_kind
def test_rows_that_lie_apart(kind):
    """Weights are the beginnings of longer rows, as a KV cache has them; a tile is left over."""
    values, n_bytes = ggml.BLOCKS[kind]
    rng = np.random.default_rng(6)
    stored = random_weights(rng, (1, 1, 21, 4 * values), kind)
    weights = np.ascontiguousarray(stored[..., : 3 * n_bytes])
    x = rng.standard_normal((1, 1, 3, 3 * values)).astype(np.float32)

    def product(context, tensor, activations):
        row = 4 * n_bytes
        part = ggml.base.ggml_view_4d(context, tensor, 3 * values, 21, 1, 1, row, 21 * row, 21 * row, 0)
        return ggml.base.ggml_mul_mat(context, part, activations)

    found = ggml.run(product, [(stored, kind), (x, "F32")], (1, 1, 3, 21), use_ref=True)
    assert np.array_equal(found, mul_mat(weights, kind, x))


@every_kind
def test_broadcast_of_heads(kind):
    rng = np.random.default_rng(11)
    weights = random_weights(rng, (1, 2, 33, 256), kind)
    x = rng.standard_normal((1, 6, 4, 256)).astype(np.float32)
    found = mul_mat(weights, kind, x)
    for head in range(6):
        assert_close(found[0, head], weights[0, head // 3], kind, quantised(x[0, head], kind))


@every_kind
@pytest.mark.parametrize("shared_input", [True, False])
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts(kind, shared_input, tokens):
    rng = np.random.default_rng([5, tokens])
    weights = random_weights(rng, (6, 40, 512), kind)
    ids = np.stack([rng.permutation(6)[:3] for _ in range(tokens)]).astype(np.int32)
    x = rng.standard_normal((tokens, 1 if shared_input else 3, 512)).astype(np.float32)
    whole = mul_mat_id(weights, kind, x, ids)
    rows = np.broadcast_to(quantised(x, kind), (tokens, 3, 512))
    for token in range(tokens):
        for slot in range(3):
            expert = weights[ids[token, slot]]
            assert_close(whole[token, slot], expert, kind, rows[token, slot])
    for n in (1, 2, tokens - 1):
        assert np.array_equal(mul_mat_id(weights, kind, x[:n], ids[:n], n_threads=3), whole[:n])


def test_ggml_has_other_rows_without_use_ref():
    """Ours answer only where use_ref is set."""
    skip_without_products()
    rng = np.random.default_rng(3)
    weights = random_weights(rng, (1, 1, 64, 512), "Q4_K")
    x = rng.standard_normal((1, 1, 1, 512)).astype(np.float32)
    assert not np.array_equal(mul_mat(weights, "Q4_K", x), mul_mat(weights, "Q4_K", x, use_ref=False))
