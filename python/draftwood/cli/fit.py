"""Whether a DFlash drafter fits a model, told from the headers of both files: neither is loaded.

Refuses what src/spec/probe.cpp and dflash.cpp refuse, in their words. Tensors of other shapes than the header
says are seen at loading only. Must not know: contexts, weights. Test: tests/model/test_cli_fit.py.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from draftwood import _capi
from draftwood.engine import probe_model
from draftwood.errors import ModelFileError, UnsupportedError

_lib: Any = _capi.lib  # libllama is linked to libggml, so its handle finds gguf's functions too

_UINT32, _INT32, _STRING, _ARRAY = 4, 5, 8, 9  # enum gguf_type, gguf.h at the pin
_MOST_BLOCK = 4096
_TOKENS, _MASK = "tokenizer.ggml.tokens", "tokenizer.ggml.mask_token_id"
_KIN_KEYS = (
    "hyper_connection.count", "selector_rank", "selector_top_k", "conv_kernel_size", "sample_from_anchor",
)  # fmt: skip
_KIN_TENSORS = ("markov_w1.weight", "selector_hidden.weight", "d2t")


class _Init(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _declare() -> None:
    """Say what gguf's functions take and give; each takes a header first, and most a key's number."""
    number, index, text = ctypes.c_uint32, ctypes.c_int64, ctypes.c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "free": (None, []),
        "find_key": (index, [text]), "find_tensor": (index, [text]),
        "get_kv_type": (ctypes.c_int, [index]), "get_arr_type": (ctypes.c_int, [index]),
        "get_val_u32": (number, [index]), "get_val_str": (text, [index]),
        "get_arr_n": (ctypes.c_size_t, [index]), "get_arr_data": (ctypes.c_void_p, [index]),
        "get_arr_str": (text, [index, ctypes.c_size_t]),
    }  # fmt: skip
    for name, (gives, takes) in signatures.items():
        function = getattr(_lib, f"gguf_{name}")
        function.restype, function.argtypes = gives, [ctypes.c_void_p, *takes]
    _lib.gguf_init_from_file.restype, _lib.gguf_init_from_file.argtypes = ctypes.c_void_p, [text, _Init]


_declare()


class _Header:
    """Metadata of an open GGUF; what is absent or of another type is 0, "" or empty."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def has(self, name: str, *, tensor: bool = False) -> bool:
        find = _lib.gguf_find_tensor if tensor else _lib.gguf_find_key
        return bool(find(self._handle, name.encode()) >= 0)

    def number(self, name: str) -> int:
        key = self._key(name, _UINT32)
        return 0 if key is None else int(_lib.gguf_get_val_u32(self._handle, key))

    def text(self, name: str) -> str:
        key = self._key(name, _STRING)
        return "" if key is None else _lib.gguf_get_val_str(self._handle, key).decode("utf-8", "replace")

    def numbers(self, name: str) -> list[int]:
        key = self._key(name, _ARRAY)
        if key is None or _lib.gguf_get_arr_type(self._handle, key) not in (_UINT32, _INT32):
            return []
        n = _lib.gguf_get_arr_n(self._handle, key)
        data = _lib.gguf_get_arr_data(self._handle, key) if n else None
        return list((ctypes.c_int32 * n).from_address(data)) if data else []

    def texts(self, name: str) -> list[bytes]:
        key = self._key(name, _ARRAY)
        if key is None or _lib.gguf_get_arr_type(self._handle, key) != _STRING:
            return []
        n = _lib.gguf_get_arr_n(self._handle, key)
        return [_lib.gguf_get_arr_str(self._handle, key, i) for i in range(n)]

    def _key(self, name: str, kind: int) -> int | None:
        key = int(_lib.gguf_find_key(self._handle, name.encode()))
        return key if key >= 0 and _lib.gguf_get_kv_type(self._handle, key) == kind else None


@contextmanager
def _opened(path: str) -> Iterator[_Header]:
    probe_model(path)  # refuses in words what gguf's reader does not read
    handle = _lib.gguf_init_from_file(os.fsencode(path), _Init(no_alloc=True))
    if not handle:
        raise ModelFileError(f"{path} cannot be read", hint="check the path")
    try:
        yield _Header(handle)
    finally:
        _lib.gguf_free(handle)


def check_fit(drafter: str, model: str) -> None:
    """Refuse a drafter that cannot draft for a model, both paths of GGUFs.

    Errors: ModelFileError for a file that is missing, cut off or no GGUF; UnsupportedError for a misfit.
    """
    with _opened(drafter) as ours, _opened(model) as theirs:
        why = next(chain(_kind(ours, drafter), _vocabulary(ours, theirs), _shape(ours, theirs)), None)
    if why:
        raise UnsupportedError(why, hint="name the drafter that was made for this model, or none")


def _kind(ours: _Header, path: str) -> Iterator[str]:
    architecture = ours.text("general.architecture")
    if architecture != "dflash":
        yield f"the drafter {path} has architecture '{architecture}'; expected 'dflash'"
    for key in _KIN_KEYS:
        if ours.has(f"dflash.{key}"):
            yield f"the drafter {path} has dflash.{key}, as DFlash2 and DSpark do; expected a plain DFlash"
    for name in _KIN_TENSORS:
        if ours.has(name, tensor=True):
            yield (
                f"the drafter {path} has a tensor {name}; expected a plain DFlash over the whole vocabulary"
            )
    size, other = (ours.number(f"dflash.attention.{kind}_length") for kind in ("key", "value"))
    if size != other:
        yield (
            f"the drafter {path} has keys of {size} and values of {other} (0: not given); expected one size"
        )
    n_rot = ours.number("dflash.rope.dimension_count")
    if n_rot % 2 or 0 < size < n_rot:
        yield (
            f"the drafter {path} rotates {n_rot} values of a head of {size}; expected an even number of them"
        )


def _vocabulary(ours: _Header, theirs: _Header) -> Iterator[str]:
    mine, targets = ours.texts(_TOKENS), theirs.texts(_TOKENS)
    if len(mine) != len(targets):
        yield f"the drafter has a vocabulary of {len(mine)} tokens, the target one of {len(targets)}"
    for i, (a, b) in enumerate(zip(mine, targets, strict=False)):
        if a != b:
            own, its = (text.decode("utf-8", "replace") for text in (a, b))
            yield f"token {i} is '{own}' to the drafter and '{its}' to the target; expected one vocabulary"
            return


def _shape(ours: _Header, theirs: _Header) -> Iterator[str]:
    target = theirs.text("general.architecture")
    n_layers = theirs.number(f"{target}.block_count") - theirs.number(f"{target}.nextn_predict_layers")
    layers = ours.numbers("dflash.target_layers")
    for layer in layers:
        if not 0 <= layer < n_layers:
            yield f"the drafter reads layer {layer} of its target; this one has {n_layers} layers"
    width = theirs.number(f"{target}.embedding_length")
    n_read = len(layers) * ours.number("dflash.embedding_length")
    if not layers or n_read != len(layers) * width:
        yield (
            f"the drafter reads {n_read} features a token; expected {len(layers)} layers of the target's "
            f"width {width}"
        )
    if not ours.has(_MASK) or ours.number(_MASK) >= len(theirs.texts(_TOKENS)):
        yield "the drafter's file names no mask token (tokenizer.ggml.mask_token_id)"
    block = ours.number("dflash.block_size")
    if ours.has("dflash.block_size") and not 2 <= block <= _MOST_BLOCK:
        yield f"the drafter's dflash.block_size is {block}; expected 2 to {_MOST_BLOCK}"
