"""Our two sides of a case in one process: plain decode and the candidate, on one copy of the weights.

Both are the `Llama` that users get, and text comes out of its `generate`. In the candidate's engine `next` is
`next_scheduled`, which samples as ever and then keeps as many drafts as the schedule says.
Must not know: llama-server, files of results, time limits. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from draftwood.engine import Engine, probe_model
from draftwood.tree import Tree

from bench.gpu.cases import SAMPLING, Case
from bench.gpu.files import reads
from bench.gpu.memory import of_snapshots, of_trees
from bench.gpu.schedule import accepted
from bench.gpu.work import BenchError

_SIBLING = -9.0  # log-probability of what stands beside a given tree's spine


@contextlib.contextmanager
def shared_weights(path: str) -> Iterator[None]:
    """Let every `Llama` made inside use one copy of the weights in `path`, its MTP block included."""
    from draftwood._llama_cpp import _internals

    original, loaded = _internals.LlamaModel, []

    def load(*, params: Any, **given: Any) -> Any:
        if not loaded:
            params.load_mtp = probe_model(path).can_draft_mtp
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
        return {**own, "speculation": "auto", "tree_budget": case.nodes if case.shape == "tree" else 1}
    if case.shape == "tree":
        return {**own, "speculation": "tree", "tree_budget": case.nodes}
    return {**own, "speculation": case.drafter}


def given_tree(case: Case, last: int, draw: random.Random, n_vocab: int) -> Tree:
    """Return a tree of random tokens: a path of case.drafts, what is left beside its first nodes."""
    depths = sorted(
        [*range(1, case.drafts + 1), *(1 + i % case.drafts for i in range(case.nodes - 1 - case.drafts))]
    )
    parents, log_probs, spine = [-1], [0.0], 0
    for depth in depths:
        new = len(parents)
        on_spine = depth not in depths[: new - 1]
        if on_spine:
            above, spine = spine, new
        parents.append(above)
        log_probs.append(-0.1 * depth if on_spine else -0.1 * depth + _SIBLING)
    return Tree((last, *(draw.randrange(n_vocab) for _ in depths)), tuple(parents), tuple(log_probs))


def is_chain(tree: Tree) -> bool:
    """Tell whether each node follows the one before it."""
    return all(parent == i - 1 for i, parent in enumerate(tree.parents))


@dataclass(slots=True)
class Apart:
    """Rounds whose parts were waited for one by one: seconds of drafts and forward passes, and the trees."""

    draft: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)


class Side:
    """A `Llama` that generates, its engine's calls watched: what accepts drafts, where time goes."""

    def __init__(self, llm: Any, case: Case, *, scheduled: bool) -> None:
        from draftwood._llama_cpp import llama_cpp as native

        self.llm, self.case = llm, case
        self.engine: Engine = llm._engine
        self._scheduled = scheduled
        self._n_vocab = llm.n_vocab()
        self._draw = random.Random(case.seed)
        self._text: Generator[int, Any, None] | None = None
        self._synchronize = lambda: native.llama_synchronize(llm._ctx.ctx)
        self._accepts: Sequence[int] = ()
        self._round = self._emitted = 0
        self._apart: Apart | None = None
        self._seconds: dict[str, float] = {}
        for name, call in (("propose", self._proposed), ("verify", self._verified), ("next", self._sampled)):
            self._watch(name, call)

    def start(self) -> None:
        """Evaluate the prompt from nothing and sample the first token."""
        if self._text is not None:
            self._text.close()
        self.llm.reset()
        self._draw.seed(self.case.seed)
        self._accepts, self._round = (), -1
        self._text = self.llm.generate(self.case.prompt_of(self._n_vocab), **SAMPLING[self.case.sampler])
        next(self._text)

    def rounds(self, accepts: Sequence[int], apart: Apart | None = None) -> dict[str, Any]:
        """Generate a round for each of `accepts`; return seconds, tokens, and seconds by call of the engine.

        The last commit is waited for. With `apart` each part of a round is, and the parts are kept there.
        """
        assert self._text is not None
        self._accepts, self._round, self._apart, tokens = accepts, -1, apart, 0
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        begin = perf_counter()
        while self._round < len(accepts) - 1 or self.engine.row() is not None:
            next(self._text)
            tokens += 1
        self.engine.commit()
        self._synchronize()
        seconds = perf_counter() - begin
        return {"seconds": seconds, "tokens": tokens, "rounds": len(accepts), "phases": dict(self._seconds)}

    def _watch(self, name: str, call: Callable[..., Any]) -> None:
        """Put `call` in place of the engine's own, its seconds added up."""
        self._seconds[name] = 0.0

        def timed(*arguments: Any) -> Any:
            begin = perf_counter()
            result = call(*arguments)
            self._seconds[name] += perf_counter() - begin
            return result

        setattr(self.engine, name, timed)

    def _proposed(self, last: int) -> int:
        self._round, self._emitted = self._round + 1, 0
        if self._apart is None:
            return self._drafted(last)
        self._synchronize()  # the commit before
        begin = perf_counter()
        n = self._drafted(last)
        self._apart.trees.append(self.engine.tree())  # which waits for a draft that stays on its device
        self._apart.draft.append(perf_counter() - begin)
        return n

    def _drafted(self, last: int) -> int:
        if not self._scheduled or self.case.drafter != "given":
            return Engine.propose(self.engine, last)
        n = self.case.drafts
        if self.case.shape == "tree":
            self.engine.propose_tree(given_tree(self.case, last, self._draw, self._n_vocab))
        else:
            self.engine.propose_given(last, [self._draw.randrange(self._n_vocab) for _ in range(n)])
        return n

    def _verified(self) -> None:
        if self._apart is None:
            Engine.verify(self.engine)
            return
        begin = perf_counter()
        Engine.verify(self.engine)
        self._synchronize()
        self._apart.forward.append(perf_counter() - begin)

    def _sampled(self, sampler: Any) -> int:
        if not self._scheduled or self._round < 0:  # -1: after the prompt
            return Engine.next(self.engine, sampler)
        self._emitted += 1
        return Engine.next_scheduled(self.engine, sampler, accept=self._emitted <= self._accepts[self._round])


class Ours:
    """What a worker does for one case after the other; one model."""

    def __init__(self, model: str, drafter: str | None) -> None:
        self._model, self._drafter = model, drafter
        self._open: contextlib.ExitStack | None = None

    def machine(self) -> dict[str, Any]:
        """Return facts.machine of this process."""
        from draftwood.bench import facts
        from draftwood.engine import build_info

        return facts.machine(build_info())

    def open(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Load both sides of a case, run what graphs need to be captured, and return what they are."""
        case = self._case = Case(**fields)
        self.close()
        stack = contextlib.ExitStack()
        try:
            self._plain = Side(self._llama(stack, case, {"speculation": "off"}), case, scheduled=False)
            drafts = case.drafter != "none"
            own = self._llama(stack, case, settings(case, self._drafter)) if drafts else self._plain.llm
            self._candidate = Side(own, case, scheduled=True) if drafts else self._plain
            self._open = stack
            self._plain.start()
            self._plain.rounds([0] * case.warm)
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
            "tree_bytes": engine.tree_bytes,
            "recurrent_snapshots": own._plan.n_rs_seq,
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
        side.start()
        side.rounds([0] * self._case.warm)
        start()
        side.rounds(
            accepted(self._case.schedule, n_rounds, self._case.seed) if phase == "round" else [0] * n_rounds
        )
        stop()

    def memory(self, fields: dict[str, Any], nodes: Sequence[int]) -> dict[str, Any]:
        """Return what trees of these sizes take, and as many snapshots of llama.cpp's (memory.py)."""
        self.close()
        case, found = Case(**fields), {}
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

    def _parts(self, apart: Apart) -> None:
        case, side = self._case, self._candidate
        side.start()
        side.rounds([0] * case.warm)
        side.rounds(accepted(case.schedule, case.rounds, case.seed)[: case.part_rounds], apart)

    def _segment(self, side: Side, accepts: Sequence[int]) -> dict[str, Any]:
        side.start()
        side.rounds([0] * self._case.warm)
        side.engine.stats_reset()
        return {**side.rounds(accepts), "stats": side.engine.stats().to_dict()}

    def _llama(self, stack: contextlib.ExitStack, case: Case, own: dict[str, Any]) -> Any:
        llm = self._made(case, {"n_ctx": case.n_ctx, **own})
        stack.callback(llm.close)
        return llm

    def _made(self, case: Case, own: dict[str, Any]) -> Any:
        from draftwood import Llama

        threads = {"n_threads": case.threads, "n_threads_batch": case.threads} if case.threads else {}
        common = {"n_gpu_layers": case.n_gpu_layers, "flash_attn": True, "verbose": False, "seed": case.seed}
        return Llama(self._model, **common, **threads, **own)
