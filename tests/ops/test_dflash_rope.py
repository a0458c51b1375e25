"""ggml's rope with YaRN, as src/models/dflash.cpp calls it, against tools/tiny_moe/yarn.py in float64.

Factor 64, betas 32/1, positions up to 64 times the original context. The parameters are what
src/llama-context.cpp resolves for a file of rope type "yarn": ext_factor 1, and attn_factor 1, since the
magnitude 0.1 ln(factor) + 1 is put into cos and sin by the op itself.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from tiny_moe.yarn import Yarn, rotate

from tests.ops import ggml_graph as ggml

_p, _int, _float = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_rest = [_int, _int, *[_float] * 6]  # mode, original context, base, scale, ext, attn, beta fast, beta slow
for _name, _arguments in (
    ("ggml_rope_ext", [_p] * 4 + [_int] + _rest),
    ("ggml_rope_multi", [_p] * 4 + [_int, ctypes.POINTER(_int)] + _rest),
):
    getattr(ggml.base, _name).restype = _p
    getattr(ggml.base, _name).argtypes = _arguments

NEOX, MROPE = 2, 8
HEADS = 3


def rope(x: np.ndarray, positions: np.ndarray, mode: int, theta: float, yarn: Yarn | None) -> np.ndarray:
    """Rotate x [T, HEADS, dim] with ggml at positions [T], as a drafter of that rope mode does."""
    dim = x.shape[-1]
    y = yarn or Yarn(factor=1.0)
    rest = (mode, y.original, theta, 1 / y.factor, float(yarn is not None), 1.0, y.beta_fast, y.beta_slow)
    at = np.concatenate([positions] * 3 + [0 * positions]) if mode == MROPE else positions
    sections = (_int * 4)(dim // 2, 0, 0, 0)

    def op(ctx, a, b):
        if mode == MROPE:
            return ggml.base.ggml_rope_multi(ctx, a, b, None, dim, sections, *rest)
        return ggml.base.ggml_rope_ext(ctx, a, b, None, dim, *rest)

    operands = [(x.astype(np.float32)[None], "F32"), (at.astype(np.int32), "I32")]
    return ggml.run(op, operands, x.shape, use_ref=False, n_threads=1)


@pytest.mark.parametrize("mode", [NEOX, MROPE])
@pytest.mark.parametrize(
    ("dim", "theta", "yarn"),
    [
        (64, 1e4, None),
        (64, 1e4, Yarn(64, 512)),
        (64, 1e4, Yarn(64, 4096)),
        (128, 1e7, Yarn(64, 4096)),
        (128, 1e6, Yarn(64, 2048, 16, 2)),
        (256, 5e5, Yarn(2, 333)),
    ],
)
def test_equal_to_the_oracle(mode, dim, theta, yarn):
    rng = np.random.default_rng()
    end = 64 * (yarn.original if yarn else 512)
    positions = np.unique(np.concatenate([[0, 1, 2, end - 1], rng.integers(0, end, 60)]))
    x = rng.standard_normal((len(positions), HEADS, dim)).astype(np.float32)
    found = rope(x, positions, mode, theta, yarn)
    wanted = rotate(x.astype(np.float64), positions, theta, yarn)
    error = np.linalg.norm(found - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
    # ggml multiplies angles up in f32: some roundings of 2**-24 of an angle of at most the position.
    assert (error <= 1e-6 + 2**-22 * positions).all(), (positions, error)


def test_the_bound_sees_what_yarn_does():
    """Plain rope, a missing magnitude and other betas are far outside what the test above allows."""
    rng = np.random.default_rng(0)
    yarn = Yarn(64, 512)
    positions = np.arange(100, 400, 7)
    x = rng.standard_normal((len(positions), HEADS, 64))
    found = rope(x, positions, NEOX, 1e4, yarn)
    for wrong in (
        rotate(x, positions, 1e4),
        rotate(x, positions, 1e4, yarn) / (0.1 * np.log(64) + 1),
        rotate(x, positions, 1e4, Yarn(64, 512, 16, 2)),
    ):
        assert np.linalg.norm(found - wrong) / np.linalg.norm(found) > 0.02
