"""Our two sides of a case in one process: plain decode and the candidate, on one copy of the weights.

Must not know: llama-server, files of results, time limits. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from draftwood.engine.engine import probe_model

from bench.gpu.cases import Case
from bench.gpu.files import reads
from bench.gpu.memory import of_snapshots, of_trees
from bench.gpu.schedule import accepted
from bench.gpu.side import Apart, Side, is_chain
from bench.gpu.work import BenchError

POOLED = ("steps", "hits", "misses", "in_place", "bytes_missed", "guessed", "right")
"""Counters of a pool, of a timed segment."""


class Weights:
    """Models that several `Llama`s use: the first one with a key loads it."""

    def __init__(self) -> None:
        self.key: Any = None
        """Of the `Llama`s made from now on."""
        self._loaded: dict[Any, tuple[Any, Callable[[], None]]] = {}  # the model, and its close()

    def load(self, original: Any, given: dict[str, Any]) -> Any:
        """Return the key's model."""
        if self.key not in self._loaded:
            model = original(**given)
            self._loaded[self.key] = (model, model.close)
            model.close = lambda: None  # the first Llama that goes would take the others' weights
        return self._loaded[self.key][0]

    def free(self, key: Any) -> None:
        """Free a model that no `Llama` uses any more."""
        _, close = self._loaded.pop(key, (None, lambda: None))
        close()

    def close(self) -> None:
        """Free all of them."""
        for key in list(self._loaded):
            self.free(key)


_weights = Weights()


@contextlib.contextmanager
def shared_weights() -> Iterator[None]:
    """Let every `Llama` made inside use the weights that the first one loads."""
    from draftwood._llama_cpp import _internals

    original = _internals.LlamaModel
    _internals.LlamaModel = lambda **given: _weights.load(original, given)
    try:
        yield
    finally:
        _internals.LlamaModel = original
        _weights.close()


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
    own: dict[str, Any] = {"draft_tokens": case.drafts, "draft_vocab": case.draft_vocab or None}
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
        self._pool: Any = None  # of the case that is open, if its experts lie in one

    def open(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Load both sides of a case, run what graphs need to be captured, and return what they are."""
        case = self._case = Case(**fields)
        self.close()
        self._load(case)
        stack = contextlib.ExitStack()
        try:
            pooled = case.experts < 1.0
            if pooled:
                self._resident = Side(self._llama(stack, case, {"speculation": "off"}), case, scheduled=False)
                self._begin_pool(stack, case)
            self._plain = Side(self._llama(stack, case, {"speculation": "off"}), case, scheduled=False)
            drafts = case.drafter != "none"
            own = self._llama(stack, case, settings(case, self._drafter)) if drafts else self._plain.llm
            self._candidate = Side(own, case, scheduled=True) if drafts else self._plain
            if case.waiting:
                with patch.dict("os.environ", DRAFTWOOD_QUEUE_STEPS="0"):
                    llm = self._llama(stack, case, {"speculation": "off"})
                self._waiting = Side(llm, case, scheduled=False)
            self._open = stack
            for side in [
                self._plain,
                *([self._resident] if pooled else []),
                *([self._waiting] if case.waiting else []),
            ]:
                side.start(case.seed)
                side.rounds([0] * max(case.warm, 4 * case.nodes))
            self._candidate.pieces_of = list(self._plain.text)
            apart = Apart()
            self._parts(apart, case.seed)
        except BaseException:
            stack.close()
            raise
        engine = self._candidate.engine
        return {
            "n_ctx": own.n_ctx(),
            "n_vocab": own.n_vocab(),
            "speculation": own.speculation,
            "draft_tokens": engine.draft_tokens if drafts else 0,
            "draft_vocab": engine.stats().draft_vocab,
            "tree_refusal": own.tree_refusal,
            "tree_bytes": engine.stats().tree_bytes,
            "recurrent_snapshots": own._plan.n_rs_seq,
            "embeddings_on_card": self._on_card,
            "chains": sum(map(is_chain, apart.trees)) / len(apart.trees),
            "mean_nodes": sum(map(len, apart.trees)) / len(apart.trees),
        }

    def open_pool(self, case: Case) -> None:
        """Load plain decode over a pool, and no resident side; `change` makes the candidate."""
        self._case = case
        self.close()
        stack = contextlib.ExitStack()
        try:
            self._begin_pool(stack, case)
            self._plain = Side(self._llama(stack, case, {"speculation": "off"}), case, scheduled=False)
        except BaseException:
            stack.close()
            raise
        self._open = stack

    @contextlib.contextmanager
    def change(self, case: Case) -> Iterator[None]:
        """Make a candidate for this case over the pool, which knows nothing of what another one learned."""
        self._case = case
        with contextlib.ExitStack() as stack:
            self._candidate = Side(
                self._llama(stack, case, settings(case, self._drafter)), case, scheduled=True
            )
            yield

    def plain(self, seed: int) -> dict[str, Any]:
        """Time plain decode."""
        return self._segment(self._plain, [0] * self._case.rounds, seed)

    def waiting(self, seed: int) -> dict[str, Any]:
        """Time plain decode whose steps wait for their token."""
        return self._segment(self._waiting, [0] * self._case.rounds, seed)

    def resident(self, seed: int) -> dict[str, Any]:
        """Time plain decode of a model that lies on the card alone."""
        return self._segment(self._resident, [0] * self._case.rounds, seed)

    def candidate(self, seed: int) -> dict[str, Any]:
        """Time rounds on the schedule, and return the engine's counters with them."""
        return self._segment(self._candidate, accepted(self._case.schedule, self._case.rounds, seed), seed)

    def parts(self, seed: int) -> dict[str, list[float]]:
        """Time drafts and forward passes one by one, of rounds as `candidate` runs them; seconds of each."""
        apart = Apart()
        self._parts(apart, seed)
        return {"draft": apart.draft, "forward": apart.forward}

    def profiled(self, phase: str, n_rounds: int, start: Callable[[], Any], stop: Callable[[], Any]) -> None:
        """Run n_rounds of one side, "plain" or "round", between start() and stop()."""
        side = self._plain if phase == "plain" else self._candidate
        self._warm(side, self._case.seed)
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
            llm = self._first(case)
            self._on_card = llm._tensor_overrides is not None
            llm.close()

    def _first(self, case: Case) -> Any:
        drafts = probe_model(self._model).can_draft_mtp
        return self._made(case, {"n_ctx": 512, "speculation": "mtp" if drafts else "off"})

    def _parts(self, apart: Apart, seed: int) -> None:
        case, side = self._case, self._candidate
        self._warm(side, seed)
        side.rounds(accepted(case.schedule, case.rounds, case.seed)[: case.part_rounds], apart)

    def _warm(self, side: Side, seed: int) -> None:
        """Start a text, with rounds as they will be: "auto" learns from them too."""
        case = self._case
        side.start(seed)
        side.rounds(accepted(case.schedule, case.warm, case.seed) if side.scheduled else [0] * case.warm)

    def _segment(self, side: Side, accepts: Sequence[int], seed: int) -> dict[str, Any]:
        self._warm(side, seed)
        side.engine.stats_reset()
        before = self._pool.stats().to_dict() if self._pool else {}
        found = {**side.rounds(accepts), "stats": side.engine.stats().to_dict()}
        if self._pool:
            after = self._pool.stats().to_dict()
            found["experts"] = {name: after[name] - before[name] for name in POOLED}
            found["experts"]["device_bytes"] = after["device_bytes"]
        return found

    def _begin_pool(self, stack: contextlib.ExitStack, case: Case) -> None:
        """Load the weights into a pool, for the `Llama`s made from now on until the stack closes."""
        _weights.key = case.experts
        stack.callback(self._end_pool)
        llm = self._first(case)
        self._pool, llm._pool = llm._pool, None  # it must outlive the weights, which others use
        llm.close()

    def _end_pool(self) -> None:
        _weights.free(_weights.key)
        if self._pool is not None:
            self._pool.close()
        self._pool, _weights.key = None, None

    def _llama(self, stack: contextlib.ExitStack, case: Case, own: dict[str, Any]) -> Any:
        llm = self._made(case, {"n_ctx": case.n_ctx, **own})
        stack.callback(llm.close)
        return llm

    def _made(self, case: Case, own: dict[str, Any]) -> Any:
        from draftwood import Llama
        from draftwood._llama_cpp import llama_cpp as native

        threads: dict[str, Any] = (
            {"n_threads": case.threads, "n_threads_batch": case.threads} if case.threads else {}
        )
        common: dict[str, Any] = {
            "n_gpu_layers": case.n_gpu_layers,
            "flash_attn": True,
            "type_k": getattr(native, f"GGML_TYPE_{case.cache}"),
            "type_v": getattr(native, f"GGML_TYPE_{case.cache}"),
            "verbose": False,
            "seed": case.seed,
        }
        if _weights.key is not None:
            common["expert_vram"] = int(case.experts * probe_model(self._model).expert_bytes)
            common["expert_guess"] = {"on": True, "off": False}.get(case.guess)
        return Llama(self._model, **common, **threads, **own)
