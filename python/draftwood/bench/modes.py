"""Which modes a model can run, a `Llama` for each, and the vocabulary of all. Must not know: prompts, clocks.

Tests: tests/unit/test_bench_input.py, tests/model/test_bench.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from draftwood.errors import DrafterMemoryError, DraftwoodError, ModelFileError, UnsupportedError
from draftwood.options import Options, plan

BASELINE = "off"
MODES = (BASELINE, "mtp", "dflash", "ngram", "tree", "auto")
STOCK = "stock"
"""llama-cpp-python's own loop and kernels, without the engine (exact=False). It is not among MODES: on a
CPU its weights are repacked, and take their memory once more."""
BRANCHING = ("tree", "auto")
"""Modes that a tree budget is for; the others draft chains."""


def choose(
    wanted: Sequence[str],
    info: Any,
    drafter: str | None,
    n_gpu_layers: int = 0,
    *,
    without_tree_ops: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Return the wanted modes that a model file (`engine.ModelInfo`) can run, and why the others cannot.

    without_tree_ops: whether n_gpu_layers has devices to go to that lack them. Errors: UnsupportedError where
    nothing is left to hold against plain decode.
    """
    where = {"n_gpu_layers": n_gpu_layers}
    reasons = {
        mode: _refusal(mode, info, drafter, where, without_tree_ops)
        for mode in MODES
        if mode in wanted or mode == BASELINE
    }
    if STOCK in wanted:
        reasons[STOCK] = ""
    left_out = {mode: reason for mode, reason in reasons.items() if reason}
    runs = [mode for mode in reasons if mode not in left_out]
    if runs == [BASELINE]:
        why = "; ".join(f"{mode}: {reason}" for mode, reason in left_out.items()) or "none was asked for"
        raise UnsupportedError(
            f"found no mode to hold against plain decode ({why}); expected one at least",
            hint="--modes ngram drafts on any model",
        )
    return runs, left_out


def _refusal(mode: str, info: Any, drafter: str | None, where: dict[str, Any], without_tree_ops: bool) -> str:
    if mode == "dflash" and drafter is None:
        return "no --drafter was given"
    try:
        options = Options(mode, drafter=_drafter(mode, drafter))  # type: ignore[arg-type]
        planned = plan(options, info, where, without_tree_ops=without_tree_ops)
    except UnsupportedError as error:
        return error.message.removeprefix(f"speculation={mode!r} cannot run: ")
    if mode == "tree" and planned.n_rs_seq > 0:
        return f"n_gpu_layers={where['n_gpu_layers']} puts layers where drafts are chains"
    return planned.reason if mode != BASELINE else ""


def _drafter(mode: str, drafter: str | None) -> str | None:
    return drafter if mode in ("dflash", *BRANCHING) else None


def load(mode: str, model: str, drafter: str | None, tree_budget: int | None = None, **settings: Any) -> Any:
    """Return a Llama in that mode; on the CPU all of them share the weights through one mapping of the file.

    tree_budget is that of BRANCHING modes, None their default.
    Errors: DraftwoodError of the kind that `Llama` raises; ModelFileError for llama-cpp-python's own;
    DrafterMemoryError where "auto" would go on without its drafter.
    """
    from draftwood.llama import Llama

    if mode in BRANCHING:
        settings["tree_budget"] = tree_budget
    if mode == STOCK:
        settings["exact"] = False
    speculation = BASELINE if mode == STOCK else mode
    with _own_errors(model):
        llm = Llama(
            model, speculation=speculation, drafter=_drafter(mode, drafter), verbose=False, **settings
        )
    if speculation != BASELINE and llm.speculation == BASELINE:
        llm.close()
        raise DrafterMemoryError(
            f"{mode} has no drafter to measure: {llm.speculation_reason}", hint=f"--modes without {mode}"
        )
    return llm


def limits(llms: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return each drafting mode's longest draft and its most rows of a verify (0: its drafts are chains)."""
    drafting = {mode: llm for mode, llm in llms.items() if mode not in (BASELINE, STOCK)}
    return {
        "draft_tokens": {mode: llm._options.draft_tokens for mode, llm in drafting.items()},
        "tree_budget": {mode: llm._plan.tree_budget for mode, llm in drafting.items()},
    }


@contextmanager
def vocabulary(model: str) -> Iterator[Any]:
    """Lend a model's LlamaModel without weights or context: `tokenize` and `metadata`.

    Errors: ModelFileError.
    """
    from draftwood._llama_cpp import llama_cpp as native
    from draftwood._llama_cpp._internals import LlamaModel
    from draftwood._llama_cpp._logger import set_verbose

    set_verbose(False)
    native.llama_backend_init()
    params = native.llama_model_default_params()
    params.vocab_only = True
    with _own_errors(model):
        lent = LlamaModel(path_model=model, params=params, verbose=False)
    try:
        yield lent
    finally:
        lent.close()


@contextmanager
def _own_errors(model: str) -> Iterator[None]:
    try:
        yield
    except DraftwoodError:
        raise
    except (ValueError, RuntimeError) as error:
        hint = "`draftwood run MODEL --verbose` shows what llama.cpp says about it"
        raise ModelFileError(f"{model} cannot be loaded: {error}", hint=hint) from error
