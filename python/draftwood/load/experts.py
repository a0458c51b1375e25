"""How many of a model's experts a card holds: vram=, expert_vram=. What is learnt of them: heat.py.

Must not know: contexts, requests. Tests: tests/unit/test_experts.py, tests/model/test_api_experts.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftwood.coerce import as_bool, as_int
from draftwood.engine import _capi
from draftwood.engine.engine import ModelInfo, probe_model
from draftwood.engine.experts import ExpertPool
from draftwood.errors import DraftwoodError, ExpertMemoryError, OptionError, UnsupportedError
from draftwood.load import memory
from draftwood.load.devices import cards, describe
from draftwood.load.placement import all_layers
from draftwood.stats import ExpertLayer
from draftwood.warn import warn

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
CPU = "CPU"  # ggml's name of it
IN_PLAIN_MEMORY = "slots of experts lie in plain memory"
"""How the warning begins that a pool is on no card."""
_NO_SPLIT = 0  # LLAMA_SPLIT_MODE_NONE
_STAGED_LAYERS = 2
SPARE = 3 << 29  # bytes: CUDA's own, activations, kept graphs, draft trees, a short head
_SEQUENCE = 1 << 27  # bytes: the recurrent state and draft trees of one more, 35B-A3B's
_LEAST_BESIDE = 2  # times what prompts' experts take: with less, slots for decoding are worth more


def to_bytes(value: Any, name: str) -> int:
    """Return a size: a number of bytes, or text such as "12GiB", "900 MB". Errors: OptionError."""
    if (number := as_int(value)) is not None and number >= 0:
        return number
    match = (
        re.fullmatch(r"\s*(\d{1,18}(?:\.\d*)?)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    )
    if match is None or match[2].upper() not in _UNITS:
        raise OptionError(
            f"{name} is {value!r}; expected a number of bytes, or text such as '6GiB'",
            hint="6GiB, for example; units are B, KB, MB, GB and KiB, MiB, GiB",
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model's experts that a device holds."""

    slots: int
    """Of each layer."""
    device: str
    """ggml's name of it."""
    stage: bool = False
    """Whether it has room for two layers' experts besides, through which prompts go."""


def room(info: ModelInfo, placement: dict[str, Any], kwargs: dict[str, Any]) -> int | None:
    """Return the bytes of the card that experts may take; None where all of them may lie there.

    `vram` is for everything: what the experts do not need is estimated from the file's header. With neither
    `vram` nor `expert_vram`, a model larger than what its one card has free gets what is left there.
    Errors: OptionError for both, and for a `vram` that is too small for the rest of the model.
    """
    vram, own = placement["vram"], placement["expert_vram"]
    if vram is not None and own is not None:
        raise OptionError("found vram and expert_vram; expected one of them", hint="leave expert_vram out")
    if placement["n_cpu_moe"] and (vram is not None or own is not None):
        raise OptionError(
            "found n_cpu_moe beside vram or expert_vram; expected one way to place experts",
            hint="leave n_cpu_moe out: the pool keeps all experts in host memory",
        )
    if own is not None:
        return to_bytes(own, "expert_vram")
    if vram is not None:
        return _beside_rest(vram, info, kwargs)
    return _left_over(info, placement, kwargs)


def _beside_rest(vram: int | str, info: ModelInfo, kwargs: dict[str, Any]) -> int:
    n_bytes, rest, n_ctx = to_bytes(vram, "vram"), beside(info, kwargs), _n_ctx(info, kwargs)
    if n_bytes < rest:
        enough = rest + _taken(info, info.n_experts_used)
        raise OptionError(
            f"vram is {vram!r}; expected {rest} bytes or more: the model without its experts takes about "
            f"as much, with n_ctx={n_ctx}",
            hint=f'vram="{-(-enough // 2**20)}MiB"; a smaller n_ctx or n_ubatch needs less',
        )
    return n_bytes - rest


def _left_over(info: ModelInfo, placement: dict[str, Any], kwargs: dict[str, Any]) -> int | None:
    elsewhere = placement["n_cpu_moe"] or placement["tensor_buft_overrides"] or placement["rpc_servers"]
    on_card = all_layers(kwargs.get("n_gpu_layers", 0), info)
    found = [describe(card) for card in cards()] if on_card else []
    if elsewhere or len(found) != 1 or found[0]["backend"] != "CUDA" or info.expert_bytes == 0:
        return None
    rest, free = beside(info, kwargs), int(found[0]["memory_free"])
    return None if rest + info.expert_bytes <= free or free <= rest else free - rest


def beside(info: ModelInfo, kwargs: dict[str, Any]) -> int:
    """Return an estimate of the card's bytes that a model takes without its experts.

    Weights, a KV cache of f16 values, logits of a batch, the files of a `drafter` and of a projector
    (`mmproj`), what further sequences (`n_seq_max`) keep, and SPARE for what else is computed and kept.
    """
    n_rows: int = min(kwargs.get("n_ubatch", 512), kwargs.get("n_batch", 512))
    logits = 4 * info.n_vocab * n_rows
    files = info.file_bytes + _drafter_bytes(kwargs.get("drafter")) + _file_bytes(kwargs.get("mmproj"))
    sequences: int = _SEQUENCE * (kwargs.get("n_seq_max", 1) - 1)
    return files - info.expert_bytes + cache_bytes(info, _n_ctx(info, kwargs)) + logits + sequences + SPARE


def cache_bytes(info: ModelInfo, n_ctx: int) -> int:
    """Return what a KV cache of f16 values takes."""
    return 2 * info.kv_values * n_ctx


def _n_ctx(info: ModelInfo, kwargs: dict[str, Any]) -> int:
    return kwargs.get("n_ctx", 512) or info.n_ctx_train or 4096  # 0: the model's own, if the header says it


def _drafter_bytes(path: Any) -> int:
    """Return the size of a drafter's files, 0 without one or for what is none: who loads it says so."""
    try:
        return probe_model(path).file_bytes if path else 0
    except (DraftwoodError, TypeError, ValueError):
        return 0


def _file_bytes(path: Any) -> int:
    """Return the size of a file, 0 without one: who loads it says what is wrong with it."""
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def gib(n_bytes: int) -> str:
    """Return a size as messages show it."""
    if n_bytes < 2**20:
        return f"{n_bytes} bytes"
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def share(info: ModelInfo, n_bytes: int | None, kwargs: dict[str, Any]) -> Share | None:
    """Return what fits into so many bytes; None if all experts do, or none was asked for.

    A layer has slots for a token's experts at least: each then crosses the bus once. Warns if they take more
    than was given, or lie on no card. Errors: UnsupportedError for a model or machine without a pool.
    """
    if n_bytes is None:
        return None
    require_experts(info)
    if n_bytes >= info.expert_bytes:
        return None
    part = fitting(info, n_bytes, _device(kwargs))
    if (taken := taken_by(part, info)) > n_bytes:
        warn(
            f"experts get {gib(n_bytes)} and take {gib(taken)}: each layer has slots for a token's "
            f"{info.n_experts_used} experts at least"
        )
    if part.device == CPU:
        why = "n_gpu_layers is 0; n_gpu_layers=-1 puts them on the card" if cards() else "found no card"
        warn(f"{IN_PLAIN_MEMORY}, where they save nothing: {why}")
    return part


def taken_by(part: Share | None, info: ModelInfo) -> int:
    """Return the bytes that experts take where `part` of them lies; None: all of them."""
    if part is None:
        return info.expert_bytes
    return _taken(info, part.slots) + _staged(info) * part.stage


def short_of_host(info: ModelInfo) -> str:
    """Return why this machine's memory cannot hold all experts, which a pool needs; "" where it can."""
    free = memory.available()
    if free is None or info.expert_bytes <= free:
        return ""
    return f"a pool keeps all experts in host memory, {gib(info.expert_bytes)}, and {gib(free)} are free"


def require_host(info: ModelInfo, n_bytes: int) -> None:
    """Refuse a pool of so many bytes if host memory cannot hold all experts. Errors: ExpertMemoryError."""
    if why := short_of_host(info):
        n_layers = layers_that_do_not_fit(info, n_bytes)
        raise ExpertMemoryError(
            f"{why}; expected as much",
            hint=f"n_cpu_moe={n_layers} in place of vram and expert_vram: the CPU computes the experts of so "
            "many layers, and reads them from the model's file",
        )


def layers_that_do_not_fit(info: ModelInfo, n_bytes: int) -> int:
    """Return of how many layers the experts do not fit into so many bytes of the card."""
    return -(-max(0, info.expert_bytes - n_bytes) * info.n_expert_layers // info.expert_bytes)


@contextlib.contextmanager
def memory_errors(pool: ExpertPool | None, info: ModelInfo) -> Iterator[None]:
    """Raise ExpertMemoryError for a load into the pool that fails for memory."""
    try:
        yield
    except Exception as error:
        if pool is None or (refused := pool.refused()) is None:
            raise
        raise _refusal(*refused, info) from error


def _refusal(n_bytes: int, on_host: bool, info: ModelInfo) -> ExpertMemoryError:
    if on_host:
        return ExpertMemoryError(
            f"the system refused {gib(n_bytes)} of pinned host memory for experts, which take "
            f"{gib(info.expert_bytes)} in all",
            hint="a larger limit of locked memory (ulimit -l, a container's), or n_cpu_moe=N in place of "
            "vram and expert_vram: the CPU then computes experts of N layers, in ordinary memory",
        )
    return ExpertMemoryError(
        f"the card refused {gib(n_bytes)} for slots of experts", hint="a smaller vram or expert_vram"
    )


def require_experts(info: ModelInfo) -> None:
    """Refuse a model that no pool can hold. Errors: UnsupportedError."""
    if info.n_experts == 0 or info.expert_bytes == 0:
        raise UnsupportedError(
            "vram or expert_vram is given, but this model has no experts; expected a mixture of experts",
            hint="leave both out",
        )
    if info.n_experts > _capi.MAX_EXPERTS:
        raise UnsupportedError(
            f"a layer of this model has {info.n_experts} experts; a pool holds {_capi.MAX_EXPERTS} at most",
            hint="n_cpu_moe keeps experts of whole layers in host memory",
        )


def fitting(info: ModelInfo, n_bytes: int, device: str) -> Share:
    """Return what a device holds in so many bytes, less than all experts take."""
    staged = _staged(info)
    stage = device != CPU and n_bytes >= _LEAST_BESIDE * staged
    slots = (n_bytes - staged * stage) * info.n_experts // info.expert_bytes
    return Share(max(info.n_experts_used, slots), device, stage)


def _staged(info: ModelInfo) -> int:
    """Return what prompts' experts take on a card."""
    return _STAGED_LAYERS * info.expert_bytes // info.n_expert_layers


def _taken(info: ModelInfo, slots: int) -> int:
    """Return what so many slots of each layer take."""
    return slots * info.expert_bytes // info.n_experts


def _device(kwargs: dict[str, Any]) -> str:
    found = cards()
    if kwargs.get("n_gpu_layers", 0) == 0 or not found:
        return CPU
    main = kwargs.get("main_gpu", 0)
    if len(found) > 1 and kwargs.get("split_mode", 1) != _NO_SPLIT:
        raise UnsupportedError(
            f"found {len(found)} cards; a pool of experts lies on one",
            hint="split_mode=0 with main_gpu=N, or CUDA_VISIBLE_DEVICES=N",
        )
    if not 0 <= main < len(found):
        raise OptionError(f"main_gpu is {main}; expected 0 to {len(found) - 1}", hint="main_gpu=0")
    return str(describe(found[main])["name"])


def guesses(given: Any, wanted: Share | None) -> bool:
    """Return whether experts are fetched before their router has chosen. Errors: OptionError for no bool."""
    guess = as_bool(given)
    if given is not None and guess is None:
        raise OptionError(
            f"expert_guess is {given!r}; expected True, False or None", hint="leave expert_guess out"
        )
    return wanted is not None and (wanted.device != CPU if guess is None else guess)


def make_pool(wanted: Share, *, guess: bool = False) -> ExpertPool:
    """Make the pool. guess: as `guesses` says. Errors: UnsupportedError for a device that cannot have one."""
    return ExpertPool(wanted.slots, device=wanted.device, stage=wanted.stage, guess=guess)


def say_part(info: ModelInfo, n_bytes: int, device: str, kwargs: dict[str, Any]) -> None:
    """Warn of a pool that was not asked for, in the bytes that `room` found."""
    rest, part = beside(info, kwargs), n_bytes / info.expert_bytes
    warn(
        f"this model takes {gib(rest + info.expert_bytes)} and {device} has {gib(rest + n_bytes)} free: "
        f"{part:.0%} of its experts lie on the card, all of them in host memory (docs/experts.md)"
    )


def check_filled(pool: ExpertPool | None, placement: dict[str, Any]) -> None:
    """Refuse overrides that placed all experts elsewhere: they go before the pool's. Errors: OptionError."""
    if pool is not None and placement["tensor_buft_overrides"] and pool.stats().layers == 0:
        raise OptionError(
            "found vram or expert_vram beside tensor_buft_overrides that place all experts; "
            "expected one of them",
            hint="leave the overrides of experts out",
        )


def pooled(pool: ExpertPool, info: ModelInfo) -> dict[int, ExpertLayer]:
    """Return what the pool knows of each layer with experts in it, by number."""
    found = {}
    for number in range(info.n_layers):
        with contextlib.suppress(DraftwoodError):  # no experts, or no graph was made with it
            found[number] = pool.layer(number)
    return found
