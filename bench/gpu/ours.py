"""Our two sides of a case in one process: plain decode and the candidate, on one copy of the weights.

Must not know: llama-server, files of results, time limits. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftwood.engine.engine import probe_model

from bench.gpu.cases import Case
from bench.gpu.files import reads
from bench.gpu.memory import of_snapshots, of_trees
from bench.gpu.schedule import accepted
from bench.gpu.side import Apart, Side, is_chain
from bench.gpu.work import BenchError


@contextlib.contextmanager
def shared_weights() -> Iterator[None]:
    """Let every `Llama` made inside use the weights that the first one loads."""
    from draftwood._llama_cpp import _internals

    original = _internals.LlamaModel
    loaded: list[Any] = []  # the model, and its close()

    def load(*, params: Any, **given: Any) -> Any:
        if not loaded:
            loaded.append(original(params=params, **given))
            loaded.append(loaded[0].close)
            loaded[0].close = lambda: None  # the first Llama that goes would take the others' weights
        return loaded[0]

    _internals.LlamaModel = load
    try:
        yield
    finally:
        _internals.LlamaModel = original
        if loaded:
            loaded[1]()


def settings(case: Case, drafter: str | None) -> dict[str, Any]:
    """Return the arguments of `Llama` for the case's candidate. Errors: BenchError without its drafter."""
    if case.drafter == "none":
        return {"speculation": "off"}
    if case.drafter == "dflash" and drafter is None:
        raise BenchError(f"{case.name}: found no DFlash drafter for {case.model}", hint="bench/run.py models")
    if case.drafter == "given":
        # n-grams are never asked: drafts come from here
        tree = {"tree_budget": case.nodes} if case.shape == "tree" else {}
        return {"speculation": "ngram", "draft_tokens": case.drafts, **tree}
    own: dict[str, Any] = {"draft_tokens": case.drafts}
    if case.drafter == "dflash":
        own["drafter"] = drafter
    if case.auto:
        return {**own, "speculation": "auto", "tree_budget": case.nodes}
    if case.shape == "tree":
        return {**own, "speculation": "tree", "tree_budget": case.nodes}
    return {**own, "speculation": case.drafter}


class Ours:
    """What a worker does for one case after the other; one model."""

    def __init__(self, model: str, drafter: str | None) -> None:
        self._model, self._drafter = model, drafter
        self._open: contextlib.ExitStack | None = None
        self._on_card: bool | None = None  # where token embeddings are; None: nothing was loaded

    def open(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Load both sides of a case, run what graphs need to be captured, and return what they are."""
        case = self._case = Case(**fields)
        self.close()
        self._load(case)
        stack = contextlib.ExitStack()
        try:
            self._plain = Side(self._llama(stack, case, {"speculation": "off"}), case, scheduled=False)
            drafts = case.drafter != "none"
            own = self._llama(stack, case, settings(case, self._drafter)) if drafts else self._plain.llm
            self._candidate = Side(own, case, scheduled=True) if drafts else self._plain
            self._open = stack
            self._plain.start()
            self._plain.rounds([0] * max(case.warm, 4 * case.nodes))
            self._candidate.pieces_of = list(self._plain.text)
            apart = Apart()
            self._parts(apart)
        except BaseException:
            stack.close()
            raise
        engine = self._candidate.engine
        return {
            "n_ctx": own.n_ctx(),
            "n_vocab": own.n_vocab(),
            "speculation": own.speculation,
            "draft_tokens": engine.draft_tokens if drafts else 0,
            "tree_refusal": own.tree_refusal,
            "tree_bytes": engine.stats().tree_bytes,
            "recurrent_snapshots": own._plan.n_rs_seq,
            "embeddings_on_card": self._on_card,
            "chains": sum(map(is_chain, apart.trees)) / len(apart.trees),
            "mean_nodes": sum(map(len, apart.trees)) / len(apart.trees),
        }

    def plain(self, _: int) -> dict[str, Any]:
        """Time plain decode."""
        return self._segment(self._plain, [0] * self._case.rounds)

    def candidate(self, seed: int) -> dict[str, Any]:
        """Time rounds on the schedule, and return the engine's counters with them."""
        return self._segment(self._candidate, accepted(self._case.schedule, self._case.rounds, seed))

    def parts(self, _: int) -> dict[str, list[float]]:
        """Time drafts and forward passes one by one, of rounds as `candidate` runs them; seconds of each."""
        apart = Apart()
        self._parts(apart)
        return {"draft": apart.draft, "forward": apart.forward}

    def profiled(self, phase: str, n_rounds: int, start: Callable[[], Any], stop: Callable[[], Any]) -> None:
        """Run n_rounds of one side, "plain" or "round", between start() and stop()."""
        side = self._plain if phase == "plain" else self._candidate
        self._warm(side)
        start()
        side.rounds(
            accepted(self._case.schedule, n_rounds, self._case.seed) if phase == "round" else [0] * n_rounds
        )
        stop()

    def memory(self, fields: dict[str, Any], nodes: Sequence[int]) -> dict[str, Any]:
        """Return what trees of these sizes take, and as many snapshots of llama.cpp's (memory.py)."""
        self.close()
        case, found = Case(**fields), {}
        self._load(case)
        counted = reads(Path(self._model))
        for n in nodes:
            trees = of_trees(lambda **own: self._made(case, own), n)
            found[str(n)] = {**trees, **of_snapshots(lambda **own: self._made(case, own), counted, n - 1)}
        return found

    def close(self) -> None:
        """Free both sides; the weights stay."""
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

    def _load(self, case: Case) -> None:
        """Load the weights as a drafting `Llama` places them: all sides share them, plain decode too."""
        if self._on_card is None:
            drafts = probe_model(self._model).can_draft_mtp
            llm = self._made(case, {"n_ctx": 512, "speculation": "mtp" if drafts else "off"})
            self._on_card = llm._tensor_overrides is not None
            llm.close()

    def _parts(self, apart: Apart) -> None:
        case, side = self._case, self._candidate
        self._warm(side)
        side.rounds(accepted(case.schedule, case.rounds, case.seed)[: case.part_rounds], apart)

    def _warm(self, side: Side) -> None:
        """Start a text, with rounds as they will be: "auto" learns from them too."""
        case = self._case
        side.start()
        side.rounds([0] * case.warm if side is self._plain else accepted(case.schedule, case.warm, case.seed))

    def _segment(self, side: Side, accepts: Sequence[int]) -> dict[str, Any]:
        self._warm(side)
        side.engine.stats_reset()
        return {**side.rounds(accepts), "stats": side.engine.stats().to_dict()}

    def _llama(self, stack: contextlib.ExitStack, case: Case, own: dict[str, Any]) -> Any:
        llm = self._made(case, {"n_ctx": case.n_ctx, **own})
        stack.callback(llm.close)
        return llm

    def _made(self, case: Case, own: dict[str, Any]) -> Any:
        from draftwood import Llama

        threads: dict[str, Any] = (
            {"n_threads": case.threads, "n_threads_batch": case.threads} if case.threads else {}
        )
        common: dict[str, Any] = {
            "n_gpu_layers": case.n_gpu_layers,
            "flash_attn": True,
            "verbose": False,
            "seed": case.seed,
        }
        return Llama(self._model, **common, **threads, **own)
