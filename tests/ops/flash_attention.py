"""A node of dw_flash_attention: rows over caches of keys and values, and its result in float64."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.ops import ggml_graph as ggml
from tests.ops.hadamard import transformed
from tests.ops.layer_part import SETTINGS_AT, Array, Operand, Settings, as_float64, stored_weights
from tests.ops.trees import batch, path_to

SPARE_ROWS = 5  # of a tree tensor, behind the batch


@dataclass
class Attention:
    """Rows of a batch in n_streams streams. Heads of a row, and of a cell, lie side by side."""

    q: Array
    """f32[n_streams, n, H, S]."""
    k: Array
    """[n_streams, n_cells, Hk, S] of `kind`, as it is stored; v likewise."""
    v: Array
    mask: Array
    """f16[n_streams, n, n_cells]."""
    tree: Array | None = None
    scale: float = 0.1
    kind: str = "F16"
    """Of keys and values: F16 or Q8_0."""
    hadamard: int = 0
    """Values of the result that are transformed together; 0: none."""

    @property
    def operands(self) -> list[Operand]:
        """Return those of both ops; heads and cells as they are stored."""
        kinds = [(self.q, "F32"), (self.k, self.kind), (self.v, self.kind), (self.mask[:, None], "F16")]
        return [*kinds, *([] if self.tree is None else [(self.tree, "I32")])]

    def op(self) -> Callable[..., Any]:
        """Return op(context, *sources) for ggml_graph.run."""
        make = ggml.custom("dw_flash_attention", self.q.shape)

        def made(context: Any, q: Any, k: Any, v: Any, *others: Any) -> Any:
            return self._set(make(context, *self._by_head(context, q, k, v), *others))

        return made

    def _set(self, node: Any) -> Any:
        settings = Settings(0.0, 0, 0, 0, self.hadamard, (0, 0, 0, 0), 0.0, self.scale)
        ctypes.memmove(node + SETTINGS_AT, ctypes.byref(settings), ctypes.sizeof(settings))
        return node

    def stock_op(self) -> Callable[..., Any]:
        """Return ggml's own, which takes no tree."""

        def made(context: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
            heads = self._by_head(context, q, k, v)
            return ggml.base.ggml_flash_attn_ext(context, *heads, mask, self.scale, 0.0, 0.0)

        return made

    def _by_head(self, context: Any, q: Any, k: Any, v: Any) -> list[Any]:
        n_streams, n, n_heads, size = self.q.shape
        n_cells, n_keys = self.k.shape[1:3]
        strides = (self.k[0].nbytes, self.k[0, 0, 0].nbytes, self.k[0, 0].nbytes)
        return [
            ggml.view(
                context, q, (n_streams, n_heads, n, size), (self.q[0].nbytes, size * 4, self.q[0, 0].nbytes)
            ),
            *(ggml.view(context, t, (n_streams, n_keys, n_cells, size), strides) for t in (k, v)),
        ]

    def run_ahead(self, gate: Array | None, backend: str = "CPU") -> Array:
        """Compute it with what the output's product reads behind the sums; return what dst holds.

        gate: f32[rows, H, 2 S], of which the first S of each head count, or None.
        """
        n_streams, n, n_heads, size = self.q.shape
        width = n_heads * size
        shape = (
            n_streams * n * (width + (width + 32) // 4 + 2 * (width // 32 + 2)),
        )  # n_gated of layer-parts.h
        make = ggml.custom("dw_flash_attention", shape)

        def made(context: Any, q: Any, k: Any, v: Any, mask: Any, *others: Any) -> Any:
            left = list(others)
            tree = [] if self.tree is None else [left.pop(0)]
            for gates in left:
                strides = (gate[0].nbytes, gate[0, 0].nbytes)
                tree = [*(tree or [None]), ggml.view(context, gates, (n_streams * n, n_heads, size), strides)]
            return self._set(make(context, *self._by_head(context, q, k, v), mask, *tree))

        operands = [*self.operands, *([] if gate is None else [(gate, "F32")])]
        return ggml.run(made, operands, shape, backend=backend, n_threads=2)

    def run(self, backend: str = "CPU", *, stock: bool = False) -> Array:
        """Compute it; return f32[n_streams, n, H, S]."""
        op = self.stock_op() if stock else self.op()
        return ggml.run(op, self.operands, self.q.shape, backend=backend, n_threads=2)

    def wanted(self) -> Array:
        """Return it in float64."""
        group = self.q.shape[2] // self.k.shape[2]
        k, v = (np.repeat(as_float64(x, self.kind), group, axis=2) for x in (self.k, self.v))
        scores = np.einsum("srhd,schd->srhc", self.q.astype(np.float64), k) * self.scale
        scores += self.mask[:, :, None].astype(np.float64)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        sums = np.einsum("srhc,schd->srhd", weights / weights.sum(-1, keepdims=True), v)
        return transformed(sums, self.hadamard)

    def of_rows(self, rows: Sequence[int]) -> Attention:
        """Return some of the rows of each stream, without a tree."""
        at = list(rows)
        return replace(self, q=self.q[:, at].copy(), mask=self.mask[:, at].copy(), tree=None)

    def in_another_cache(self, rng: np.random.Generator) -> Attention:
        """Return the rows over a cache of another size, with infinities and NaN where no row looks."""
        seen = (self.mask == 0).any((0, 1))
        n = int(np.flatnonzero(seen).max()) + 1
        n_cells = n + int(rng.choice([0, 1, 70, 300, 1500]))
        mask = np.full((*self.mask.shape[:2], n_cells), -np.inf, np.float16)
        mask[..., :n] = self.mask[..., :n]
        caches = []
        for x in (self.k, self.v):
            shape = (len(x), n_cells, *x.shape[2:])
            cache = rng.choice([-np.inf, np.inf, np.nan], shape).astype(np.float16)
            if self.kind == "Q8_0":
                cache = rng.integers(0, 256, shape, np.uint8)
                scales = rng.choice(
                    np.array([-np.inf, np.inf, np.nan], np.float16), (*shape[:3], shape[3] // 34)
                )
                cache.reshape(*shape[:3], -1, 34)[..., :2] = scales[..., None].view(np.uint8)
            cache[:, :n][:, seen[:n]] = x[:, :n][:, seen[:n]]
            caches.append(cache)
        return replace(self, k=caches[0], v=caches[1], mask=mask)


def chain(
    rng: np.random.Generator,
    n: int,
    n_cells: int,
    *,
    size: int = 64,
    n_heads: int = 4,
    n_keys: int = 2,
    n_streams: int = 1,
    kind: str = "F16",
    hadamard: int = 0,
) -> Attention:
    """Return rows at the end of a cache, each of which sees those before it; some cells nobody sees."""
    q = rng.standard_normal((n_streams, n, n_heads, size)).astype(np.float32)
    k, v = (_cache(rng, (n_streams, n_cells, n_keys, size), kind) for _ in range(2))
    mask = np.full((n_streams, n, n_cells), -np.inf, np.float16)
    for s in range(n_streams):
        first = n_cells - n - int(rng.integers(0, 3)) if n_cells > n + 3 else n_cells - n
        holes = rng.random(n_cells) < 0.1
        for r in range(n):
            mask[s, r, : first + r + 1] = np.where(holes[: first + r + 1], -np.inf, 0)
            mask[s, r, first : first + r + 1] = 0
    return Attention(q, k, v, mask, scale=1 / math.sqrt(size), kind=kind, hadamard=hadamard)


def _cache(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Array:
    """Return keys or values of about 1."""
    if kind == "F16":
        return rng.standard_normal(shape).astype(np.float16)
    stored, _ = stored_weights(rng, shape, kind)
    scales = stored.reshape(-1, 34)[:, :2]
    scales[:] = (scales.copy().view(np.float16) * np.float16(10)).view(np.uint8)
    return stored


def tree(
    rng: np.random.Generator,
    trees: list[list[int]],
    n_cells: int,
    *,
    one_stream: bool = False,
    **shape: Any,
) -> Attention:
    """Return the nodes of trees over a common beginning: each in a stream of its own, or all in one."""
    n_each = len(trees[0])
    n, n_streams = (n_each * len(trees), 1) if one_stream else (n_each, len(trees))
    made = chain(rng, n, n_cells, n_streams=n_streams, **shape)
    first = n_cells - n - int(rng.integers(0, 3)) if n_cells > n + 3 else n_cells - n
    made.mask[:] = -np.inf
    cells = []
    for i, parents in enumerate(trees):
        stream, offset = (0, i * n_each) if one_stream else (i, 0)
        seen = np.where(rng.random(first) < 0.1, -np.inf, 0)
        cells += [first + offset + node for node in range(n_each)]
        for node in range(n_each):
            row = made.mask[stream, offset + node]
            row[:first] = seen
            row[[first + offset + j for j in path_to(parents, node)]] = 0
    packed = batch(trees, len(cells) + SPARE_ROWS)
    packed[3, : len(cells)] = cells
    return replace(made, tree=packed)


def as_decoded(
    case: Attention, trees: list[list[int]], i: int, node: int, *, one_stream: bool = False
) -> Attention:
    """Return the row of a node of tree i alone, its path where plain decoding would have put it."""
    assert case.tree is not None
    n_each = len(trees[0])
    stream, offset = (0, i * n_each) if one_stream else (i, 0)
    cells = case.tree[3, i * n_each : (i + 1) * n_each]
    path = path_to(trees[i], node)
    places = cells[path[0] :]  # a copy of the root is a root
    k, v = (x[stream : stream + 1].copy() for x in (case.k, case.v))
    mask = case.mask[stream : stream + 1, offset + node : offset + node + 1].copy()
    mask[..., cells] = -np.inf
    for place, at in enumerate(path):
        for moved, x in ((k, case.k), (v, case.v)):
            moved[0, places[place]] = x[stream, cells[at]]
        mask[..., places[place]] = 0
    q = case.q[stream : stream + 1, offset + node : offset + node + 1].copy()
    return replace(case, q=q, k=k, v=v, mask=mask, tree=None)
