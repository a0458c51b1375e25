"""The pool of experts that `draftwood serve` makes by itself, as `Llama` does, if its one card is too small.

llama-server would move whole layers' experts to the CPU (--fit). Must not know: what drafts, flags of a pool.
Test: tests/unit/test_cli_serve_own_pool.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from draftwood.cli.failure import library_needed
from draftwood.cli.server_flags import given, value
from draftwood.errors import UnsupportedError

if TYPE_CHECKING:
    from draftwood.engine.engine import ModelInfo

# with one of these a user has chosen where the model lies; names from common/arg.cpp at the pin
_CHOSEN = {
    **dict.fromkeys(("-fit", "--fit"), "LLAMA_ARG_FIT"),
    **dict.fromkeys(("-fitt", "--fit-target"), "LLAMA_ARG_FIT_TARGET"),
    **dict.fromkeys(("-fitc", "--fit-ctx"), "LLAMA_ARG_FIT_CTX"),
    **dict.fromkeys(("-dev", "--device"), "LLAMA_ARG_DEVICE"),
    **dict.fromkeys(("-sm", "--split-mode"), "LLAMA_ARG_SPLIT_MODE"),
    **dict.fromkeys(("-ts", "--tensor-split"), "LLAMA_ARG_TENSOR_SPLIT"),
    **dict.fromkeys(("-mg", "--main-gpu"), "LLAMA_ARG_MAIN_GPU"),
    "--rpc": "LLAMA_ARG_RPC",
}
_LAYERS = (("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS")
_LEAST_CONTEXT = 8192  # tokens: a model that fits with fewer is left to --fit, which shortens its context


@dataclass(frozen=True, slots=True)
class Found:
    """What the pool gets."""

    n_bytes: int
    """Of the card, for experts."""
    n_ctx: int
    """Tokens of the context: the model's own, halved until experts have two fifths of what is free."""


def choose(
    arguments: list[str], info: ModelInfo, settings: dict[str, Any], *, is_context_chosen: bool
) -> Found | None:
    """Return the pool of a model that one CUDA card cannot hold, and say so once; None for others.

    settings: of what is not experts, as arguments of `Llama`, n_ctx among them. None, too, where a flag
    places the model, and with a reason where host memory or the card cannot have a pool.
    """
    with library_needed():
        from draftwood.load import experts
        from draftwood.load.devices import cards, describe
    if info.expert_bytes == 0 or given(arguments, _CHOSEN, _CHOSEN.values()):
        return None
    if not _all_layers(arguments, info):
        return None
    devices = [describe(card) for card in cards()]
    if len(devices) != 1 or devices[0]["backend"] != "CUDA":
        return None
    free = int(devices[0]["memory_free"])
    found = _divide(info, settings, free, is_context_chosen=is_context_chosen)
    if found is None:
        return None
    if why := experts.short_of_host(info) or _refusal(info, found.n_bytes, devices[0]["name"]):
        click.echo(f"draftwood: {why}: llama-server places experts (--fit)", err=True)
        return None
    _say(info, found, free, devices[0]["name"])
    return found


def _all_layers(arguments: list[str], info: ModelInfo) -> bool:
    from draftwood.load.placement import all_layers

    asked = value(arguments, _LAYERS[0], os.environ.get(_LAYERS[1])) or "auto"
    if asked in ("auto", "all"):
        return True
    try:
        return all_layers(int(asked), info)
    except ValueError:
        return False  # llama-server says what is wrong with it


def _divide(info: ModelInfo, settings: dict[str, Any], free: int, *, is_context_chosen: bool) -> Found | None:
    from draftwood.load.experts import beside

    n_ctx: int = settings["n_ctx"]
    least = n_ctx if is_context_chosen else min(n_ctx, _LEAST_CONTEXT)
    if beside(info, {**settings, "n_ctx": least}) + info.expert_bytes <= free:
        return None
    left = free - beside(info, {**settings, "n_ctx": n_ctx})
    while n_ctx // 2 >= least and 5 * left < 2 * free:
        n_ctx //= 2
        left = free - beside(info, {**settings, "n_ctx": n_ctx})
    return Found(left, n_ctx) if left > 0 else None


def _refusal(info: ModelInfo, n_bytes: int, device: str) -> str:
    """Return why this card has no pool; "" where it can have one."""
    from draftwood.load import experts

    try:
        experts.require_experts(info)
        experts.make_pool(experts.fitting(info, n_bytes, device)).close()
    except UnsupportedError as error:
        return error.message
    return ""


def _say(info: ModelInfo, found: Found, free: int, device: str) -> None:
    from draftwood.load.experts import gib

    part = found.n_bytes / info.expert_bytes
    click.echo(
        f"draftwood: {device} has {gib(free)} free, and this model's experts take {gib(info.expert_bytes)}: "
        f"{part:.0%} of them lie on the card, all of them in host memory; the context has {found.n_ctx} "
        "tokens. --vram, --expert-vram and -c choose otherwise; --fit on leaves experts to llama-server",
        err=True,
    )
