"""Experts of a mapped file that are read ahead, through the C API.

Must not know: arguments of `Llama`. Contract: src/include/draftwood-experts.h, "Experts beyond memory".
Test: tests/model/test_expert_readahead.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.status import check
from draftwood.stats import ReadaheadStats

_lib = _capi.lib


class ExpertReadahead:
    """Make it after the model, and close it before that model, when its contexts decode no more."""

    def __init__(self, model: int) -> None:
        """model: a llama_model pointer. One without experts in a mapped file has 0 layers in `stats`."""
        self._handle: Any = _capi.ReadaheadHandle()
        check(_lib.dw_expert_readahead_new(model, ctypes.byref(self._handle)))

    def stats(self) -> ReadaheadStats:
        """Return the counters of all layers together."""
        raw = _capi.ReadaheadStats()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_expert_readahead_get_stats(self._handle, ctypes.byref(raw)))
        return ReadaheadStats.from_native(raw)

    def close(self) -> None:
        """Free it. Closing twice is allowed."""
        if self._handle:
            _lib.dw_expert_readahead_free(self._handle)
            self._handle = _capi.ReadaheadHandle()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()
