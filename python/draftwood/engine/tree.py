"""Draft trees as Python sees them: plain lists, and how the engine makes them out of candidates.

Contract: dw_tree in src/include/draftwood.h. Knows no engine, no text. Test: tests/unit/test_tree.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.status import check
from draftwood.errors import OptionError

_lib = _capi.lib


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft tokens and what they follow: node 0 is the newest token of the text, parents[i] < i."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    log_probs: tuple[float, ...] = ()
    """Of the path to each node, as the drafter sees it; all 0.0 where it gave none."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root, by node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return tuple(depths)

    def children(self, node: int) -> list[int]:
        """Return the nodes that follow `node`."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes, root first, of the longest path that `tokens` begins with."""
        path = [0]
        for token in tokens:
            following = [i for i in self.children(path[-1]) if self.tokens[i] == token]
            if not following:
                break
            path.append(following[0])
        return path

    def to_native(self) -> Any:
        """Return it as a dw_tree; too many nodes are left to the library to refuse.

        Errors: OptionError for tokens or parents that no int32 holds, or lists of unequal length.
        """
        if len(self.parents) != len(self.tokens):
            raise OptionError(
                f"found {len(self.tokens)} tokens, {len(self.parents)} parents; expected as many",
                hint="each node has one parent, the root -1",
            )
        if not all(-(1 << 31) <= value < 1 << 31 for value in (*self.tokens, *self.parents)):
            raise OptionError(
                "found a token or parent beyond 32 bits in a tree; expected token ids and nodes",
                hint="parents are numbers of earlier nodes, the root's is -1",
            )
        raw = native_tree()
        raw.n = len(self.tokens)  # refused by the library where it is too many
        n = min(raw.n, _capi.MAX_TREE)
        raw.tokens[:n] = self.tokens[:n]
        raw.parents[:n] = self.parents[:n]
        raw.log_probs[: len(self.log_probs[:n])] = self.log_probs[:n]
        return raw

    @classmethod
    def from_native(cls, raw: Any) -> Tree:
        """Convert a dw_tree."""
        return cls(tuple(raw.tokens[: raw.n]), tuple(raw.parents[: raw.n]), tuple(raw.log_probs[: raw.n]))


def native_tree() -> Any:
    """Return an empty dw_tree."""
    raw = _capi.Tree()
    raw.struct_size = ctypes.sizeof(raw)
    return raw


def from_positions(
    root: int,
    positions: Sequence[Sequence[tuple[int, float]]],
    budget: int,
    *,
    spine: int = 0,
    beside: float = 0.0,
) -> Tree:
    """Return the most probable tree of at most `budget` nodes.

    Its candidates are (token, log-probability) by depth, best first, whatever comes before them. The first
    `spine` nodes of the path of all bests are kept; under nodes beside it `beside` is added to each step.
    Errors: OptionError for a budget out of range or positions of unequal length.
    """
    n_each = len(positions[0]) if positions else 0
    for position in positions:
        if len(position) != n_each:
            raise OptionError(
                f"found positions of {n_each} and {len(position)} candidates; expected {n_each}",
                hint="cut all positions to the shortest",
            )
    flat = [pair for position in positions for pair in position]
    tokens = (ctypes.c_int32 * len(flat))(*(token for token, _ in flat))
    log_probs = (ctypes.c_float * len(flat))(*(log_prob for _, log_prob in flat))
    raw = native_tree()
    check(
        _lib.dw_tree_from_positions(
            root, tokens, log_probs, len(positions), n_each, budget, spine, beside, ctypes.byref(raw)
        )
    )
    return Tree.from_native(raw)


def merge(tree: Tree, other: Tree) -> Tree:
    """Return all nodes of both, what both have folded. Errors: OptionError where the roots differ."""
    raw = tree.to_native()
    check(_lib.dw_tree_merge(ctypes.byref(raw), ctypes.byref(other.to_native())))
    return Tree.from_native(raw)


def select(tree: Tree, budget: int, *, spine: int = 0) -> Tree:
    """Return the `budget` most probable nodes, `spine` of the most probable path in any case, by depth."""
    raw = native_tree()
    check(_lib.dw_tree_select(ctypes.byref(tree.to_native()), budget, spine, ctypes.byref(raw)))
    return Tree.from_native(raw)


def bucket(n_nodes: int) -> int:
    """Return how many rows a tree of n_nodes is verified in."""
    return int(_lib.dw_tree_bucket(n_nodes))
