"""The header of a sound GGUF, read by the library (gguf.h at the pin): for what `probe_model` does not tell.

Must not know: what a field or a tensor means.
Tests: tests/unit/test_fused.py, tests/model/test_kv_overrides.py, tests/model/test_fused_layers.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftwood.engine import _capi
from draftwood.errors import ModelFileError

_SUFFIX = ".weight"
_UINT16 = 2  # GGUF_TYPE_UINT16


class _InitParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


_lib: Any = _capi.lib  # as in devices.py
for _name in ("init_from_file", "init_empty"):
    getattr(_lib, f"gguf_{_name}").restype = ctypes.c_void_p
for _name in ("find_key", "get_n_tensors"):
    getattr(_lib, f"gguf_{_name}").restype = ctypes.c_int64
_lib.gguf_write_to_file.restype = ctypes.c_bool
_lib.gguf_get_val_u16.restype = ctypes.c_uint16
_lib.gguf_get_tensor_name.restype = ctypes.c_char_p
_lib.gguf_get_tensor_ne.restype = ctypes.POINTER(ctypes.c_int64)
_lib.ggml_type_name.restype = ctypes.c_char_p


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the header has it."""

    type: str
    """"Q4_K"."""
    shape: tuple[int, int, int, int]
    """As ggml's ne: the length of a row comes first."""


@contextlib.contextmanager
def opened(path: str) -> Iterator[ctypes.c_void_p]:
    """Read the header of the file at `path`, which `probe_model` took. Errors: ModelFileError."""
    header = ctypes.c_void_p(_lib.gguf_init_from_file(os.fsencode(path), _InitParams(True, None)))
    if not header.value:
        raise ModelFileError(
            f"{path} cannot be read; expected the GGUF that it was before", hint="is it being written anew?"
        )
    try:
        yield header
    finally:
        _lib.gguf_free(header)


def files(path: str) -> list[str]:
    """Return the paths of all files of the model whose first file, which `probe_model` took, is at `path`."""
    with opened(path) as header:
        key = ctypes.c_int64(_lib.gguf_find_key(header, b"split.count"))
        is_number = key.value >= 0 and _lib.gguf_get_kv_type(header, key) == _UINT16
        n = _lib.gguf_get_val_u16(header, key) if is_number else 1
    if n <= 1:
        return [path]
    name = os.fsencode(path)
    made = ctypes.create_string_buffer(len(name) + 1)
    _lib.llama_split_prefix(made, ctypes.c_size_t(len(made)), name, 0, n)
    prefix, found = made.value, [path]
    for i in range(1, n):
        _lib.llama_split_path(made, ctypes.c_size_t(len(made)), prefix, i, n)
        found.append(os.fsdecode(made.value))
    return found


def tensors(path: str) -> dict[str, Tensor]:
    """Return the tensors of all files, ".weight" left out of their names."""
    found: dict[str, Tensor] = {}
    for each in files(path):
        with opened(each) as header:
            found.update(_tensor(header, i) for i in range(_lib.gguf_get_n_tensors(header)))
    return found


def _tensor(header: ctypes.c_void_p, i: int) -> tuple[str, Tensor]:
    at = ctypes.c_int64(i)
    name = _lib.gguf_get_tensor_name(header, at).decode("utf-8", "replace").removesuffix(_SUFFIX)
    kind = _lib.ggml_type_name(_lib.gguf_get_tensor_type(header, at)).decode().upper()
    a, b, c, d = _lib.gguf_get_tensor_ne(header, at)[:4]
    return name, Tensor(kind, (a, b, c, d))
