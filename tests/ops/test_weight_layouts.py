"""Products whose weights lie in a layout of the CPU's own (tiles of AMX, rows side by side): float64 oracle.

A recurrent layer's product is over x f32 [sequences, tokens, n]: here a batch has several sequences.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.ops import ggml_graph as ggml
from tests.ops.layer_part import weights

N_IN, N_OUT = 256, 128
POINTER = ctypes.c_void_p
for _name, _result, _arguments in (
    ("ggml_backend_buft_name", ctypes.c_char_p, [POINTER]),
    ("ggml_backend_alloc_ctx_tensors_from_buft", POINTER, [POINTER, POINTER]),
):
    _function = getattr(ggml.base, _name)
    _function.restype, _function.argtypes = _result, _arguments


def layouts() -> dict[str, int]:
    """Return the buffer types for weights that this CPU has beside plain memory, by name."""
    found = ggml.registry.ggml_backend_reg_by_name(b"CPU")
    device = ggml.base.ggml_backend_reg_dev_get(found, 0)
    list_of = ctypes.CFUNCTYPE(ctypes.POINTER(POINTER), POINTER)
    listed = list_of(ggml.symbol("CPU", "ggml_backend_dev_get_extra_bufts"))(device)
    names: dict[str, int] = {}
    while address := listed[len(names)]:
        names[ggml.base.ggml_backend_buft_name(address).decode()] = address
    return names


@contextmanager
def weight_in(layout: int, stored: np.ndarray, kind: str) -> Iterator[int]:
    """Yield a tensor for `stored` in a buffer of that type, not filled yet."""
    context = ggml.base.ggml_init(ggml._InitParams(1 << 16, None, True))
    tensor = ggml._new_tensor(context, stored, kind)
    buffer = ggml.base.ggml_backend_alloc_ctx_tensors_from_buft(context, layout)
    assert buffer, "no memory"
    try:
        yield tensor
    finally:
        ggml.base.ggml_backend_buffer_free(buffer)
        ggml.base.ggml_free(context)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (2, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("layout", layouts())
def test_batches_of_several_sequences(layout, kind, shape):
    rng = np.random.default_rng(17)
    (stored, _), values = weights(rng, (N_OUT, N_IN), kind)
    x = rng.standard_normal((*shape, N_IN), np.float32)
    with weight_in(layouts()[layout], stored, kind) as weight:

        def product(context, x):
            return ggml.base.ggml_mul_mat(context, weight, x)

        if not ggml.supports(product, [(x, "F32")], "CPU"):
            pytest.skip(f"{layout} has no products of {kind}")
        ggml.base.ggml_backend_tensor_set(weight, stored.ctypes.data, 0, stored.nbytes)
        found = ggml.run(product, [(x, "F32")], (*shape, N_OUT), n_threads=2)
    oracle = x.astype(np.float64) @ values.T
    # beside quantised weights activations are rounded to 8 bits: half a step for each
    step = np.abs(x).max() / 127 if kind != "F16" else 1e-5
    np.testing.assert_allclose(found, oracle, rtol=0, atol=step / 2 * np.abs(values).sum(axis=1).max())
