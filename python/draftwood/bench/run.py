"""One run of `draftwood bench`: refuses what cannot be measured, loads, measures, and makes the document.

Prints nothing. Imports the library when it runs, so that a usage error needs none.
Tests: tests/unit/test_bench_input.py, tests/model/test_bench.py.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.bench import facts
from draftwood.bench.claims import Claim, Verdict, judge
from draftwood.bench.intervals import LEAST_PAIRS
from draftwood.bench.measure import SAMPLING, SEED, measure, passes
from draftwood.bench.modes import BASELINE, STOCK, choose, limits, load, vocabulary
from draftwood.bench.prompts import Prompt, encode, read
from draftwood.bench.report import Figure, document, faults, figures
from draftwood.engine.engine import probe_model
from draftwood.errors import OptionError
from draftwood.options import DEFAULT_TREE_BUDGET, TREE_DRAFT_TOKENS, needed_batch


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    model: str
    drafter: str | None
    modes: Sequence[str]
    prompts: Sequence[Path]
    per_category: int
    tokens: int
    prompt_tokens: int
    repeats: int
    threads: int
    n_gpu_layers: int
    expert_vram: str | None
    draft_tokens: int | None
    tree_budget: int | None
    temps: Sequence[float]
    claims: Sequence[Claim]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be measured."""

    request: Request
    modes: list[str]
    left_out: dict[str, str]
    """Mode -> why this model does not run it."""
    prompts: list[Prompt]

    @property
    def steps(self) -> int:
        """How many texts will be generated."""
        request = self.request
        return passes(len(self.prompts), len(self.modes), len(request.temps), request.repeats)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to."""

    figures: list[Figure]
    verdicts: list[Verdict]
    faults: list[str]
    document: dict[str, Any]


def prepare(request: Request) -> Prepared:
    """Read the prompts and the model's header and vocabulary.

    Errors: as of `Llama` for the file; OptionError, UnsupportedError for what could not be measured
    or claimed.
    """
    from draftwood.load.devices import without_tree_ops
    from draftwood.load.files import checked_model, need_drafter_file

    texts = read(request.prompts)
    info = checked_model(request.model)
    if request.drafter is not None:
        need_drafter_file(request.drafter)
    modes, left_out = choose(
        request.modes, info, request.drafter, request.n_gpu_layers, without_tree_ops=bool(without_tree_ops())
    )
    check_claims(request.claims, modes, left_out, request.repeats)
    if request.expert_vram is not None and STOCK in modes:
        raise OptionError(
            f"found --expert-vram beside the mode {STOCK}, which has no pool; expected one of them",
            hint=f"leave {STOCK} out of --modes",
        )
    prompts = _prompts(request, texts, f"{info.architecture}.context_length")
    return Prepared(request, modes, left_out, prompts)


def check_claims(
    claims: Sequence[Claim], modes: Sequence[str], left_out: dict[str, str], repeats: int
) -> None:
    """Refuse claims that the run could not show. Errors: OptionError."""
    for claim in claims:
        if claim.mode not in modes or claim.mode == BASELINE:
            why = left_out.get(claim.mode, "it is not among --modes")
            raise OptionError(
                f"--{claim.kind} is about {claim.mode}, which is not measured against {BASELINE}: {why}",
                hint=f"expected one of {', '.join(mode for mode in modes if mode != BASELINE)}",
            )
    if claims and repeats < LEAST_PAIRS:
        raise OptionError(
            f"found {repeats} repeats; --floor, --best and --rivals need at least {LEAST_PAIRS}",
            hint=f"--repeats {LEAST_PAIRS}",
        )


def _prompts(request: Request, texts: dict[str, list[str]], key: str) -> list[Prompt]:
    with vocabulary(request.model) as known:

        def tokenize(text: bytes) -> list[int]:
            ids: list[int] = known.tokenize(
                text, add_bos=True, special=False
            )  # a BOS where the model has one
            return ids

        prompts = encode(texts, tokenize, request.per_category, request.prompt_tokens)
        room = int(known.metadata().get(key, 0))
    longest = max(len(prompt.ids) for prompt in prompts)
    if room and longest + request.tokens > room:
        raise OptionError(
            f"found a prompt of {longest} tokens and {request.tokens} to generate; expected both to fit into "
            f"the {room} tokens that the model was trained for",
            hint="lower --prompt-tokens or --tokens",
        )
    return prompts


def execute(prepared: Prepared, step: Callable[[], None] = lambda: None) -> Outcome:
    """Load a Llama for each mode, measure, judge. `step` is called `prepared.steps` times.

    Errors: what loading and generating raise.
    """
    from draftwood.engine.engine import build_info

    request = prepared.request
    known = {**facts.machine(build_info()), **_settings(prepared)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_times_of_this_run())
        llms: dict[str, Any] = {}
        for mode in prepared.modes:
            llms[mode] = _load(prepared, mode)
            stack.callback(llms[mode].close)
        known.update(limits(llms))
        cells = measure(
            llms, prepared.prompts, request.temps, tokens=request.tokens, repeats=request.repeats, step=step
        )
        pools = {mode: llm.expert_stats.to_dict() for mode, llm in llms.items() if llm.expert_stats}
        if pools:
            known["expert_pools"] = {"expert_vram": request.expert_vram, **pools}
    found = figures(cells)
    verdicts = [judge(claim, found) for claim in request.claims]
    wrong = faults(found, on_cpu=prepared.request.n_gpu_layers == 0)
    return Outcome(found, verdicts, wrong, document(known, prepared.left_out, found, verdicts, wrong))


@contextlib.contextmanager
def _times_of_this_run() -> Iterator[None]:
    """Let "auto" measure for itself: times of an earlier run would decide, and no row shows them."""
    before = os.environ.get("DRAFTWOOD_CURVES")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DRAFTWOOD_CURVES"] = folder
        try:
            yield
        finally:
            del os.environ["DRAFTWOOD_CURVES"]
            if before is not None:
                os.environ["DRAFTWOOD_CURVES"] = before


def _load(prepared: Prepared, mode: str) -> Any:
    request = prepared.request
    longest = max(len(prompt.ids) for prompt in prepared.prompts)
    # a last draft may reach further
    beyond = needed_batch(
        request.draft_tokens or TREE_DRAFT_TOKENS, request.tree_budget or DEFAULT_TREE_BUDGET
    )
    return load(
        mode,
        request.model,
        request.drafter,
        request.tree_budget,
        n_ctx=longest + request.tokens + beyond,
        n_gpu_layers=request.n_gpu_layers,
        expert_vram=request.expert_vram,
        draft_tokens=request.draft_tokens,
        n_threads=request.threads,
        n_threads_batch=request.threads,  # a verify counts as a batch: the same threads for all modes
    )


def _settings(prepared: Prepared) -> dict[str, Any]:
    request, model = prepared.request, Path(prepared.request.model)
    return {
        "model": {"file": model.name, "bytes": probe_model(request.model).file_bytes},
        "drafter": Path(request.drafter).name if request.drafter else None,
        "threads": request.threads,
        "n_gpu_layers": request.n_gpu_layers,
        "tokens": request.tokens,
        "prompt_tokens": request.prompt_tokens,
        "repeats": request.repeats,
        "sampling": {**SAMPLING, "seed": SEED},
        "prompts": Counter(prompt.category for prompt in prepared.prompts),
    }
