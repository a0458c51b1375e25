"""The pool of experts of `draftwood serve`: the options of `run` as flags of llama-server, sizes as bytes.

llama-server makes the pool (src/server/pool.cpp). What cannot work is refused here, before it loads anything.
Must not know: drafting. Test: tests/unit/test_cli_serve_pool.py, tests/server/test_pool.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwood.cli import server_own_pool
from draftwood.cli.failure import library_needed
from draftwood.cli.server_flags import DRAFTER_FILE_FLAGS, given, number, slots, value

if TYPE_CHECKING:
    from draftwood.engine.engine import ModelInfo

_SIZE, _HEAT = "--expert-vram", "--expert-heat"
_SIZE_VARIABLE = "LLAMA_ARG_EXPERT_VRAM"
# llama-server's own ways to place experts; names from common/arg.cpp at the pin
_PLACING = {
    **dict.fromkeys(("-ncmoe", "--n-cpu-moe"), "LLAMA_ARG_N_CPU_MOE"),
    **dict.fromkeys(("-cmoe", "--cpu-moe"), "LLAMA_ARG_CPU_MOE"),
    **dict.fromkeys(("-ncffn", "--n-cpu-ffn"), "LLAMA_ARG_N_CPU_FFN"),
    **dict.fromkeys(("-ot", "--override-tensor"), "LLAMA_ARG_OVERRIDE_TENSOR"),
}
_CONTEXT = (("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE")
_OF_SLOT = (("--kv-unified-per-slot",), ("LLAMA_ARG_KV_UNIFIED_PER_SLOT",))
_AUTO_SLOTS = 4  # of llama-server by default


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options as given; None: not at all."""

    vram: str | None
    expert_vram: str | None
    expert_heat: str | None
    expert_guess: bool | None


def flags(wanted: Wanted, arguments: list[str], info: ModelInfo | None) -> list[str]:
    """Return llama-server's flags for a pool, [] without one.

    With no size, a model larger than its card gets a pool of what is free there (server_own_pool.py).

    arguments: the other flags, llama-server's own. info: the header of the model; None if it is still to be
    downloaded. Errors: click.UsageError; OptionError, UnsupportedError, ExpertMemoryError as `Llama` raises.
    """
    if wanted.vram is None and wanted.expert_vram is None:
        own = [] if info is None or _has_size(arguments) else _own(arguments, info)
        if not own:
            _need_no_size(wanted, arguments)
        elif wanted.expert_heat is not None:
            _check_heat(wanted, info)
        return [*own, *_beside_size(wanted)]
    for flag, variable in _PLACING.items():
        if given(arguments, (flag,), (variable,)):
            raise click.UsageError(
                f"found {flag} beside --vram or {_SIZE}; expected one way to place experts\n\n"
                f"hint: leave {flag} out: the pool keeps all experts in host memory"
            )
    return [_SIZE, str(_bytes(wanted, arguments, info)), *_beside_size(wanted)]


def _has_size(arguments: list[str]) -> bool:
    return given(arguments, (_SIZE,), (_SIZE_VARIABLE,))


def _own(arguments: list[str], info: ModelInfo) -> list[str]:
    """Return the flags of a pool that nobody asked for, [] where llama-server places experts."""
    if given(arguments, _PLACING, _PLACING.values()):
        return []
    chosen = given(arguments, _CONTEXT[0], (_CONTEXT[1],)) or given(arguments, *_OF_SLOT)
    settings = _settings(arguments, info)
    found = server_own_pool.choose(arguments, info, settings, is_context_chosen=chosen)
    if found is None:
        return []
    shortened = [_CONTEXT[0][0], str(found.n_ctx)] if found.n_ctx != settings["n_ctx"] else []
    return [_SIZE, str(found.n_bytes), *shortened]


def _need_no_size(wanted: Wanted, arguments: list[str]) -> None:
    alone = wanted.expert_heat is not None or wanted.expert_guess is not None
    if alone and not _has_size(arguments):
        raise click.UsageError(
            f"found {_HEAT} or --expert-guess without --vram or {_SIZE}; expected a size\n\n"
            "hint: --vram 12GiB"
        )


def _beside_size(wanted: Wanted) -> list[str]:
    heat = [] if wanted.expert_heat is None else [_HEAT, wanted.expert_heat]
    guess = {None: [], True: ["--expert-guess"], False: ["--no-expert-guess"]}[wanted.expert_guess]
    return [*heat, *guess]


def _bytes(wanted: Wanted, arguments: list[str], info: ModelInfo | None) -> int:
    with library_needed():
        from draftwood.load import experts
    placement = {"vram": wanted.vram, "expert_vram": wanted.expert_vram, "n_cpu_moe": 0}
    if info is None:
        if wanted.vram is not None:
            raise click.UsageError(
                "found --vram without a model file, from whose header it is divided\n\n"
                f"hint: draftwood serve MODEL --vram {wanted.vram}, or {_SIZE} SIZE for experts alone"
            )
        return experts.to_bytes(wanted.expert_vram, "expert_vram")
    experts.require_experts(info)
    settings = _settings(arguments, info)
    n_bytes = experts.room(info, placement, settings)
    assert n_bytes is not None
    if n_bytes >= info.expert_bytes:  # llama-server makes no pool
        return n_bytes
    experts.require_host(info, n_bytes)
    _check_heat(wanted, info)
    if wanted.vram is not None and not given(arguments, _CONTEXT[0], (_CONTEXT[1],)):
        _say_context(info, settings["n_ctx"])
    return n_bytes


def _check_heat(wanted: Wanted, info: ModelInfo | None) -> None:
    with library_needed():
        from draftwood.load import heat
    path = heat.path_of(wanted.expert_heat)
    heat.check_path(path)
    if info is not None and path is not None and Path(path).exists():
        heat.require(path, info)


def _say_context(info: ModelInfo, n_ctx: int) -> None:
    from draftwood.load.experts import cache_bytes, gib

    click.echo(
        f"draftwood: the model's context of {n_ctx} tokens takes {gib(cache_bytes(info, n_ctx))} of --vram; "
        "-c N leaves more for experts",
        err=True,
    )


def _settings(arguments: list[str], info: ModelInfo) -> dict[str, Any]:
    """Return what decides how much of a card the rest of a model takes, as arguments of `Llama`."""
    n_slots = slots(arguments)
    n_slots = n_slots if n_slots > 0 else _AUTO_SLOTS
    of_slot = number(arguments, _OF_SLOT[0], _OF_SLOT[1][0], 0)
    n_ctx = number(arguments, *_CONTEXT, 0) or max(0, of_slot) * n_slots or info.n_ctx_train
    drafter = value(arguments, DRAFTER_FILE_FLAGS, None)
    projector = value(arguments, ("-mm", "--mmproj"), None)
    return {
        "n_ctx": n_ctx,
        "n_batch": number(arguments, ("-b", "--batch-size"), "LLAMA_ARG_BATCH", 2048),
        "n_ubatch": number(arguments, ("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", 512),
        "n_seq_max": n_slots + 1,  # for steps that are queued
        "drafter": drafter or os.environ.get("LLAMA_ARG_SPEC_DRAFT_MODEL"),
        "mmproj": projector or os.environ.get("LLAMA_ARG_MMPROJ"),
    }
