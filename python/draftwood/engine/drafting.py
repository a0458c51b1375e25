"""The engine of a `Llama`: made by its plan, with the times that speculation="auto" decides by.

Must not know: requests, tokens, text. Tests: tests/model/test_auto.py.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import Any

from draftwood.engine import _capi, curves
from draftwood.engine.engine import Engine, build_info, probe_model
from draftwood.errors import DrafterMemoryError, UnsupportedError
from draftwood.generate.states import model_of
from draftwood.generate.turns import Turns
from draftwood.load.devices import devices
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
}


def make_engine(llm: Any, plan: Plan, options: Options) -> tuple[Engine, Plan]:
    """Return the engine for a loaded `llm` and the plan that it runs.

    With "auto" a drafter for which there is no memory is left out, with a warning; else DrafterMemoryError.
    Errors: UnsupportedError for a drafter of another model.
    """
    try:
        return _make(llm, plan, options), plan
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
        return _make(llm, plan, options), plan


def keep_times(engine: Engine, turns: Turns) -> None:
    """Keep what an engine learned about the times of its rounds for the next load, unless it is at work."""
    with turns.at_once() as mine:
        if mine and engine.curve_name is not None:
            curves.store(engine.curve_name, engine.curve())


def _make(llm: Any, plan: Plan, options: Options) -> Engine:
    chooses = options.speculation == "auto" and plan.drafter not in ("none", "given")
    name = _key(llm, plan, options) if chooses else None
    known = None if name is None else curves.load(name)
    engine = Engine(
        llm._ctx.ctx,
        llm.context_params,
        drafter=_DRAFTERS[plan.drafter],
        draft_tokens=options.draft_tokens,
        draft_p_min=options.draft_p_min,
        exact_rows=EXACT_ROWS if options.exact else 0,
        drafter_path=options.drafter if plan.drafter == "dflash" else None,
        length=_capi.LENGTH_FIXED if name is None else _capi.LENGTH_AUTO,
        checkpoint_bytes=options.checkpoint_bytes,
        curve=known,
        tree_budget=plan.tree_budget,
    )
    engine.curve_name = name
    if name is not None and known is None:
        curves.store(name, engine.curve())
    return engine


def _cores() -> int | None:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _key(llm: Any, plan: Plan, options: Options) -> str:
    """Name what the times depend on: model, drafter, settings, build and machine."""
    path = options.drafter if plan.drafter == "dflash" else None
    arguments = {name: repr(value) for name, value in llm.__getstate__().items() if name in _TIMED}
    return curves.key(
        model=model_of(llm),
        drafter=[plan.drafter, path and [os.path.abspath(path), probe_model(path).file_bytes]],
        options=[options.exact, options.draft_tokens, repr(llm._placement)],
        arguments=arguments,
        build=build_info(),
        machine=[platform.node(), platform.machine(), _cores(), [each["description"] for each in devices()]],
    )
