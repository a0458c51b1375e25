"""The devices that ggml finds. Must not know: models, contexts. Test: tests/model/test_cli.py."""

from __future__ import annotations

import ctypes
from typing import Any

from draftwood import _capi
from draftwood._llama_cpp import llama_cpp as native

# enum ggml_backend_dev_type, ggml-backend.h at the pin
_DEVICE_TYPES = ("CPU", "GPU", "integrated GPU", "accelerator", "meta")


def devices() -> list[dict[str, Any]]:
    """Return the ggml devices: name, description, type, backend, free and total memory in bytes."""
    lib = _capi.lib  # libllama is linked to libggml, so its handle finds these symbols too
    lib.ggml_backend_dev_count.restype = ctypes.c_size_t
    for name in ("dev_get", "dev_backend_reg"):
        getattr(lib, f"ggml_backend_{name}").restype = ctypes.c_void_p
    for name in ("dev_name", "dev_description", "reg_name"):
        getattr(lib, f"ggml_backend_{name}").restype = ctypes.c_char_p
    native.llama_backend_init()
    count = lib.ggml_backend_dev_count()
    return [_device(lib, ctypes.c_void_p(lib.ggml_backend_dev_get(i))) for i in range(count)]


def _device(lib: Any, device: ctypes.c_void_p) -> dict[str, Any]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    registry = ctypes.c_void_p(lib.ggml_backend_dev_backend_reg(device))
    kind = lib.ggml_backend_dev_type(device)
    return {
        "name": lib.ggml_backend_dev_name(device).decode(),
        "description": lib.ggml_backend_dev_description(device).decode(),
        "type": _DEVICE_TYPES[kind] if kind < len(_DEVICE_TYPES) else str(kind),
        "backend": lib.ggml_backend_reg_name(registry).decode(),
        "memory_free": free.value,
        "memory_total": total.value,
    }
