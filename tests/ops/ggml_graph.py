"""Run ggml ops on the CPU or a CUDA device from numpy arrays: a minimal ctypes face of the built libraries.

Shapes here are numpy's (slowest first); ggml's ne is their reverse.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from draftwood._llama_cpp import llama_cpp  # its import loads the libraries, from the right folder

from tests.ops import cuda_on_cpu

TYPES = {"F32": 0, "F16": 1, "I32": 26, "I64": 27, "BF16": 30}
TYPES |= {"Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23}
TYPES |= {"Q3_K": 11, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ2_S": 22, "IQ3_XXS": 18, "IQ3_S": 21, "MXFP4": 39}
BLOCKS = {  # values and bytes of a block
    "Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34), "IQ4_NL": (32, 18), "MXFP4": (32, 17),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_XS": (256, 136),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110),
}  # fmt: skip
MAX_DIMS = 4
_MOST_TAKEN = 9  # sources that ggml_custom_4d takes; a node has room for one more
_NE, _SRC, _DATA = 16, 152, 248  # in struct ggml_tensor at the pin: ne, src, data
ALL_THREADS = -1  # GGML_N_TASKS_MAX
CUDA_ON_CPU = "CUDA on CPU"  # a backend for nodes of our ops: their CUDA kernels, run by cuda_on_cpu.py

folder = llama_cpp._base_path
base = ctypes.CDLL(str(folder / "libdraftwood-ggml-base.so"))
registry = ctypes.CDLL(str(folder / "libdraftwood-ggml.so"))

_p, _i64 = ctypes.c_void_p, ctypes.c_int64
for _lib, _name, _result, _arguments in (
    (base, "ggml_init", _p, None),
    (base, "ggml_free", None, [_p]),
    (base, "ggml_new_tensor", _p, [_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(_i64)]),
    (base, "ggml_mul_mat", _p, [_p, _p, _p]),
    (base, "ggml_mul_mat_id", _p, [_p, _p, _p, _p]),
    (base, "ggml_mul", _p, [_p, _p, _p]),
    (base, "ggml_soft_max_ext", _p, [_p, _p, _p, ctypes.c_float, ctypes.c_float]),
    (base, "ggml_flash_attn_ext", _p, [_p, _p, _p, _p, _p, *[ctypes.c_float] * 3]),
    (base, "ggml_view_4d", _p, [_p, _p, *[_i64] * 4, *[ctypes.c_size_t] * 4]),
    (base, "ggml_gated_delta_net", _p, [_p, _p, _p, _p, _p, _p, _p, _i64]),
    (base, "ggml_custom_inplace", _p, [_p, _p, ctypes.POINTER(_p), ctypes.c_int, _p, ctypes.c_int, _p]),
    (
        base,
        "ggml_custom_4d",
        _p,
        [_p, ctypes.c_int, _i64, _i64, _i64, _i64, ctypes.POINTER(_p), ctypes.c_int, _p, ctypes.c_int, _p],
    ),
    (base, "ggml_set_name", _p, [_p, ctypes.c_char_p]),
    (base, "ggml_get_name", ctypes.c_char_p, [_p]),
    (base, "ggml_op_desc", ctypes.c_char_p, [_p]),
    (base, "ggml_nbytes", ctypes.c_size_t, [_p]),
    (base, "ggml_get_data", _p, [_p]),
    (base, "ggml_cpy", _p, [_p, _p, _p]),
    (base, "ggml_new_graph", _p, [_p]),
    (base, "ggml_build_forward_expand", None, [_p, _p]),
    (base, "ggml_backend_alloc_ctx_tensors", _p, [_p, _p]),
    (base, "ggml_backend_buffer_clear", None, [_p, ctypes.c_uint8]),
    (base, "ggml_backend_buffer_free", None, [_p]),
    (base, "ggml_backend_tensor_set", None, [_p, _p, ctypes.c_size_t, ctypes.c_size_t]),
    (base, "ggml_backend_tensor_get", None, [_p, _p, ctypes.c_size_t, ctypes.c_size_t]),
    (base, "ggml_backend_graph_compute", ctypes.c_int, [_p, _p]),
    (base, "ggml_backend_supports_op", ctypes.c_bool, [_p, _p]),
    (base, "ggml_backend_free", None, [_p]),
    (base, "ggml_backend_dev_init", _p, [_p, ctypes.c_char_p]),
    (base, "ggml_backend_reg_dev_get", _p, [_p, ctypes.c_size_t]),
    (base, "ggml_backend_reg_dev_count", ctypes.c_size_t, [_p]),
    (base, "ggml_backend_reg_get_proc_address", _p, [_p, ctypes.c_char_p]),
    (registry, "ggml_backend_reg_by_name", _p, [ctypes.c_char_p]),
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


@functools.cache
def cpu_module() -> Path:
    """Return the file of the CPU backend that is registered: the one that DRAFTWOOD_CPU names."""
    registry.ggml_backend_reg_by_name(b"CPU")
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split()[-1] for line in lines if "libdraftwood-ggml-cpu" in line}
    wanted = os.environ.get("DRAFTWOOD_CPU", "native")
    assert wanted == "native" or path.endswith(f"-{wanted}.so"), (wanted, path)
    return Path(path)


class Descriptor(ctypes.Structure):
    """dw::op_descriptor of src/ops/door/custom-op.h: its address goes into a node's userdata."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("operands", ctypes.POINTER(ctypes.c_char_p)),
        ("n_operands", ctypes.c_int),
        ("n_optional", ctypes.c_int),
        ("cpu", _p),
        ("takes", _p),
        ("workspace", _p),
        ("launch", _p),
    ]

    def operand_names(self) -> list[str]:
        """Return the names of a node's sources, in order."""
        return [self.operands[i].decode() for i in range(self.n_operands)]


def symbol(backend: str, name: str) -> int | None:
    """Return the address that a backend has for a name; None: no such name, or no such backend."""
    found = registry.ggml_backend_reg_by_name(backend.encode())
    return base.ggml_backend_reg_get_proc_address(found, name.encode()) if found else None


def descriptor(name: str, backend: str = "CPU") -> Descriptor | None:
    """Return a backend's descriptor of one of our ops; None: it does not have the op."""
    found = symbol(backend, name)
    return Descriptor.from_address(found) if found else None


def custom(name: str, shape: tuple[int, ...] | None = None, kind: str = "F32") -> Callable[..., Any]:
    """Return op(context, *sources) that runs one of tree-ops.h, tree-attention.h, top-rows.h on all threads.

    Its result is of `kind` and `shape`; without a shape it works in place on the first source. The node
    may run on a CUDA device, too, where there is one that has the op.
    """
    reference = descriptor(name)
    assert reference, name

    def op(context: Any, *sources: Any) -> Any:
        lacking = reference.n_operands - len(sources)
        assert 0 <= lacking <= reference.n_optional, reference.operand_names()
        userdata = symbol("CUDA", name) or ctypes.addressof(reference)
        node = custom_node(context, reference.cpu, userdata, sources, shape, kind)
        return base.ggml_set_name(node, name.encode())

    return op


def custom_node(
    context: Any,
    function: int,
    userdata: int | None,
    sources: Any,
    shape: tuple[int, ...] | None,
    kind: str = "F32",
) -> Any:
    """Return a GGML_OP_CUSTOM node; shape as `custom` has it."""
    tail = (function, ALL_THREADS, userdata)
    if shape is not None:
        ne = (*reversed(shape), *[1] * (MAX_DIMS - len(shape)))
        taken = sources[:_MOST_TAKEN]
        node = base.ggml_custom_4d(context, TYPES[kind], *ne, (_p * len(taken))(*taken), len(taken), *tail)
        for i, source in enumerate(sources[_MOST_TAKEN:], _MOST_TAKEN):  # as new_node of src/ops/door/node.h
            ctypes.c_uint64.from_address(node + _SRC + 8 * i).value = source
        return node
    destination, *sources = sources
    array = (_p * len(sources))(*sources)
    return base.ggml_custom_inplace(context, destination, array, len(sources), *tail)


def view(context: Any, tensor: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return the beginning of a tensor in another shape; strides in bytes, of all axes but the last."""
    ne = (*reversed(shape), *[1] * (MAX_DIMS - len(shape)))
    nb = (*reversed(strides), *[strides[0]] * (MAX_DIMS - 1 - len(strides)))
    return base.ggml_view_4d(context, tensor, *ne, *nb, 0)


def _new_tensor(context: Any, stored: np.ndarray, kind: str) -> Any:
    shape = list(stored.shape)
    if kind in BLOCKS:
        values, n_bytes = BLOCKS[kind]
        shape[-1] = shape[-1] // n_bytes * values
    ne = (_i64 * len(shape))(*reversed(shape))
    return base.ggml_new_tensor(context, TYPES[kind], len(shape), ne)


def at_address(context: Any, shape: tuple[int, ...], kind: str, address: int) -> Any:
    """Return a tensor over memory that is there; shape as `encode` gives it."""
    tensor = _new_tensor(context, np.empty((0, *shape[1:]), np.uint8), kind)
    ctypes.c_int64.from_address(tensor + _NE + 8 * (len(shape) - 1)).value = shape[0]
    ctypes.c_uint64.from_address(tensor + _DATA).value = address
    return tensor


def open_backend(name: str, use_ref: bool = False, n_threads: int = 1) -> Any:
    """Return a backend: "CPU", or "CUDA" for the first device of that kind."""
    name = "CPU" if name == CUDA_ON_CPU else name
    found = registry.ggml_backend_reg_by_name(name.encode())
    assert found, f"draftwood was built without {name}"
    assert base.ggml_backend_reg_dev_count(found), f"no {name} device"
    backend = base.ggml_backend_dev_init(base.ggml_backend_reg_dev_get(found, 0), None)
    if name == "CPU":
        cpu_module()
        set_n_threads = ctypes.CFUNCTYPE(None, _p, ctypes.c_int)(symbol(name, "ggml_backend_set_n_threads"))
        set_n_threads(backend, n_threads)
        set_use_ref = ctypes.CFUNCTYPE(None, _p, ctypes.c_bool)(symbol(name, "ggml_backend_cpu_set_use_ref"))
        set_use_ref(backend, use_ref)
    return backend


class Graph:
    """op(context, *tensors) on a backend, to be computed again and again; a context manager.

    operands: (stored array, type) as `encode` gives them; BLOCKS as bytes u8. All that is no operand is
    poisoned first: bytes 0xFF, which are NaN. An op may return several nodes, then the last is the result.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        operands: list[tuple[np.ndarray, str]],
        *,
        backend: str = "CPU",
        use_ref: bool = False,
        n_threads: int = 1,
    ) -> None:
        self._context = base.ggml_init(_InitParams(4 << 20, None, True))
        self._on_cpu = backend == CUDA_ON_CPU
        self.backend = open_backend(backend, use_ref, n_threads)
        self.tensors = [_new_tensor(self._context, stored, kind) for stored, kind in operands]
        made = op(self._context, *self.tensors)
        self.nodes = made if isinstance(made, list) else [made]
        self.result = self.nodes[-1]
        self._graph = base.ggml_new_graph(self._context)
        for node in self.nodes:
            base.ggml_build_forward_expand(self._graph, node)
        self._buffer = base.ggml_backend_alloc_ctx_tensors(self._context, self.backend)
        assert self._buffer, "no memory"
        base.ggml_backend_buffer_clear(self._buffer, 0xFF)
        for i, (stored, _) in enumerate(operands):
            self.set(i, stored)

    def set(self, i: int, stored: np.ndarray) -> None:
        """Give operand i new contents of the same size."""
        data = np.ascontiguousarray(stored)
        assert base.ggml_nbytes(self.tensors[i]) == data.nbytes
        base.ggml_backend_tensor_set(self.tensors[i], data.ctypes.data, 0, data.nbytes)

    def compute(self) -> None:
        """Run it, and wait for it."""
        if self._on_cpu:
            for node in self.nodes:
                cuda_on_cpu.launch(node)
            return
        assert base.ggml_backend_graph_compute(self.backend, self._graph) == 0

    def bytes_of(self, tensor: Any) -> np.ndarray:
        """Return what a tensor holds, u8."""
        data = np.empty(base.ggml_nbytes(tensor), np.uint8)
        base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        return data

    def get(self, shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> np.ndarray:
        """Return what the result holds."""
        return self.bytes_of(self.result).view(dtype).reshape(shape)

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        base.ggml_backend_buffer_free(self._buffer)
        base.ggml_backend_free(self.backend)
        base.ggml_free(self._context)


def run(
    op: Callable[..., Any],
    operands: list[tuple[np.ndarray, str]],
    shape: tuple[int, ...],
    *,
    backend: str = "CPU",
    use_ref: bool = False,
    n_threads: int = 1,
    dtype: type[np.generic] = np.float32,
) -> np.ndarray:
    """Compute op(context, *tensors); return what it holds, as `shape` of `dtype`. See Graph.

    Operands must come out as they went in, but for the one that an op in place writes to.
    """
    with Graph(op, operands, backend=backend, use_ref=use_ref, n_threads=n_threads) as graph:
        graph.compute()
        out = graph.get(shape, dtype)
        where = base.ggml_get_data(graph.result)
        for tensor, (stored, _) in zip(graph.tensors, operands, strict=True):
            ours = base.ggml_get_data(tensor) == where
            assert ours or graph.bytes_of(tensor).tobytes() == stored.tobytes(), "an operand was changed"
    return out


def supports(op: Callable[..., Any], operands: list[tuple[np.ndarray, str]], backend: str) -> bool:
    """Return whether a backend takes the op's node."""
    with Graph(op, operands, backend=backend) as graph:
        if backend == CUDA_ON_CPU:
            return cuda_on_cpu.takes(graph.result)
        return bool(base.ggml_backend_supports_op(graph.backend, graph.result))
