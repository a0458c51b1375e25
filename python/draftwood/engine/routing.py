"""Which experts a model chooses: they are read while a context of their own decodes a text.

The choice is what llama.cpp sorts after each router (`ffn_moe_argsort`). A context that is watched
runs its graphs in pieces, so nothing is timed here. Must not know: text, pools.
Test: tests/model/test_synth_routing.py, by way of tools/routing.py; tests/model/test_expert_plan.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from draftwood._llama_cpp import llama_cpp as native
from draftwood.errors import DecodeError, NativeError, UnsupportedError

_BATCH = 512


class RoutingRecorder:
    """Read the experts that a model, `llama_model *`, chooses; it must outlive this."""

    def __init__(self, model: Any, *, n_experts: int, n_experts_used: int, n_threads: int) -> None:
        self._model, self._n_threads = model, n_threads
        self._n_experts, self._top_k = n_experts, n_experts_used
        self._ggml = _ggml()
        self._seen: dict[int, list[np.ndarray]] = {}
        self._callback = native.ggml_backend_sched_eval_callback(self._read)

    def choices(self, tokens: Sequence[int]) -> np.ndarray:
        """Return i32[n_layers, n_tokens, n_experts_used], the best first; layers are those with a router.

        Errors: NativeError without memory for a context; DecodeError; UnsupportedError where none is seen.
        """
        self._seen = {}
        with self._context(len(tokens)) as context:
            for start in range(0, len(tokens), _BATCH):
                part = tokens[start : start + _BATCH]
                array = (native.llama_token * len(part))(*part)
                status = native.llama_decode(context, native.llama_batch_get_one(array, len(part)))
                if status != 0:
                    raise DecodeError(
                        f"llama_decode returned {status} for tokens {start}..",
                        hint="llama.cpp's log, which verbose=False hides, says more",
                    )
        layers = [np.concatenate(self._seen[layer]) for layer in sorted(self._seen)]
        found = {len(layer) for layer in layers}
        if found != {len(tokens)}:
            raise UnsupportedError(
                f"the choices of {sorted(found)} tokens were seen; expected those of {len(tokens)}",
                hint="routers of this architecture are not read",
            )
        return np.stack(layers)

    @contextmanager
    def _context(self, n_tokens: int) -> Iterator[Any]:
        params = native.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_tokens + _BATCH, _BATCH, _BATCH
        params.n_threads = params.n_threads_batch = self._n_threads
        params.cb_eval = self._callback
        context = native.llama_init_from_model(self._model, params)
        if not context:
            raise NativeError(
                "no second context could be made", hint="close what else holds memory, or record fewer tokens"
            )
        try:
            yield context
        finally:
            native.llama_free(context)

    def _read(self, tensor: int, ask: bool, _user: Any) -> bool:
        name, _, layer = self._ggml.ggml_get_name(tensor).decode().rpartition("-")
        if name != "ffn_moe_argsort":
            return not ask  # when asked: leave it out; else go on
        if not ask:
            n_bytes = self._ggml.ggml_nbytes(tensor)
            order = np.empty((n_bytes // 4 // self._n_experts, self._n_experts), np.int32)
            self._ggml.ggml_backend_tensor_get(tensor, order.ctypes.data_as(ctypes.c_void_p), 0, n_bytes)
            self._seen.setdefault(int(layer), []).append(order[:, : self._top_k].copy())
        return True


def _ggml() -> Any:
    """Return ggml's functions, which the library that was loaded brings along, with their signatures."""
    lib = native._lib
    lib.ggml_get_name.restype, lib.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    lib.ggml_nbytes.restype, lib.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    lib.ggml_backend_tensor_get.restype = None
    lib.ggml_backend_tensor_get.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
    ]
    return lib
