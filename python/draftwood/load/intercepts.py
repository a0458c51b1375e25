"""What upstream's `Llama.__init__` is given on its way, where it has no argument for it.

It assigns the library's default structs to `model_params` and `context_params`, and then sets their fields.
The setters here set the fields that upstream leaves alone. It assigns `_lora_adapter` without a check.
Must not know: engines, requests. Tests: tests/model/test_bad_input.py, test_flash_attn.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

from draftwood.load import files, rpc
from draftwood.options import Options, Plan


class Intercepts:
    """A base of `Llama` before upstream's."""

    lora_path: str
    _plan: Plan
    _options: Options
    _auto_flash: bool
    _servers: rpc.Servers | None
    _tensor_overrides: Any

    @property
    def model_params(self) -> Any:
        """The `llama_model_params` the model was loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.load_mtp = self._plan.drafter == "mtp"
        if self._tensor_overrides is not None:
            params.tensor_buft_overrides = ctypes.addressof(self._tensor_overrides)
        if self._servers is not None:
            params.devices = self._servers.as_param
        if self._options.exact:
            params.use_extra_bufts = False  # repacked weights have kernels that depend on the batch
        self._model_params = params

    @property
    def context_params(self) -> Any:
        """The `llama_context_params` the context was made with."""
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.n_rs_seq = self._plan.n_rs_seq
        # Marks, not fields: upstream sets flash_attn_type and sizes later, then load/contexts.py reads them.
        params.auto_flash = self._auto_flash
        params.queue_steps = self._plan.queue_steps
        self._context_params = params

    @property
    def _lora_adapter(self) -> Any:
        return self._adapter

    @_lora_adapter.setter
    def _lora_adapter(self, adapter: Any) -> None:
        if adapter is not None and not adapter:  # a null pointer; upstream looks for None
            raise files.no_lora(self.lora_path)
        self._adapter = adapter
