"""A node of src/ops/layer-parts, and the numbers its float64 results are made of. The ops: layer_parts.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from draftwood.cli.fused import PRODUCT_TYPES

from tests.ops import ggml_graph as ggml
from tests.ops.test_quant_rows import HALVES, decoded, random_weights

FLOATS = ("F32", "F16", "BF16")
KINDS = PRODUCT_TYPES  # of layer-settings.h: tests/unit/test_fused.py
BOUNDS = {True: 1e-5, False: 5e-3}
"""Largest relative error in norm, by whether weights are floats. Products with other weights read values of
8 bits. One of them may round to its neighbour, which moves it by 1/127 of its block's largest value. That
value alone is .3 to .6 of the norm of 256 values."""
EPSILON = 1e-6
SETTINGS_AT = 84 + 32  # op_params in struct ggml_tensor at the pin, and dw::layer_parts::settings_at

Operand = tuple[np.ndarray, str]
Array = np.ndarray


class Settings(ctypes.Structure):
    """dw::layer_parts::settings."""

    _fields_ = [
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("n_used", "is_joint", "size", "n_keys")),
        ("planes", ctypes.c_uint8 * 4),
        ("base", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


@dataclass
class Part:
    """A node of one of the ops: its operands, the shape of its result, and what the result is in float64."""

    name: str
    operands: list[Operand]
    shape: tuple[int, ...]
    wanted: Array
    by_row: tuple[int, ...]
    """Operands that have a row each; the others are weights."""
    sizes: tuple[int, ...]
    """Values of a row in each part of the result."""
    n_used: int = 0
    is_joint: bool = False
    size: int = 0
    n_keys: int = 0
    target: tuple[int, int] = (0, 0)
    """The operand that the node writes to, and the one of all states whose part it is; 0, 0: none."""
    wanted_target: Array | None = None
    planes: tuple[int, int] = (0, 0)
    """Of indices: of gate and up, and of down."""
    kind: str = "F32"
    lacks: tuple[int, ...] = ()
    """Optional operands in front of others that the node does not have, in order."""

    def op(self) -> Callable[..., Any]:
        """Return op(context, *sources) for ggml_graph.run."""
        make = ggml.custom(self.name, self.shape, self.kind)

        def made(context: Any, *sources: Any) -> Any:
            all_sources = list(sources)
            for i in self.lacks:
                all_sources.insert(i, None)
            node = make(context, *all_sources)
            settings = Settings(EPSILON, self.n_used, self.is_joint, self.size, self.n_keys, self.planes)
            ctypes.memmove(node + SETTINGS_AT, ctypes.byref(settings), ctypes.sizeof(settings))
            return node

        return made

    def run_and_write(self, backend: str = "CPU") -> tuple[Array, Array]:
        """Compute it; return the result and what was written."""
        with ggml.Graph(self.op(), self.operands, backend=backend, n_threads=2) as graph:
            graph.compute()
            stored = graph.bytes_of(graph.tensors[self.target[0]]).view(np.float32)
            return graph.get(self.shape), stored

    def run(self, backend: str = "CPU") -> Array:
        """Compute it."""
        return ggml.run(self.op(), self.operands, self.shape, backend=backend, n_threads=2)

    def of_rows(self, rows: list[int]) -> Part:
        """Return the node for some of the rows."""
        operands = list(self.operands)
        for i in self.by_row:
            stored, kind = operands[i]
            operands[i] = (stored[rows], kind)
        wanted = self.rows_of(self.wanted)[rows]
        shape: tuple[int, ...] = (len(rows), *self.shape[1:]) if len(self.shape) > 1 else (wanted.size,)
        ends = np.cumsum(self.sizes)[:-1]
        joined = np.concatenate([part.ravel() for part in np.split(wanted, ends, axis=1)])
        return replace(self, operands=operands, shape=shape, wanted=joined.reshape(shape))

    def rows_of(self, result: Array) -> Array:
        """Return a result as [n, values of a row]."""
        n = result.size // sum(self.sizes)
        ends = np.cumsum([n * size for size in self.sizes])[:-1]
        return np.concatenate([part.reshape(n, -1) for part in np.split(result.ravel(), ends)], axis=1)


def stored_weights(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Operand:
    """Return weights of a type, of a tenth or so."""
    if kind in FLOATS:
        return ggml.encode(rng.normal(0, 0.1, shape).astype(np.float32), kind), kind
    stored = random_weights(rng, shape, kind)
    blocks = stored.reshape(-1, ggml.BLOCKS[kind][1])
    factor = np.float16(0.1 / decoded(blocks[:4096], kind).std())
    for at in HALVES.get(kind, [0]):
        scales = blocks[:, at : at + 2].copy().view(np.float16) * factor
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return stored, kind


def as_float64(stored: Array, kind: str) -> Array:
    """Return what weights of a type are."""
    return ggml.decode(stored, kind) if kind in FLOATS else decoded(stored, kind)


def weights(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> tuple[Operand, Array]:
    """Return weights of a type, and as float64."""
    operand = stored_weights(rng, shape, kind)
    return operand, as_float64(*operand)


def seen(x: Array, kind: str) -> Array:
    """Return f32 x as a product with weights of this type takes it: in blocks of 32 values of 8 bits."""
    if kind in FLOATS:
        return x.astype(np.float64)
    blocks = x.astype(np.float32).reshape(-1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    scale = most / np.float32(127)
    ratio = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale > 0)
    rounded = np.sign(ratio) * np.floor(np.abs(ratio) + np.float32(0.5))
    return (rounded * scale.astype(np.float16).astype(np.float64)).reshape(x.shape)


def times(w: Array, kind: str, x: Array) -> Array:
    """Return x [n, K] times weights [rows, K], rounded to f32."""
    return (seen(x, kind) @ w.T).astype(np.float32)


def normalised(x: Array, w: Array) -> Array:
    """Return rms_norm(x) * w as the CPU's f32 has it."""
    mean = (x.astype(np.float64) ** 2).mean(-1, keepdims=True).astype(np.float32)
    return x * (np.float32(1) / np.sqrt(mean + np.float32(EPSILON))) * w


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e^-x)."""
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def f32(rng: np.random.Generator, *shape: int) -> Array:
    """Return random activations."""
    return rng.normal(0, 1, shape).astype(np.float32)
