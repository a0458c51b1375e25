"""An expert pool of the C API: experts in host memory, a part of them in slots of a device.

Must not know: models, arguments of `Llama`. Contract: src/include/draftwood-experts.h,
"Experts beyond a card's memory". Test: tests/model/test_expert_pool.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.status import check
from draftwood.stats import ExpertLayer, ExpertStats

_lib = _capi.lib
_POLICIES = {"frequency": _capi.EXPERTS_FREQUENCY, "lru": _capi.EXPERTS_LRU}
_HINT = "docs/experts.md says what a pool needs"


class ExpertPool:
    """Make it before the model that is loaded into it, and close it after that model."""

    def __init__(
        self,
        n_slots: int,
        *,
        device: str = "CPU",
        policy: str = "frequency",
        stage: bool = False,
        guess: bool = False,
    ) -> None:
        """n_slots: of each layer; device: ggml's name; policy: "frequency" or "lru".

        stage: copy the experts of prompts ahead, which takes two layers' experts on the device.
        guess: fetch a layer's experts while the layer before it computes, by what its input says of them.

        Errors: UnsupportedError for a device that cannot read host memory through its own addresses.
        """
        self.n_slots = n_slots
        raw = _capi.ExpertParams()
        _lib.dw_expert_params_init(ctypes.byref(raw))
        raw.n_slots, raw.policy, raw.device = n_slots, _POLICIES[policy], device.encode()
        raw.stage, raw.guess = int(stage), int(guess)
        self._handle: Any = _capi.PoolHandle()
        check(_lib.dw_expert_pool_new(ctypes.byref(raw), ctypes.byref(self._handle)), _HINT)

    @property
    def buffer_type(self) -> int:
        """The buffer type for `tensor_buft_overrides`."""
        return int(_lib.dw_expert_pool_buffer_type(self._handle))

    def set_heat(self, heat: Mapping[int, Sequence[int]]) -> None:
        """Say how experts were used before, u32[n_experts] by layer: the most used fill the slots first."""
        for layer, values in heat.items():
            array = (ctypes.c_uint32 * len(values))(*values)
            check(_lib.dw_expert_set_heat(self._handle, layer, array, len(values)), _HINT)

    def stats(self) -> ExpertStats:
        """Return the counters of all layers together."""
        raw = _capi.ExpertStats()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_expert_get_stats(self._handle, ctypes.byref(raw)), _HINT)
        return ExpertStats.from_native(raw)

    def refused(self) -> tuple[int, bool] | None:
        """Return bytes that a load found no memory for, and whether on the host; None: none were refused."""
        n_bytes, on_host = ctypes.c_int64(), ctypes.c_bool()
        check(_lib.dw_expert_refused(self._handle, ctypes.byref(n_bytes), ctypes.byref(on_host)), _HINT)
        return (n_bytes.value, on_host.value) if n_bytes.value else None

    def layer(self, number: int) -> ExpertLayer:
        """Return what is known of a layer. Errors: OptionError for one without experts in the pool."""
        raw = _capi.ExpertLayer()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_expert_get_layer(self._handle, number, ctypes.byref(raw)), _HINT)
        return ExpertLayer.from_native(raw)

    def close(self) -> None:
        """Free the pool. The model in it must be freed before."""
        if self._handle:
            _lib.dw_expert_pool_free(self._handle)
            self._handle = _capi.PoolHandle()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()
