"""Contexts that cannot be made: refused in words, before llama.cpp takes the memory or ends the process.

Put around upstream's LlamaContext by fixes.py: there the model is loaded and every parameter is final. What a
cache takes is reckoned from the model's metadata, and never too high: caches of kinds that are not known here
count nothing. Memory of cards is theirs to refuse, which they do without harm.
Must not know: `Llama`, engines. Test: tests/model/test_contexts.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.engine import _capi
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import log
from draftwood.load.devices import cards, devices
from draftwood.options import HYBRID_ARCHITECTURES

_CELL = 52  # bytes of a cell in llama_kv_cells at the pin: positions, and a bit for each of 256 sequences
_NODES = 40  # of a hybrid model's graph for each row, in llama_context::graph_max_nodes at the pin
_COPIES = 60  # tensors for each node, in ggml_backend_sched_new
_OBJECT = 32  # of a tensor's overhead, what is no ggml_tensor
_OTHER_CACHES = ("sliding_window", "lora_rank", "compress", "shared_kv")  # in names of a model's metadata
_MEMINFO = Path("/proc/meminfo")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of a container, below /sys/fs/cgroup
_lib: Any = _capi.lib
_lib.ggml_row_size.restype = ctypes.c_size_t
_lib.ggml_blck_size.restype = ctypes.c_int64
_lib.ggml_tensor_overhead.restype = ctypes.c_size_t


def in_words(init: Any) -> Any:
    """Return LlamaContext.__init__ with errors that say why, and flash attention as llama.cpp decides.

    Errors: OptionError, UnsupportedError.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *, model: Any, params: Any, verbose: bool = True) -> None:
        self._exit_stack = contextlib.ExitStack()  # upstream's __del__ needs it if construction fails early
        if getattr(params, "auto_flash", False):  # of `Llama`; upstream's argument knows on and off only
            params.flash_attn_type = _native.LLAMA_FLASH_ATTN_TYPE_AUTO
        require_room(model, params)
        require_blocks(model, params)
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
        rows = ((type_k, self.key), (type_v, self.value))
        return self.layers * sum(row_bytes(type_, self.kv_heads * size) for type_, size in rows)


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


def row_bytes(type_: int, n: int) -> int:
    """Return what n values of a ggml_type take, at least; n need not be whole blocks."""
    block = int(_lib.ggml_blck_size(type_))
    return int(_lib.ggml_row_size(type_, ctypes.c_int64(n // block * block)))


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory and swap that are left for this process, at most, and all of them."""
    cpu = next(each for each in devices() if each["type"] == "CPU")
    left, whole = int(cpu["memory_free"]), int(cpu["memory_total"])
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):  # not everywhere, or not in full
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        bytes_ = {words[0].rstrip(":"): int(words[1]) << 10 for words in lines}
        left, whole = bytes_["MemAvailable"] + bytes_["SwapFree"], bytes_["MemTotal"] + bytes_["SwapTotal"]
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            left = min(left, int(Path("/sys/fs/cgroup", name).read_text()))
    return left, whole


def require_room(model: Any, params: Any) -> None:
    """Refuse a context for which there is no host memory. Errors: OptionError."""
    if model.params.vocab_only:
        return
    left, whole = host_memory()
    hint = "a smaller n_ctx, or a cache of smaller numbers: flash_attn=True, type_k=8, type_v=8 (q8_0)"
    _require("n_ctx", params.n_ctx, _cell_bytes(model, params), left, hint)
    # never written to, but asked for in one piece, which the system grants up to all that it has
    name = "n_ubatch" if params.n_ubatch else "n_batch"  # 0 means n_batch
    rows = min(params.n_batch, getattr(params, name))
    _require(name, rows, _row_bytes(model), whole, "n_ubatch=512, or leave it out")


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


def _cell_bytes(model: Any, params: Any) -> int:
    """Return what a token of the context takes in host memory, at least."""
    if _native.llama_model_is_recurrent(model.model):
        return 0  # one state, whatever n_ctx is
    attention = attention_of(model) if _on_host(model.params, params) else None
    return _CELL + (attention.cell_bytes(params.type_k, params.type_v) if attention else 0)


def _row_bytes(model: Any) -> int:
    """Return what a row of a decode takes in the plan that spreads its graph over devices, at least."""
    known = model.metadata().get("general.architecture") in HYBRID_ARCHITECTURES
    return _NODES * _COPIES * (int(_lib.ggml_tensor_overhead()) - _OBJECT) if known else 0


def _on_host(model_params: Any, params: Any) -> bool:
    """Tell whether the whole cache is in host memory."""
    has_cards = bool(model_params.devices) or bool(cards())
    return not (has_cards and model_params.n_gpu_layers != 0 and params.offload_kqv)
