"""A status of the C API as an exception. Contract: dw_status in src/include/draftwood.h."""

from __future__ import annotations

from draftwood.engine import _capi
from draftwood.errors import (
    ContextFullError,
    DecodeError,
    DrafterMemoryError,
    DraftwoodError,
    ModelFileError,
    NativeError,
    OptionError,
    UnsupportedError,
)

_ERRORS: dict[int, type[DraftwoodError]] = {
    _capi.ERR_ARGUMENT: OptionError,
    _capi.ERR_UNSUPPORTED: UnsupportedError,
    _capi.ERR_CONTEXT: ContextFullError,
    _capi.ERR_DECODE: DecodeError,
    _capi.ERR_FILE: ModelFileError,
    _capi.ERR_MEMORY: DrafterMemoryError,
}

_FAULT = "a fault of draftwood itself: please report it, with what `draftwood doctor MODEL` prints"
_HINTS: dict[int, str] = {
    _capi.ERR_ARGUMENT: "help(draftwood.Llama) and docs/options.md say what is allowed",
    _capi.ERR_UNSUPPORTED: '`draftwood doctor MODEL` says what can run; speculation="off" decodes plainly',
    _capi.ERR_DECODE: "generate again; where memory is short, a smaller n_ubatch or n_ctx takes less",
    _capi.ERR_CONTEXT: "pass a larger n_ctx to Llama(), or stop at max_tokens",
    _capi.ERR_FILE: "check the path, or download the file again",
    _capi.ERR_MEMORY: 'a smaller n_ctx, a quantised drafter, or speculation="off"',
}


def check(status: int, hint: str | None = None) -> None:
    """Raise what a dw_status other than DW_OK stands for, with the library's own text, and a hint.

    hint: what helps in this call; None for what helps with the status.
    """
    if status != _capi.OK:
        text = (_capi.lib.dw_last_error() or b"").decode("utf-8", "replace")
        raise _ERRORS.get(status, NativeError)(text, hint=hint or _HINTS.get(status, _FAULT))
