"""What a `Llama` is loaded with: its arguments checked, corrected and planned, before upstream's constructor.

Reads the headers of files and asks for the machine's devices; loads nothing.
Must not know: contexts, engines, requests. Test: tests/model/test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.engine import ModelInfo
from draftwood.engine.experts import ExpertPool
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import arguments, cpu, experts, files, heat, overrides, readahead, rpc, split, steps
from draftwood.load.cores import fit_threads
from draftwood.load.devices import cards, gpu_backends, without_tree_ops
from draftwood.load.placement import checked_n_cpu_moe, embeddings_on_card, pooled_layers, tensor_overrides
from draftwood.options import Options, Plan, fitted, needed_batch, plan
from draftwood.warn import warn

_LEAST_CONTEXT = 256  # cells: llama.cpp rounds n_ctx up to a multiple of it. No draft needs more


@dataclass(frozen=True, slots=True)
class Preparation:
    """What upstream's constructor does not know, and the engine's plan."""

    plan: Plan
    given: dict[str, Any]
    """Arguments as the caller gave them, where upstream's own state has others: n_batch and n_ubatch where a
    draft needed more, flash_attn (None) if it is not set."""
    auto_flash: bool
    """Whether llama.cpp decides about flash attention (arguments.auto_flash)."""
    servers: rpc.Servers | None
    """Its owner closes them."""
    tensor_overrides: Any
    """For `llama_model_params.tensor_buft_overrides`; must outlive the model."""
    info: ModelInfo
    pool: ExpertPool | None
    """Its owner closes it, after the model."""
    read_ahead: readahead.Wanted | None


def prepare(
    model_path: str,
    options: Options,
    placement: dict[str, Any],
    draft_model: Any,
    kwargs: dict[str, Any],
    known: Collection[str],
) -> Preparation:
    """Refuse, correct and plan. `kwargs` is changed to what upstream's constructor shall have, n_cpu_moe of
    `placement` to an int.

    placement: n_cpu_moe, tensor_buft_overrides, rpc_servers, vram, expert_vram, expert_heat, expert_guess,
    expert_readahead. known: names of arguments. To be called from `Llama.__init__`, at whose caller warnings
    point. Errors: those of `Llama`.
    """
    arguments.check_devices(kwargs)
    placement["n_cpu_moe"] = checked_n_cpu_moe(placement["n_cpu_moe"])
    wanted = (placement["n_cpu_moe"], placement["tensor_buft_overrides"])
    cpu.check()
    tensor_overrides(*wanted)  # refused before anything is read
    info = files.checked_model(model_path)
    if options.drafter is not None and options.speculation != "off":
        files.need_drafter_file(options.drafter)
    overrides.check(model_path, kwargs.get("kv_overrides"))
    kwargs["lora_path"] = files.checked_lora(kwargs.get("lora_path"))
    heat_file = heat.path_of(placement["expert_heat"])
    read_ahead = readahead.wanted(placement["expert_readahead"], info, kwargs)
    _check_draft_model(draft_model)
    n_gpu_layers = kwargs.get("n_gpu_layers", 0)
    split.check(kwargs, placement["rpc_servers"])
    servers = rpc.connect(placement["rpc_servers"], n_gpu_layers)
    try:
        asked = {**kwargs, "draft_model": draft_model}
        chains_only = servers is not None or bool(without_tree_ops())
        planned = plan(options, info, asked, without_tree_ops=chains_only)
        on_cards = n_gpu_layers != 0 and bool(cards())
        # an RPC server is not asked what it can run: ggml takes all for granted
        auto_flash = arguments.auto_flash(kwargs, on_cards=on_cards and servers is None)
        _correct(kwargs, info, known, on_cards=on_cards or servers is not None, auto_flash=auto_flash)
        asked_of_card = {**kwargs, "drafter": options.drafter}  # as corrected
        queues = steps.are_wanted(planned, options, info, kwargs) and steps.on_one_card(
            info, kwargs, placement
        )
        if queues:
            asked_of_card["n_seq_max"] = 2
        pool, held, n_cpu_moe = _pool(info, placement, heat_file, asked_of_card)
        on_card = embeddings_on_card(
            n_gpu_layers, info, lambda: experts.taken_by(held, info) + experts.beside(info, asked_of_card)
        )
        planned = replace(planned, queue_steps=queues and steps.read_one_card(n_cpu_moe, on_card))
        layers = pooled_layers(info, pool) if pool else ()
        n_layers = info.n_layers + info.n_layer_nextn
        tensors = tensor_overrides(n_cpu_moe, wanted[1], on_card, layers, n_layers)
        given: dict[str, Any] = {} if kwargs.get("flash_attn") is not None else {"flash_attn": None}
        if planned.drafter != "none":
            planned, raised = _fit(planned, options, kwargs)
            given |= raised
        return Preparation(planned, given, auto_flash, servers, tensors, info, pool, read_ahead)
    except BaseException:
        if servers is not None:
            servers.close()
        raise


def _pool(
    info: ModelInfo, placement: dict[str, Any], heat_file: str | None, kwargs: dict[str, Any]
) -> tuple[ExpertPool | None, experts.Share | None, int]:
    """Return the pool and what it holds, and of how many layers the CPU computes the experts.

    Errors: those of a pool that was asked for, ExpertMemoryError and UnsupportedError among them.
    """
    asked_for = placement["vram"] is not None or placement["expert_vram"] is not None
    room = experts.room(info, placement, kwargs)
    part = experts.share(info, room, kwargs)
    guess = experts.guesses(placement["expert_guess"], part)
    if room is None or part is None:
        return None, None, placement["n_cpu_moe"]
    if why := experts.short_of_host(info):
        if asked_for:
            experts.require_host(info, room)
        return None, None, _without_pool(why, experts.layers_that_do_not_fit(info, room))
    heat.check_path(heat_file)
    try:
        pool = experts.make_pool(part, guess=guess)
    except UnsupportedError as error:
        if asked_for:
            raise
        return None, None, _without_pool(error.message, experts.layers_that_do_not_fit(info, room))
    if not asked_for:
        experts.say_part(info, room, part.device, kwargs)
    pool.set_heat(heat.read(heat_file, info))
    return pool, part, placement["n_cpu_moe"]


def _without_pool(why: str, n_layers: int) -> int:
    warn(f"{why}: the CPU computes the experts of {n_layers} layers, as with n_cpu_moe={n_layers}")
    return n_layers


def _check_draft_model(given: Any) -> None:
    """Refuse what is no LlamaDraftModel, though it may be callable as one is."""
    if isinstance(given, type):
        raise OptionError(
            f"found the class {given.__name__} as draft_model=; expected an instance of it",
            hint=f"draft_model={given.__name__}()",
        )
    if given is not None and (not callable(given) or hasattr(given, "create_completion")):
        found = "a Llama" if hasattr(given, "create_completion") else repr(given)
        raise OptionError(
            f"found {found} as draft_model=; expected a LlamaDraftModel, which continues tokens",
            hint="drafter=path, if it is the GGUF of a DFlash drafter; no other model drafts for this one",
        )


def _correct(
    kwargs: dict[str, Any], info: ModelInfo, known: Collection[str], *, on_cards: bool, auto_flash: bool
) -> None:
    arguments.warn_of_unknown(kwargs, known)
    arguments.correct_langchain(kwargs, info.architecture)
    arguments.check(kwargs, on_cards=on_cards, auto_flash=auto_flash)
    fit_threads(kwargs)
    n_gpu_layers = kwargs.get("n_gpu_layers", 0)
    if n_gpu_layers != 0 and not on_cards:
        broken = (_capi.cuda.error, _capi.cuda.fix)
        arguments.warn_without_cards(n_gpu_layers, gpu_backends(), broken)


def _fit(planned: Plan, options: Options, kwargs: dict[str, Any]) -> tuple[Plan, dict[str, int]]:
    """Fit trees and batches to each other: where the caller asked for trees, batches are raised."""
    asked_for = options.tree_budget is not None or options.speculation != "auto"
    if not asked_for:
        planned = fitted(planned, min(kwargs.get(name) or 512 for name in ("n_batch", "n_ubatch")))
    needed = needed_batch(options.draft_tokens, planned.tree_budget)
    if 0 < kwargs.get("n_ctx", 512) < needed:
        kwargs["n_ctx"] = _LEAST_CONTEXT  # as llama.cpp rounds it; upstream cuts batches to it as given
    return planned, arguments.raise_batch(kwargs, needed)
