"""The engine of a context: made by a plan, with the times that speculation="auto" decides by.

Must not know: `Llama`, requests, tokens, text. Tests: tests/model/test_auto.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from draftwood.engine import _capi, curves
from draftwood.engine.engine import Engine, build_info, probe_model
from draftwood.errors import DrafterMemoryError, UnsupportedError
from draftwood.options import EXACT_ROWS, Options, Plan
from draftwood.warn import warn

_DRAFTERS = {
    "none": _capi.DRAFTER_NONE,
    "mtp": _capi.DRAFTER_MTP,
    "ngram": _capi.DRAFTER_NGRAM,
    "dflash": _capi.DRAFTER_DFLASH,
    "given": _capi.DRAFTER_GIVEN,
}
# of llama-cpp-python's arguments, those that the time of a decode depends on
_TIMED = {
    *("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "n_ctx", "n_ubatch", "n_threads"),
    *("n_threads_batch", "offload_kqv", "flash_attn", "op_offload", "type_k", "type_v"),
    *("n_cpu_moe", "tensor_buft_overrides", "rpc_servers", "expert_slots"),
}


@dataclass(frozen=True, slots=True)
class Target:
    """The context that an engine works on, and what its times depend on."""

    ctx: Any
    """llama_context."""
    params: Any
    """The llama_context_params it was made with."""
    model: str
    """Tells the model from others."""
    arguments: dict[str, Any]
    """Of `Llama`."""
    machine: list[Any]


def make_engine(target: Target, plan: Plan, options: Options) -> tuple[Engine, Plan]:
    """Return the engine for a context and the plan that it runs.

    With "auto" a drafter for which there is no memory is left out, with a warning; else DrafterMemoryError.
    Errors: UnsupportedError for a drafter of another model.
    """
    try:
        return _make(target, plan, options), plan
    except UnsupportedError as error:
        if plan.drafter != "dflash" or "drafter" not in error.message:
            raise
        named = "" if str(options.drafter) in error.message else f" (drafter={options.drafter!r})"
        hint = "drafter= takes the GGUF of a DFlash drafter that was made for this very model"
        raise UnsupportedError(error.message + named, hint=hint) from None
    except DrafterMemoryError as error:
        if options.speculation != "auto":
            raise
        warn(f"the model was loaded without its drafter: {error.message}")
        plan = replace(plan, drafter="none", reason=error.message)
        return _make(target, plan, options), plan


def keep_times(engine: Engine, at_once: Callable[[], AbstractContextManager[bool]]) -> None:
    """Keep what an engine learned about the times of its rounds for the next load.

    at_once: gives the turn on the engine; False: it is at work, and nothing is kept.
    """
    with at_once() as mine:
        if mine and engine.curve_name is not None:
            curves.store(engine.curve_name, engine.curve())


def _make(target: Target, plan: Plan, options: Options) -> Engine:
    chooses = options.speculation == "auto" and plan.drafter not in ("none", "given")
    name = _key(target, plan, options) if chooses else None
    known = None if name is None else curves.load(name)
    engine = Engine(
        target.ctx,
        target.params,
        drafter=_DRAFTERS[plan.drafter],
        draft_tokens=options.draft_tokens,
        draft_p_min=options.draft_p_min,
        exact_rows=EXACT_ROWS if options.exact else 0,
        drafter_path=options.drafter if plan.drafter == "dflash" else None,
        length=_capi.LENGTH_FIXED if name is None else _capi.LENGTH_AUTO,
        checkpoint_bytes=options.checkpoint_bytes,
        curve=known,
        tree_budget=plan.tree_budget,
        draft_vocab=options.draft_vocab or 0,
        queue_steps=plan.queue_steps,
        begin_drafts=os.environ.get("DRAFTWOOD_BEGIN_DRAFTS") != "0",
    )
    engine.curve_name = name
    if name is not None and known is None:
        curves.store(name, engine.curve())
    return engine


def _key(target: Target, plan: Plan, options: Options) -> str:
    """Name what the times depend on: model, drafter, settings, build and machine."""
    path = options.drafter if plan.drafter == "dflash" else None
    arguments = {name: repr(value) for name, value in target.arguments.items() if name in _TIMED}
    return curves.key(
        model=target.model,
        drafter=[plan.drafter, path and [os.path.abspath(path), probe_model(path).file_bytes]],
        options=[options.exact, options.draft_tokens, options.draft_vocab],
        arguments=arguments,
        build=build_info(),
        machine=target.machine,
    )
