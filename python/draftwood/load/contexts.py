"""Contexts that cannot be made are refused with a clear error.

fixes.py puts this around upstream's LlamaContext: the model is loaded there and every parameter is final.
If an allocation fails, llama.cpp makes no context and says why. Two sizes end the process instead and are
refused before: a cache in host memory that the system grants and cannot back, and the plan of a large batch.
Must not know: `Llama`, engines. Test: tests/model/test_contexts.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.engine import _capi
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import log, memory
from draftwood.load.devices import cards, devices
from draftwood.options import HYBRID_ARCHITECTURES

_ROW_BYTES = 800_000  # of each row in the plan of a hybrid model's graph (ggml_backend_sched_new)
_OTHER_CACHES = ("sliding_window", "lora_rank", "compress", "shared_kv")  # in names of a model's metadata
_lib: Any = _capi.lib
_lib.ggml_row_size.restype = ctypes.c_size_t
_lib.ggml_blck_size.restype = ctypes.c_int64


def readable_context_errors(init: Any) -> Any:
    """Return LlamaContext.__init__ with errors that say why, flash attention by llama.cpp, room for steps.

    Errors: OptionError, UnsupportedError.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *, model: Any, params: Any, verbose: bool = True) -> None:
        self._exit_stack = contextlib.ExitStack()  # upstream's __del__ needs it if construction fails early
        if getattr(params, "auto_flash", False):  # of `Llama`; upstream's argument knows on and off only
            params.flash_attn_type = _native.LLAMA_FLASH_ATTN_TYPE_AUTO
        if getattr(params, "queue_steps", False):
            _make_room_for_steps(params)
        require_blocks(model, params)
        require_room(model, params)
        log.forget()
        try:
            init(self, model=model, params=params, verbose=verbose)
        except ValueError as error:
            raise UnsupportedError(
                f"llama.cpp made no context of n_ctx={params.n_ctx}, n_batch={params.n_batch}, "
                f"type_k={params.type_k}, type_v={params.type_v}; expected one: {log.cause() or error}",
                hint="where memory is short, a smaller n_ctx; verbose=True shows all that llama.cpp says",
            ) from error

    return wrapped


def _make_room_for_steps(params: Any) -> None:
    """Add a sequence, whose state a queued step needs. Both share n_ctx cells; the second has no tokens.

    llama.cpp ends the process where a context has more sequences than rows of a batch.
    """
    if min(n for n in (params.n_ctx, params.n_batch, params.n_ubatch) if n > 0) > 1:
        params.n_seq_max, params.kv_unified = max(2, params.n_seq_max), True


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model keeps for each token."""

    layers: int
    kv_heads: int
    key: int
    """Values of a head's key."""
    value: int

    def cell_bytes(self, type_k: int, type_v: int) -> int:
        """Return what a token takes in the cache, in bytes."""
        rows = ((type_k, self.kv_heads * self.key), (type_v, self.kv_heads * self.value))
        return self.layers * sum(int(_lib.ggml_row_size(type_, ctypes.c_int64(n))) for type_, n in rows)


def attention_of(model: Any) -> Attention | None:
    """Return what an upstream LlamaModel keeps for each token; None where this module does not know."""
    metadata = model.metadata()
    prefix = metadata.get("general.architecture", "") + "."
    numbers = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if any(part in name for name in numbers for part in _OTHER_CACHES):
        return None
    hybrid = _native.llama_model_is_hybrid(model.model)
    try:  # no number where layers differ
        heads = int(numbers["attention.head_count"])
        size = int(numbers["embedding_length"]) // heads
        return Attention(
            _native.llama_model_n_layer(model.model)
            // (int(numbers["full_attention_interval"]) if hybrid else 1),
            int(numbers["attention.head_count_kv"]),
            int(numbers.get("attention.key_length", size)),
            int(numbers.get("attention.value_length", size)),
        )
    except (KeyError, ValueError, ZeroDivisionError):
        return None


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory and swap that are left for this process, at most, and all of them."""
    if (known := memory.with_swap()) is not None:
        return known
    cpu = next(each for each in devices() if each["type"] == "CPU")
    return int(cpu["memory_free"]), int(cpu["memory_total"])


def require_room(model: Any, params: Any) -> None:
    """Refuse a context for which there is no host memory. Errors: OptionError."""
    if model.params.vocab_only:
        return
    left, whole = host_memory()
    attention = attention_of(model) if _on_host(model.params, params) else None
    if attention is not None:  # its pages are touched: the system would end the process
        hint = "a smaller n_ctx, or a cache of smaller numbers: flash_attn=True, type_k=8, type_v=8 (q8_0)"
        _require("n_ctx", params.n_ctx, attention.cell_bytes(params.type_k, params.type_v), left, hint)
    if model.metadata().get("general.architecture") in HYBRID_ARCHITECTURES:
        # ggml aborts if it does not get the plan in one piece; its pages are not touched
        name = "n_ubatch" if params.n_ubatch else "n_batch"  # 0 means n_batch
        rows = min(params.n_batch, getattr(params, name))
        _require(name, rows, _ROW_BYTES, whole, "n_ubatch=512, or leave it out")


def _require(name: str, value: int, each: int, room: int, hint: str) -> None:
    if value * each > room:
        raise OptionError(
            f"{name} is {value}, for which llama.cpp sets aside {value * each / 2**30:.1f} GiB or more; this "
            f"machine has {room / 2**30:.1f} GiB: expected at most {room // each // 256 * 256}",
            hint=hint,
        )


def require_blocks(model: Any, params: Any) -> None:
    """Refuse a quantised cache whose blocks are no parts of a model's heads. Errors: OptionError."""
    attention = attention_of(model)
    if attention is None:
        return
    flash = params.flash_attn_type != _native.LLAMA_FLASH_ATTN_TYPE_DISABLED
    heads = 1 if flash else attention.kv_heads  # keys of a token are one row then
    rows = (("type_k", params.type_k, heads * attention.key), ("type_v", params.type_v, attention.value))
    for name, type_, size in rows:
        block = int(_lib.ggml_blck_size(type_))
        if size % block != 0:
            raise OptionError(
                f"{name} is {type_}, a type of blocks of {block} values, and this model has rows of {size}; "
                "expected whole blocks",
                hint=f"{name}=8 (q8_0, blocks of 32), or leave it out for f16",
            )


def _on_host(model_params: Any, params: Any) -> bool:
    """Tell whether the whole cache is in host memory."""
    has_cards = bool(model_params.devices) or bool(cards())
    return not (has_cards and model_params.n_gpu_layers != 0 and params.offload_kqv)
