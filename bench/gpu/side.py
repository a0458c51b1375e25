"""One side of a case: a `Llama` that generates as it does for users, and what its engine does meanwhile.

Text comes out of `generate`. In the candidate's engine `next` is `next_scheduled`, which samples as ever and
then keeps as many drafts as the schedule says. Must not know: other sides, weights.
Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree

from bench.gpu.cases import SAMPLING, Case
from bench.testing_api import next_scheduled, replay

REPLAYS = 3
"""Times that a verify is run again by itself: what a forward pass takes without anything around it."""
_SIBLING = -9.0  # log-probability of what stands beside a given tree's spine


def given_tree(case: Case, last: int, tokens: Sequence[int]) -> Tree:
    """Return a tree of `tokens`: a path of case.drafts, what is left beside its first nodes."""
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
    return Tree((last, *tokens[: len(depths)]), tuple(parents), tuple(log_probs))


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
        self.scheduled = scheduled
        self._n_vocab = llm.n_vocab()
        self._draw = random.Random(case.seed)
        self._text: Generator[int, Any, None] | None = None
        self.text: list[int] = []
        """Of the newest `rounds`."""
        self.pieces_of: Sequence[int] = range(self._n_vocab)
        """What given drafts are cut from: the model's own text. Random tokens choose too many experts."""
        self._synchronize: Callable[[], Any] = lambda: native.llama_synchronize(llm._ctx.ctx)
        self._accepts: Sequence[int] = ()
        self._round = self._emitted = 0
        self._apart: Apart | None = None
        self._seconds: dict[str, float] = {}
        for name, call in (("propose", self._proposed), ("verify", self._verified), ("next", self._sampled)):
            self._watch(name, call)

    def start(self, seed: int) -> None:
        """Evaluate the turn's prompt from nothing and sample the first token."""
        if self._text is not None:
            self._text.close()
        self.llm.reset()
        self._draw.seed(self.case.seed)
        self._accepts, self._round = (), -1
        self._text = self.llm.generate(
            self.case.prompt_of(self._n_vocab, seed), **SAMPLING[self.case.sampler]
        )
        next(self._text)

    def rounds(self, accepts: Sequence[int], apart: Apart | None = None) -> dict[str, Any]:
        """Generate a round for each of `accepts`; return seconds, tokens, and seconds by call of the engine.

        The last commit is waited for. With `apart` each part of a round is, and the parts are kept there.
        """
        assert self._text is not None
        self._accepts, self._round, self._apart, self.text = accepts, -1, apart, []
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        begin = perf_counter()
        while self._round < len(accepts) - 1 or self.engine.row() is not None:
            self.text.append(next(self._text))
        self.engine.commit()
        self._synchronize()
        seconds = perf_counter() - begin
        return {
            "seconds": seconds,
            "tokens": len(self.text),
            "rounds": len(accepts),
            "phases": dict(self._seconds),
        }

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
        if not self.scheduled or self.case.drafter != "given":
            return Engine.propose(self.engine, last)
        n = self.case.drafts
        first = self._draw.randrange(len(self.pieces_of) - self.case.nodes)
        tokens = list(self.pieces_of[first : first + self.case.nodes])
        if self.case.shape == "tree":
            self.engine.propose_tree(given_tree(self.case, last, tokens))
        else:
            self.engine.propose_given(last, tokens[:n])
        return n

    def _verified(self) -> None:
        if self._apart is None:
            Engine.verify(self.engine)
            return
        begin = perf_counter()
        Engine.verify(self.engine)
        self._synchronize()
        took = perf_counter() - begin
        alone = len(self._apart.trees[-1]) > 1 and self.case.n_gpu_layers != 0
        self._apart.forward.append(replay(self.engine, REPLAYS) if alone else took)

    def _sampled(self, sampler: Any) -> int:
        if not self.scheduled or self._round < 0:  # -1: after the prompt
            return Engine.next(self.engine, sampler)
        self._emitted += 1
        return next_scheduled(self.engine, sampler, accept=self._emitted <= self._accepts[self._round])
