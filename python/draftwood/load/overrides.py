"""kv_overrides= held to the bounds of the fields that they replace.

llama.cpp takes an override as it takes a field of the header, and some values end the process. The library
checks a copy of the header that has the overrides in it (src/drafters/gguf_fields.cpp).
Must not know: contexts, drafting. Test: tests/model/test_kv_overrides.py.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.engine import probe_model
from draftwood.errors import ModelFileError, OptionError, translated
from draftwood.load import header as header_file

_HINT = 'kv_overrides={"tokenizer.ggml.add_bos_token": False}, or leave it out'
_LONGEST = 127  # bytes of a name or a text: llama_model_kv_override has 128, of which one ends it
_KINDS = (bool, int, float, str)  # a bool is an int, too
# enum gguf_type, gguf.h at the pin: which types of fields an override of a Python type replaces
_REPLACES = {int: (0, 1, 2, 3, 4, 5, 10, 11), float: (6, 12), str: (8,)}
_ALIGNMENT = "general.alignment"  # GGUF's own: an override has no effect

_lib: Any = _capi.lib  # header_file has said what its functions return
_SETTERS: dict[type, Any] = {
    int: lambda header, key, value: _lib.gguf_set_val_u32(header, key, ctypes.c_uint32(value)),
    float: lambda header, key, value: _lib.gguf_set_val_f32(header, key, ctypes.c_float(value)),
    str: lambda header, key, value: _lib.gguf_set_val_str(header, key, value.encode()),
}


def check(path: str, given: Any) -> None:
    """Refuse overrides that the header of the model at `path` could not have. The header itself is sound.

    Errors: OptionError.
    """
    if not given:
        return
    _check_types(given)
    with translated(OSError, _unchecked), tempfile.NamedTemporaryFile(suffix=".gguf") as copy:
        _write_header(path, given, copy.name)
        with translated(ModelFileError, lambda error: _refused(error, copy.name)):
            probe_model(copy.name)


def _check_types(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise OptionError(
            f"kv_overrides is of type {type(given).__name__}; expected a dict of names and values", hint=_HINT
        )
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, _KINDS):
            raise OptionError(
                f"kv_overrides has {name!r}: {value!r}; expected a name and a bool, int, float or text",
                hint=_HINT,
            )
        for text in (name, value):
            if isinstance(text, str):
                _check_text(text)


def _check_text(text: str) -> None:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        n_bytes = 0
    if "\0" in text or (text and n_bytes == 0):
        raise OptionError(
            f"kv_overrides has the text {text[:40]!r}; expected characters that UTF-8 has, and no NUL",
            hint=_HINT,
        )
    if n_bytes > _LONGEST:
        raise OptionError(
            f"kv_overrides has a text of {n_bytes} bytes, {text[:40]!r}...; expected at most {_LONGEST}",
            hint=_HINT,
        )


def _write_header(path: str, given: Mapping[str, Any], copy: str) -> None:
    """Write the header of `path` with the overrides that llama.cpp would heed, and no tensors."""
    header = ctypes.c_void_p(_lib.gguf_init_empty())
    try:
        with header_file.opened(path) as source:
            _lib.gguf_set_kv(header, source)
        _lib.gguf_remove_key(header, b"split.count")  # the copy is one file
        for name, value in given.items():
            kind = next(kind for kind in _KINDS if isinstance(value, kind))
            if _heeded(header, name, kind):
                _SETTERS[kind](header, name.encode(), value)
        if not _lib.gguf_write_to_file(header, os.fsencode(copy), ctypes.c_bool(True)):
            raise OSError(f"{copy} could not be written")
    finally:
        _lib.gguf_free(header)


def _heeded(header: ctypes.c_void_p, name: str, kind: type) -> bool:
    """Tell whether an override replaces a field, or adds one, that the check looks at."""
    if kind not in _REPLACES or name in ("", _ALIGNMENT):
        return False
    field = _lib.gguf_find_key(header, name.encode())
    return field < 0 or _lib.gguf_get_kv_type(header, ctypes.c_int64(field)) in _REPLACES[kind]


def _unchecked(error: Exception) -> OptionError:
    return OptionError(
        f"kv_overrides could not be checked: {error}; expected a folder for a temporary file",
        hint="set TMPDIR to a folder that can be written",
    )


def _refused(error: Exception, copy: str) -> OptionError:
    found = getattr(error, "message", str(error)).removeprefix(f"{copy}: ")
    return OptionError(f"kv_overrides: {found}", hint="correct the override, or leave it out")
