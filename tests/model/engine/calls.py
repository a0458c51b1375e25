"""The C API as the engine's tests call it where no wrapper may stand between, and the text of its errors.

Must not know: what any test expects.
"""

from __future__ import annotations

import ctypes
from typing import Any

from draftwood.engine import _capi

from tests.model.rig import Rig

lib = _capi.lib
MTP, NONE = _capi.DRAFTER_MTP, _capi.DRAFTER_NONE
HYBRIDS = ["moe-mtp", "dense-mtp"]


def last_error() -> str:
    return lib.dw_last_error().decode()


def error_of(status: int, expected: int) -> str:
    """Check a status; return the error's text."""
    assert status == expected, f"status {status}, expected {expected}; last error: {last_error()}"
    return last_error()


def params(**changes: Any) -> _capi.Params:
    """Return the default parameters with these fields changed."""
    p = _capi.Params()
    lib.dw_params_init(ctypes.byref(p))
    for name, value in changes.items():
        setattr(p, name, value)
    return p


def new(r: Rig, p: _capi.Params) -> tuple[int, _capi.EngineHandle]:
    """Ask for an engine on the rig's context; return status and handle, which no failure leaves set."""
    handle = _capi.EngineHandle(1)
    status = lib.dw_engine_new(r.ctx, ctypes.byref(r.params), ctypes.byref(p), ctypes.byref(handle))
    if status not in (_capi.OK, _capi.ERR_ARGUMENT):
        assert not handle
    return status, handle
