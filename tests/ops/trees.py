"""Draft trees as src/ops/tree-delta-net takes them: parent lists in BFS order, the `tree` array of a batch.

Must not know: what any op does with them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np


def every_tree(n: int) -> Iterator[list[int]]:
    """Yield all parent lists in BFS order of n nodes."""
    for rest in itertools.product(*(range(i) for i in range(1, n))):
        if list(rest) == sorted(rest):
            yield [-1, *rest]


def random_tree(rng: np.random.Generator, n: int) -> list[int]:
    """Return a parent list of n nodes in BFS order, anything from a chain to a fan."""
    width = rng.uniform(0.1, 2)
    parents = [-1]
    for i in range(1, n):
        parents.append(min(i - 1, max(0, parents[-1]) + int(rng.poisson(1 / width))))
    return parents


def padded(parents: Sequence[int], n: int) -> list[int]:
    """Return the tree with copies of its last node up to n nodes; of a root alone these are roots, too."""
    return [*parents, *[parents[-1]] * (n - len(parents))]


def path_to(parents: Sequence[int], i: int) -> list[int]:
    """Return the nodes from the root to node i."""
    path = []
    while i >= 0:
        path.append(i)
        i = parents[i]
    return path[::-1]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return steps from the root, by node."""
    return [len(path_to(parents, i)) - 1 for i in range(len(parents))]


def preorder_of(parents: Sequence[int]) -> list[int]:
    """Return the nodes, each followed by its descendants."""

    def below(node: int) -> list[int]:
        return [i for child, of in enumerate(parents) if of == node for i in (child, *below(child))]

    return below(-1)


def heavy_last(parents: Sequence[int]) -> list[int]:
    """Return a preorder in which of a node's children the one with the most descendants comes last.

    So does the engine: a walk then keeps few nodes' states at once.
    """
    sizes = [sum(i in path_to(parents, j) for j in range(len(parents))) for i in range(len(parents))]

    def below(node: int) -> list[int]:
        children = sorted((i for i, of in enumerate(parents) if of == node), key=lambda i: sizes[i])
        return [i for child in children for i in (child, *below(child))]

    return below(-1)


def batch(
    trees: Sequence[Sequence[int]],
    room: int,
    cells: Sequence[int] = (),
    order: Callable[[Sequence[int]], list[int]] = preorder_of,
) -> np.ndarray:
    """Return `tree` i32[4, room] of trees one after another: parents, depths, preorder and cells by row.

    Without cells these are numbers that no op may use; nor may it use what stands behind the last row.
    """
    out = np.full((4, room), 1 << 30, np.int32)
    row = 0
    for parents in trees:
        rows = slice(row, row + len(parents))
        out[0, rows] = [row + i if i >= 0 else -1 for i in parents]
        out[1, rows] = depths_of(parents)
        out[2, rows] = [row + i for i in order(parents)]
        row += len(parents)
    out[3, : len(cells)] = cells
    return out
