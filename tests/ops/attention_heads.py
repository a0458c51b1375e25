"""A node of dw_attention_heads: its operands, and in float64 its queries and the caches that it writes to."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ops import ggml_graph as ggml
from tests.ops.hadamard import transformed
from tests.ops.layer_part import EPSILON, SETTINGS_AT, Array, Operand, Settings, as_float64, stored_weights

CELLS = 40  # of a cache
_powf = ctypes.CDLL("libm.so.6").powf
_powf.restype, _powf.argtypes = ctypes.c_float, [ctypes.c_float, ctypes.c_float]
SECTIONS = (11, 11, 10, 0)  # Qwen3.5's


@dataclass
class Heads:
    """Rows of a batch. The heads of a row's queries lie apart: between them are gates."""

    q: Array
    """f32[n, H, 2 S], of which the op sees the first S values of each head."""
    operands: list[Operand]
    settings: Settings
    wanted: tuple[Array, Array, Array]
    """Queries [n, H, S], caches of keys and values [CELLS, width]. What no row goes to is as it was."""

    @property
    def kind(self) -> str:
        """Return the type of both caches."""
        return self.operands[6][1]

    def run(self, backend: str = "CPU") -> tuple[Array, Array, Array]:
        """Compute it; return what `wanted` has, caches as they are stored."""
        n, n_heads, width = self.q.shape
        shape = (n, n_heads, width // 2)
        make = ggml.custom("dw_attention_heads", shape)

        def op(context: Any, q: Any, *others: Any) -> Any:
            part = ggml.view(context, q, shape, (self.q[0].nbytes, self.q[0, 0].nbytes))
            node = make(context, part, *others)
            ctypes.memmove(node + SETTINGS_AT, ctypes.byref(self.settings), ctypes.sizeof(Settings))
            return node

        with ggml.Graph(op, [(self.q, "F32"), *self.operands], backend=backend, n_threads=2) as graph:
            graph.compute()
            caches = [
                graph.bytes_of(graph.tensors[i]).view(self.operands[i - 1][0].dtype).reshape(CELLS, -1)
                for i in (7, 9)
            ]
            return graph.get(shape), caches[0], caches[1]

    def of_rows(self, rows: list[int]) -> Heads:
        """Return the node for some of the rows."""
        operands = list(self.operands)
        for i in (1, 3, 5, 7):
            operands[i] = (operands[i][0][rows], operands[i][1])
        positions, kind = operands[4]
        operands[4] = (np.ascontiguousarray(positions.reshape(-1, len(self.q))[:, rows]).ravel(), kind)
        return Heads(self.q[rows], operands, self.settings, self.wanted)


def heads(
    rng: np.random.Generator,
    n: int,
    *,
    size: int = 64,
    n_heads: int = 4,
    n_keys: int = 2,
    n_dims: int = 32,
    sections: tuple[int, int, int, int] = (0, 0, 0, 0),
    kind: str = "F16",
    hadamard: tuple[int, int] = (0, 0),
    base: float = 1e7,
    scale: float = 1.0,
    largest: int = 4096,
) -> Heads:
    """Return a node; kind: of both caches; hadamard: k_hadamard, v_hadamard; largest: of positions."""
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((n, n_heads, 2 * size), (n, n_keys, size), (n, n_keys * size))
    )
    q_norm, k_norm = rng.uniform(0.5, 1.5, (2, size)).astype(np.float32)
    positions = rng.integers(0, largest, (4 if any(sections) else 1, n)).astype(np.int32)
    cells = [rng.permutation(CELLS)[:n].astype(np.int64) for _ in range(2)]
    caches = [stored_weights(rng, (CELLS, n_keys * size), kind)[0] for _ in "kv"]
    angles = _angles(positions, n_dims, base, scale, sections)
    keys, values = (as_float64(cache, kind) for cache in caches)
    keys[cells[0]] = transformed(_turned(k, k_norm, angles), hadamard[0]).reshape(n, -1)
    values[cells[1]] = transformed(v, hadamard[1])
    operands = [
        *((q_norm, "F32"), (k, "F32"), (k_norm, "F32"), (v, "F32"), (positions.ravel(), "I32")),
        *((cells[0], "I64"), (caches[0], kind), (cells[1], "I64"), (caches[1], kind)),
    ]
    settings = Settings(EPSILON, hadamard[0], 0, n_dims, hadamard[1], sections, base, scale)
    queries = transformed(_turned(q[..., :size], q_norm, angles), hadamard[0])
    return Heads(q, operands, settings, (queries, keys, values))


def _angles(
    positions: Array, n_dims: int, base: float, scale: float, sections: tuple[int, int, int, int]
) -> Array:
    """Return the angle [n, n_dims / 2] of each pair."""
    pairs = np.arange(n_dims // 2)
    which = np.zeros(len(pairs), int)
    if any(sections):
        at = pairs % sum(sections)
        which = np.where(at < 3 * np.array(sections)[at % 3], at % 3, 3)
    step = _powf(base, -2.0 / n_dims)  # in float, as ggml's frequencies are
    return positions.T[:, which] * np.array([_powf(step, pair) for pair in pairs], np.float64) * scale


def _turned(x: Array, norm: Array, angles: Array) -> Array:
    """Return heads [n, H, S] normalised and turned."""
    x = x.astype(np.float64)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * norm
    half = angles.shape[-1]
    a, b = x[..., :half].copy(), x[..., half : 2 * half].copy()
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x[..., :half], x[..., half : 2 * half] = a * cosine - b * sine, a * sine + b * cosine
    return x


SHAPES: list[dict[str, Any]] = [
    {},
    {
        "size": 256,
        "n_heads": 16,
        "n_keys": 2,
        "n_dims": 64,
        "sections": SECTIONS,
        "largest": 262144,
        "scale": 0.25,
    },
    {"size": 128, "n_heads": 5, "n_keys": 5, "n_dims": 128, "kind": "F32"},
    {"size": 44, "n_heads": 6, "n_keys": 3, "n_dims": 18, "sections": (3, 3, 3, 0)},
    {"size": 256, "n_heads": 3, "n_keys": 1, "n_dims": 256, "base": 1e4, "sections": (40, 20, 20, 40)},
    {"size": 128, "n_heads": 4, "n_keys": 1, "n_dims": 128, "sections": (1, 0, 0, 0)},
    {"kind": "Q8_0", "hadamard": (64, 64)},
    {"kind": "Q8_0", "hadamard": (256, 64), "size": 256, "n_heads": 4, "n_keys": 2, "sections": SECTIONS},
    {"kind": "Q8_0", "hadamard": (128, 128), "size": 128, "n_heads": 3, "n_keys": 1},
    {"kind": "Q8_0", "hadamard": (32, 0), "size": 96, "n_heads": 2, "n_keys": 1},
    {"kind": "F16", "hadamard": (0, 256), "size": 256, "n_heads": 2, "n_keys": 1},
]


def check(node: Heads, backend: str) -> None:
    """Hold it against float64. On a card powf is ggml-cuda's, whose error grows with positions."""
    found = node.run(backend)
    for cache, at in zip(found[1:], (5, 7), strict=True):  # what no row goes to is as it was
        others = np.setdiff1d(np.arange(CELLS), node.operands[at][0])
        assert np.array_equal(cache[others], node.operands[at + 1][0][others])
    positions = node.settings.scale * node.operands[4][0]
    turned = 2e-6 + (positions.max() * 2**-20 if backend == "CUDA" else 0)
    for name, one, wanted in zip(("queries", "keys", "values"), found, node.wanted, strict=True):
        most = np.abs(wanted).max()
        step = 0.0  # of what is rounded
        if one.dtype == np.uint8:
            one, step = as_float64(one, node.kind), 0.6 * _steps(wanted)
        rounding = step + most * (1e-3 if one.dtype == np.float16 else 0)
        assert (np.abs(one - wanted) <= turned * most + rounding).all(), name


def _steps(x: Array) -> Array:
    """Return by how much neighbours differ in Q8_0. A scale of 11 bits moves the largest by .06 of that."""
    blocks = x.reshape(-1, 32)
    return np.repeat(np.abs(blocks).max(-1) / 127, 32).reshape(x.shape)


def check_rows(rng: np.random.Generator, node: Heads, backend: str) -> None:
    """Each row is the same beside any others, in the caches, too."""
    queries, *caches = node.run(backend)
    for count in (1, 2, 7):
        rows = [int(row) for row in rng.permutation(len(node.q))[:count]]
        some, *written = node.of_rows(rows).run(backend)
        assert np.array_equal(some, queries[rows])
        for cache, whole, at in zip(written, caches, (5, 7), strict=True):
            cells = node.operands[at][0][rows]
            assert np.array_equal(cache[cells], whole[cells])
