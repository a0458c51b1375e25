"""Draft trees as Python sees them: plain lists.

Contract: dw_tree in src/include/draftwood.h. Knows no engine, no text. Test: tests/unit/test_tree.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.engine import _capi
from draftwood.errors import OptionError


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
