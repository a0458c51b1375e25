"""src/ops/mul-scalar: bit-equal to ggml's own MUL, whatever the shape, broadcast and thread count."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("x_shape", "y_shape"),
    [
        ((1, 1, 5, 64), (1, 1, 5, 1)),
        ((1, 1, 5, 64), (1, 1, 1, 1)),
        ((1, 7, 4, 33), (1, 7, 4, 1)),
        ((1, 7, 4, 33), (1, 1, 4, 1)),
        ((2, 3, 4, 17), (1, 3, 2, 1)),
        ((2, 3, 4, 2), (2, 1, 1, 1)),
    ],
)
def test_equal_to_ggml(x_shape, y_shape, n_threads):
    rng = np.random.default_rng()
    x = rng.standard_normal(x_shape).astype(np.float32)
    y = rng.standard_normal(y_shape).astype(np.float32)
    x.flat[0], y.flat[0] = np.inf, -0.0
    operands = [(x, "F32"), (y, "F32")]
    ours = ggml.run(ggml.base.ggml_mul, operands, x_shape, use_ref=True, n_threads=n_threads)
    stock = ggml.run(ggml.base.ggml_mul, operands, x_shape, use_ref=False, n_threads=n_threads)
    repeats = [a // b for a, b in zip(x_shape[:3], y_shape[:3], strict=True)]
    with np.errstate(invalid="ignore"):
        oracle = (x.astype(np.float64) * np.tile(y, (*repeats, 1))).astype(np.float32)
    assert np.array_equal(ours.view(np.uint32), stock.view(np.uint32))
    np.testing.assert_array_equal(ours, oracle)  # a product of two f32 is exact in f64: one rounding
