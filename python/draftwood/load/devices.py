"""The devices that ggml finds. Must not know: models, contexts. Test: tests/model/test_cli.py."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.load.cores import usable_cores

# enum ggml_backend_dev_type, ggml-backend.h at the pin
_DEVICE_TYPES = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")

_lib: Any = _capi.lib  # libllama is linked to libggml, so its handle finds these symbols too
_lib.ggml_backend_dev_count.restype = ctypes.c_size_t
_lib.ggml_backend_reg_count.restype = ctypes.c_size_t
for _name in ("dev_get", "dev_backend_reg", "reg_get", "reg_get_proc_address", "dev_buffer_type",
              "cpu_buffer_type"):  # fmt: skip
    getattr(_lib, f"ggml_backend_{_name}").restype = ctypes.c_void_p
for _name in ("dev_name", "dev_description", "reg_name", "buft_name"):
    getattr(_lib, f"ggml_backend_{_name}").restype = ctypes.c_char_p


def devices() -> list[dict[str, Any]]:
    """Return this machine's ggml devices, each as `describe` has it."""
    return [describe(device) for device in _handles()]


def machine() -> list[Any]:
    """Return what tells this machine from others: JSON values."""
    return [platform.node(), platform.machine(), usable_cores(), [each["description"] for each in devices()]]


def cards() -> list[int]:
    """Return the devices that layers go to with n_gpu_layers: GPUs, or else integrated ones.

    As llama.cpp chooses, but for a card that two backends show: there it leaves the second out.
    """
    found = {kind: [d for d in _handles() if _type(d) == kind] for kind in ("GPU", "integrated GPU")}
    return found["GPU"] or found["integrated GPU"]


def buffer_types() -> dict[str, int]:
    """Return the buffer types of this machine's devices by name, such as "CPU" and "CUDA0"."""
    types = {"CPU": int(_lib.ggml_backend_cpu_buffer_type())}
    for device in _handles():
        type_ = _lib.ggml_backend_dev_buffer_type(ctypes.c_void_p(device))
        if type_:
            types[_lib.ggml_backend_buft_name(ctypes.c_void_p(type_)).decode()] = int(type_)
    return types


def gpu_backends() -> list[str]:
    """Return the backends for cards that this build has, whether or not they find one."""
    native.llama_backend_init()
    handles = (_lib.ggml_backend_reg_get(ctypes.c_size_t(i)) for i in range(_lib.ggml_backend_reg_count()))
    names = [_lib.ggml_backend_reg_name(ctypes.c_void_p(handle)).decode() for handle in handles]
    return [name for name in names if name not in ("CPU", "BLAS", "RPC")]


def without_tree_ops() -> list[int]:
    """Return those of `cards` on which no draft trees are verified (src/ops): all but CUDA's."""
    return [card for card in cards() if not finds(card, b"dw_tree_delta_net")]


def others() -> int:
    """Return how many devices take part in every model: the CPU and accelerators such as BLAS."""
    return sum(_type(device) in ("CPU", "accelerator") for device in _handles())


def describe(device: int) -> dict[str, Any]:
    """Return a device's name, description, type, backend, free and total memory in bytes."""
    pointer = ctypes.c_void_p(device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _lib.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    registry = ctypes.c_void_p(_lib.ggml_backend_dev_backend_reg(pointer))
    return {
        "name": _lib.ggml_backend_dev_name(pointer).decode(),
        "description": _lib.ggml_backend_dev_description(pointer).decode(),
        "type": _type(device),
        "backend": _lib.ggml_backend_reg_name(registry).decode(),
        "memory_free": free.value,
        "memory_total": total.value,
    }


def finds(device: int, op: bytes) -> bool:
    """Return whether the device's backend has a function of this name."""
    registry = ctypes.c_void_p(_lib.ggml_backend_dev_backend_reg(ctypes.c_void_p(device)))
    return bool(_lib.ggml_backend_reg_get_proc_address(registry, op))


def _handles() -> list[int]:
    native.llama_backend_init()
    return [_lib.ggml_backend_dev_get(ctypes.c_size_t(i)) for i in range(_lib.ggml_backend_dev_count())]


def _type(device: int) -> str:
    kind = _lib.ggml_backend_dev_type(ctypes.c_void_p(device))
    return _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind)
