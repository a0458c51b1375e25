"""Llamas that draft what they know of the plain text, for every accepted length on any weights.

Must not know: how a text is compared. Tests: tests/model/test_exact.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftwood import Llama
from draftwood.engine.tree import Tree
from same_text import LONGEST

PLAIN_AFTER = 20
"""Plain rounds that follow each tree: what a commit left wrong shows in the tokens behind it."""


class OracleLlama(Llama):
    """A Llama whose drafts come from the known plain text, wrong from a depth that varies per round on."""

    def plan_drafts(self, plain: Sequence[int], n_prompt: int, seed: int) -> None:
        """Set what the next generation will draft: `plain` i32[n] are the tokens after n_prompt."""
        self._plain, self._n_prompt = list(plain), n_prompt
        self._dice = random.Random(seed)

    def _start_round(self, last: int) -> None:
        assert self._engine is not None
        done = self.n_tokens - self._n_prompt + 1  # tokens of the plain text emitted so far
        draft = self._plain[done : done + self._dice.randint(1, LONGEST)]
        wrong = self._dice.randint(0, len(draft)) if draft else 0
        if wrong < len(draft):
            draft[wrong:] = [(token + 1) % self._n_vocab for token in draft[wrong:]]
        self._engine.trim(self.n_tokens)
        self._engine.propose_given(last, draft)
        self._engine.verify()


@dataclass(frozen=True, slots=True)
class Round:
    """A round as the engine counted it."""

    is_tree: bool
    """Whether a tree was given, be it of one node."""
    nodes: int
    accepted: int


class TreeOracleLlama(Llama):
    """A Llama given random trees of which one path of a wanted length is right, and plain rounds between."""

    def plan_trees(
        self, plain: Sequence[int], n_prompt: int, lengths: Sequence[int], budget: int, seed: int
    ) -> None:
        """Set what the next generation will draft.

        `plain` i32[n] are the tokens after n_prompt; each of `lengths` is a tree of `budget` nodes in which
        so many tokens are right, and PLAIN_AFTER plain rounds.
        """
        self._plain, self._n_prompt, self._budget = list(plain), n_prompt, budget
        self._lengths: Iterator[int | None] = iter(
            [step for length in lengths for step in (length, *[None] * PLAIN_AFTER)]
        )
        self._dice = random.Random(seed)
        self._before: list[tuple[int, int]] = []  # drafted and accepted before each round
        self._given: list[bool] = []

    def _start_round(self, last: int) -> None:
        engine, length = self._engine, next(self._lengths, None)
        assert engine is not None
        assert engine.trim(self.n_tokens)
        self._before.append(self._counts())
        self._given.append(length is not None)
        if length is None:
            engine.propose_given(last, [])
        else:
            done = self.n_tokens - self._n_prompt + 1
            right = self._plain[done : done + LONGEST + 1]
            engine.propose_tree(random_tree(self._dice, last, right, length, self._budget, self._n_vocab))
        engine.verify()

    def _counts(self) -> tuple[int, int]:
        assert self._engine is not None
        stats = self._engine.stats()
        return stats.drafted, sum(stats.accepted_by_depth)

    def rounds(self) -> list[Round]:
        """Return what the engine counted for each round since plan_trees."""
        ends = [*self._before[1:], self._counts()]
        return [
            Round(is_tree, drafted - drafted_before + 1, accepted - accepted_before)
            for is_tree, (drafted_before, accepted_before), (drafted, accepted) in zip(
                self._given, self._before, ends, strict=True
            )
        ]


def followed(rounds: Sequence[Round], budget: int) -> Counter[int]:
    """Return how many trees of `budget` nodes with PLAIN_AFTER plain rounds behind accepted 0, 1, 2..."""
    lengths: Counter[int] = Counter()
    for i, each in enumerate(rounds):
        behind = rounds[i + 1 : i + 1 + PLAIN_AFTER]
        is_plain = all(not later.is_tree and later.nodes == 1 for later in behind)
        if each.is_tree and each.nodes == budget and len(behind) == PLAIN_AFTER and is_plain:
            lengths[each.accepted] += 1
    return lengths


def random_tree(
    dice: random.Random, last: int, right: Sequence[int], length: int, budget: int, n_vocab: int
) -> Tree:
    """Return a tree of `budget` nodes after `last`, none deeper than LONGEST, with `length` tokens right.

    `right` are the next tokens of the plain text, at least LONGEST. They stand on one path, wrong ones beside
    it and behind it; under a wrong one there may be a right one, which no walk reaches.
    """
    parents, depths = [-1], [0]
    reach = dice.choice((1, 4, budget))  # few places for the next node: deep trees; many: wide ones
    for i in range(1, budget):
        free = [node for node in range(i) if depths[node] < LONGEST][-reach:]
        parent = i - 1 if i <= length else dice.choice(free)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    order = sorted(range(budget), key=lambda node: (depths[node], dice.random()))
    place = {node: i for i, node in enumerate(order)}
    tokens: list[int] = []
    taken: dict[int, set[int]] = {}  # by parent: no two children are alike
    for node in order:
        parent, depth = parents[node], depths[node]
        if node == 0:
            tokens.append(last)
            continue
        used = taken.setdefault(parent, {right[depth - 1]} if parent <= length else set())
        token = right[depth - 1] if node <= length or dice.random() < 0.5 else dice.randrange(n_vocab)
        while node > length and token in used:
            token = dice.randrange(n_vocab)
        used.add(token)
        tokens.append(token)
    return Tree(tuple(tokens), tuple(place.get(parents[node], -1) for node in order))
