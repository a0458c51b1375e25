"""The pool of experts that `draftwood serve` makes by itself, as `Llama` does, if its one card is too small.

llama-server would move whole layers' experts to the CPU (--fit). Must not know: what drafts, flags of a pool.
Test: tests/unit/test_cli_serve_own_pool.py, tests/gpu/test_surroundings.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from draftwood.cli.failure import library_needed
from draftwood.cli.server_flags import (
    DRAFTER_SOURCE_FLAGS,
    DRAFTER_SOURCE_VARIABLES,
    SOURCE_FLAGS,
    SOURCE_VARIABLES,
    config_files,
    given,
    slots,
    value,
)
from draftwood.errors import DraftwoodError, UnsupportedError

if TYPE_CHECKING:
    from draftwood.engine.engine import ModelInfo
    from draftwood.load.experts import Share

# with one of these a user has chosen where the model lies; names from common/arg.cpp at the pin
_CHOSEN = {
    **dict.fromkeys(("-fit", "--fit"), "LLAMA_ARG_FIT"),
    **dict.fromkeys(("-fitt", "--fit-target"), "LLAMA_ARG_FIT_TARGET"),
    **dict.fromkeys(("-fitc", "--fit-ctx"), "LLAMA_ARG_FIT_CTX"),
    **dict.fromkeys(("-dev", "--device"), "LLAMA_ARG_DEVICE"),
    **dict.fromkeys(("-sm", "--split-mode"), "LLAMA_ARG_SPLIT_MODE"),
    **dict.fromkeys(("-ts", "--tensor-split"), "LLAMA_ARG_TENSOR_SPLIT"),
    **dict.fromkeys(("-mg", "--main-gpu"), "LLAMA_ARG_MAIN_GPU"),
    **dict.fromkeys(("-nkvo", "--no-kv-offload"), "LLAMA_ARG_KV_OFFLOAD"),
    "--rpc": "LLAMA_ARG_RPC",
}
_LAYERS = (("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS")
_CACHE = (
    (("-ctk", "--cache-type-k"), "LLAMA_ARG_CACHE_TYPE_K"),
    (("-ctv", "--cache-type-v"), "LLAMA_ARG_CACHE_TYPE_V"),
)
_BYTES = {"f32": 4.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}
_UNIFIED = (("-kvu", "--kv-unified"), ("LLAMA_ARG_KV_UNIFIED",))
_LEAST_CONTEXT = 8192  # tokens: a model that fits with fewer is left to --fit, which shortens its context


@dataclass(frozen=True, slots=True)
class Found:
    """What the pool gets."""

    n_bytes: int
    """Of the card, for experts."""
    n_ctx: int
    """Of the context: as chosen, else the model's own, halved until experts get two fifths of the card."""


def choose(
    arguments: list[str], info: ModelInfo, settings: dict[str, Any], *, is_context_chosen: bool
) -> Found | None:
    """Return the pool of a model that one CUDA card cannot hold, and say so once; None for others.

    settings: of what is not experts, as arguments of `Llama`, n_ctx among them. None, too, where a flag or a
    file of flags places the model, and with a reason where host memory or the card cannot have a pool.
    """
    is_known = info.expert_bytes > 0 and info.kv_values > 0 and settings["n_ctx"] > 0
    if not is_known or _is_placed(arguments, info):
        return None
    with library_needed():
        from draftwood.load import experts
        from draftwood.load.devices import cards, describe
    devices = [describe(card) for card in cards()]
    if len(devices) != 1 or devices[0]["backend"] != "CUDA" or devices[0]["type"] != "GPU":
        return None
    device, free = str(devices[0]["name"]), int(devices[0]["memory_free"])
    n_streams = _streams(arguments)
    room = _Room.of(info, settings, _bytes_of_a_value(arguments), free)
    n_ctx = settings["n_ctx"]
    found = room.divide(n_ctx, n_ctx if is_context_chosen else _LEAST_CONTEXT * n_streams)
    if found is None:
        return None
    part = experts.fitting(info, found.n_bytes, device)
    if experts.taken_by(part, info) > found.n_bytes:  # a token's experts alone are more
        return None
    if why := experts.short_of_host(info) or _refusal(info, part):
        click.echo(f"draftwood: {why}: llama-server places experts (--fit)", err=True)
        return None
    _say(info, part, found.n_ctx, room, n_streams)
    return found


def _is_placed(arguments: list[str], info: ModelInfo) -> bool:
    """Tell whether a user has chosen where the model lies, or it is not known which files are loaded."""
    unknown = given(arguments, SOURCE_FLAGS, SOURCE_VARIABLES) or given(
        arguments, DRAFTER_SOURCE_FLAGS, DRAFTER_SOURCE_VARIABLES
    )
    by_file = any(path.exists() for path in config_files())
    return (
        unknown or by_file or given(arguments, _CHOSEN, _CHOSEN.values()) or not _all_layers(arguments, info)
    )


def _all_layers(arguments: list[str], info: ModelInfo) -> bool:
    from draftwood.load.placement import all_layers

    asked = value(arguments, _LAYERS[0], os.environ.get(_LAYERS[1])) or "auto"
    if asked in ("auto", "all"):
        return True
    try:
        return all_layers(int(asked), info)
    except ValueError:
        return False  # llama-server says what is wrong with it


def _streams(arguments: list[str]) -> int:
    """Return how many slots have a cache of their own, and share the context's tokens."""
    return 1 if given(arguments, *_UNIFIED) else max(1, slots(arguments))


def _bytes_of_a_value(arguments: list[str]) -> float:
    """Return what keys and values take each, on average."""
    types = [value(arguments, flags, os.environ.get(variable)) for flags, variable in _CACHE]
    return sum(_BYTES.get(each or "", 2.0) for each in types) / len(types)


@dataclass(frozen=True, slots=True)
class _Room:
    """What a card has, and what a model takes of it beside its experts. In bytes."""

    free: int
    others: int
    """All but experts and caches."""
    of_a_token: float
    """The model's cache and its drafter's."""
    of_experts: int

    @staticmethod
    def of(info: ModelInfo, settings: dict[str, Any], bytes_of_a_value: float, free: int) -> _Room:
        from draftwood.load.experts import beside, cache_bytes

        others = beside(info, settings) - cache_bytes(info, settings["n_ctx"])
        of_a_token = bytes_of_a_value * info.kv_values + _of_drafter(settings["drafter"])
        return _Room(free, others, of_a_token, info.expert_bytes)

    def rest(self, n_ctx: int) -> int:
        """Return the bytes that all but experts take with a context of so many tokens."""
        return self.others + int(self.of_a_token * n_ctx)

    def divide(self, n_ctx: int, least: int) -> Found | None:
        """Return the pool, with `least` tokens at least; None where the model fits, or the rest does not."""
        if self.rest(min(n_ctx, least)) + self.of_experts <= self.free:
            return None
        while n_ctx // 2 >= least and 5 * (self.free - self.rest(n_ctx)) < 2 * self.free:
            n_ctx //= 2
        left = self.free - self.rest(n_ctx)
        return Found(left, n_ctx) if left > 0 else None


def _of_drafter(path: str | None) -> int:
    """Return what a token takes in the cache of a drafter, which has as many cells as the model's."""
    from draftwood.engine.engine import probe_model
    from draftwood.load.experts import cache_bytes

    try:
        return cache_bytes(probe_model(path), 1) if path else 0
    except DraftwoodError:
        return 0  # who loads it says what is wrong with it


def _refusal(info: ModelInfo, part: Share) -> str:
    """Return why this card has no pool; "" where it can have one."""
    from draftwood.load import experts

    try:
        experts.require_experts(info)
        experts.make_pool(part).close()
    except UnsupportedError as error:
        return error.message
    return ""


def _say(info: ModelInfo, part: Share, n_ctx: int, room: _Room, n_streams: int) -> None:
    from draftwood.load.experts import gib

    of_slot = f" ({n_ctx // n_streams} a slot)" if n_streams > 1 else ""
    taken, free = gib(room.rest(n_ctx) + room.of_experts), gib(room.free)
    click.echo(
        f"draftwood: this model takes {taken} with a context of {n_ctx} tokens{of_slot}, and {part.device} "
        f"has {free} free: {part.slots / info.n_experts:.0%} of its experts get a slot there, and all lie in "
        "host memory. --vram, --expert-vram and -c choose otherwise; --fit on leaves experts to llama-server",
        err=True,
    )
