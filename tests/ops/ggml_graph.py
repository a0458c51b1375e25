"""Run one ggml op on the CPU backend from numpy arrays: a minimal ctypes face of the built libraries.

Shapes here are numpy's (slowest first); ggml's ne is their reverse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from draftwood._llama_cpp import llama_cpp  # its import loads the libraries, from the right folder

TYPES = {"F32": 0, "F16": 1, "Q8_0": 8, "I32": 26, "BF16": 30}
Q8_0_ELEMENTS, Q8_0_BYTES = 32, 34  # of a block
MAX_DIMS = 4
ALL_THREADS = -1  # GGML_N_TASKS_MAX

_folder = llama_cpp._base_path
base = ctypes.CDLL(str(_folder / "libdraftwood-ggml-base.so"))
cpu = ctypes.CDLL(str(_folder / "libdraftwood-ggml-cpu.so"))

_p, _i64 = ctypes.c_void_p, ctypes.c_int64
for _lib, _name, _result, _arguments in (
    (base, "ggml_init", _p, None),
    (base, "ggml_free", None, [_p]),
    (base, "ggml_new_tensor", _p, [_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(_i64)]),
    (base, "ggml_mul_mat", _p, [_p, _p, _p]),
    (base, "ggml_mul_mat_id", _p, [_p, _p, _p, _p]),
    (base, "ggml_mul", _p, [_p, _p, _p]),
    (base, "ggml_soft_max_ext", _p, [_p, _p, _p, ctypes.c_float, ctypes.c_float]),
    (base, "ggml_view_4d", _p, [_p, _p, *[_i64] * 4, *[ctypes.c_size_t] * 4]),
    (base, "ggml_gated_delta_net", _p, [_p, _p, _p, _p, _p, _p, _p, _i64]),
    (base, "ggml_custom_inplace", _p, [_p, _p, ctypes.POINTER(_p), ctypes.c_int, _p, ctypes.c_int, _p]),
    (
        base,
        "ggml_custom_4d",
        _p,
        [_p, ctypes.c_int, _i64, _i64, _i64, _i64, ctypes.POINTER(_p), ctypes.c_int, _p, ctypes.c_int, _p],
    ),
    (base, "ggml_nbytes", ctypes.c_size_t, [_p]),
    (base, "ggml_get_data", _p, [_p]),
    (base, "ggml_new_graph", _p, [_p]),
    (base, "ggml_build_forward_expand", None, [_p, _p]),
    (base, "ggml_backend_alloc_ctx_tensors", _p, [_p, _p]),
    (base, "ggml_backend_buffer_clear", None, [_p, ctypes.c_uint8]),
    (base, "ggml_backend_buffer_free", None, [_p]),
    (base, "ggml_backend_graph_compute", ctypes.c_int, [_p, _p]),
    (base, "ggml_backend_free", None, [_p]),
    (cpu, "dw_tree_op_find", _p, [ctypes.c_char_p]),
    (cpu, "ggml_backend_cpu_init", _p, []),
    (cpu, "ggml_backend_cpu_set_n_threads", None, [_p, ctypes.c_int]),
    (cpu, "ggml_backend_cpu_set_use_ref", None, [_p, ctypes.c_bool]),
):
    _function = getattr(_lib, _name)
    _function.restype = _result
    if _arguments is not None:
        _function.argtypes = _arguments


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", _p), ("no_alloc", ctypes.c_bool)]


def encode(array: np.ndarray, kind: str) -> np.ndarray:
    """Return the bytes that ggml stores for f32 `array` as F32, F16 or BF16 (round to nearest even)."""
    if kind == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.ascontiguousarray(array, {"F32": np.float32, "F16": np.float16, "I32": np.int32}[kind])


def decode(stored: np.ndarray, kind: str) -> np.ndarray:
    """Return as float64 what `encode` stored."""
    if kind == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def custom(name: str, shape: tuple[int, ...] | None = None) -> Callable[..., Any]:
    """Return op(context, *sources) that runs one of src/ops/tree-ops.h or tree-attention.h on all threads.

    Its result is f32 of `shape`; without one it works in place on the first source.
    """
    function = cpu.dw_tree_op_find(name.encode())
    assert function, name

    def op(context: Any, *sources: Any) -> Any:
        if shape is not None:
            array = (_p * len(sources))(*sources)
            ne = (*reversed(shape), *[1] * (MAX_DIMS - len(shape)))
            return base.ggml_custom_4d(
                context, TYPES["F32"], *ne, array, len(sources), function, ALL_THREADS, None
            )
        destination, *sources = sources
        array = (_p * len(sources))(*sources)
        return base.ggml_custom_inplace(
            context, destination, array, len(sources), function, ALL_THREADS, None
        )

    return op


def view(context: Any, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the beginning of a tensor in another shape; strides in bytes, of all axes but the last."""
    ne = (*reversed(shape), *[1] * (MAX_DIMS - len(shape)))
    nb = (*reversed(strides), *[strides[0]] * (MAX_DIMS - 1 - len(strides)))
    return base.ggml_view_4d(context, tensor, *ne, *nb, 0)


def _new_tensor(context: Any, stored: np.ndarray, kind: str) -> Any:
    shape = list(stored.shape)
    if kind == "Q8_0":
        shape[-1] = shape[-1] // Q8_0_BYTES * Q8_0_ELEMENTS
    ne = (_i64 * len(shape))(*reversed(shape))
    return base.ggml_new_tensor(context, TYPES[kind], len(shape), ne)


def run(
    op: Callable[..., Any],
    operands: list[tuple[np.ndarray, str]],
    shape: tuple[int, ...],
    *,
    use_ref: bool,
    n_threads: int,
    dtype: type[np.generic] = np.float32,
) -> np.ndarray:
    """Compute op(context, *tensors); return what it holds, as `shape` of `dtype`.

    All that is no operand is poisoned first: bytes 0xFF, which are NaN. Operands must come out as they
    went in, but for the one that an op in place writes to.
    operands: (stored array, type) as `encode` gives them; Q8_0 as bytes u8.
    """
    context = base.ggml_init(_InitParams(1 << 20, None, True))
    backend = cpu.ggml_backend_cpu_init()
    cpu.ggml_backend_cpu_set_n_threads(backend, n_threads)
    cpu.ggml_backend_cpu_set_use_ref(backend, use_ref)
    tensors = [_new_tensor(context, stored, kind) for stored, kind in operands]
    result = op(context, *tensors)
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, result)
    buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
    try:
        base.ggml_backend_buffer_clear(buffer, 0xFF)
        given = [np.ascontiguousarray(stored) for stored, _ in operands]
        for tensor, data in zip(tensors, given, strict=True):
            assert base.ggml_nbytes(tensor) == data.nbytes
            ctypes.memmove(base.ggml_get_data(tensor), data.ctypes.data, data.nbytes)
        assert base.ggml_backend_graph_compute(backend, graph) == 0
        where = base.ggml_get_data(result)
        out = np.frombuffer(ctypes.string_at(where, base.ggml_nbytes(result)), dtype).reshape(shape)
        for tensor, data in zip(tensors, given, strict=True):
            at = base.ggml_get_data(tensor)
            left = ctypes.string_at(at, data.nbytes)
            assert at == where or left == data.tobytes(), "an operand was changed"
    finally:
        base.ggml_backend_buffer_free(buffer)
        base.ggml_backend_free(backend)
        base.ggml_free(context)
    return out.copy()
