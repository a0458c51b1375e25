"""Commit ops on several layers: each gets what it gets alone, and nothing between layers changes.

test_tree_ops.py runs it on the CPU, tree_kernels.py on kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.ops import ggml_graph as ggml
from tests.ops.test_tree_attention import random_moves

N_LAYERS = 3
KINDS = {np.dtype(np.float32): "F32", np.dtype(np.uint16): "F16"}


def run_apart(name: str, layers: np.ndarray, others: list[Any], gap: int, backend: str) -> np.ndarray:
    """Run an op in place on layers [L, ...] with `gap` values between them; return all of them, gaps checked.

    The op's other operands are those of all layers.
    """
    n = math.prod(layers.shape[1:])
    apart = np.full((len(layers), n + gap), 7, layers.dtype)
    apart[:, :n] = layers.reshape(len(layers), n)
    steps = [math.prod(layers.shape[i + 1 :]) for i in range(1, layers.ndim - 1)]
    strides = tuple(layers.itemsize * step for step in (n + gap, *steps))

    def op(context: Any, everything: Any, *rest: Any) -> Any:
        there = ggml.view(context, everything, layers.shape, strides)
        return ggml.custom(name)(context, there, *rest)

    operands = [(apart, KINDS[layers.dtype]), *others]
    with ggml.Graph(op, operands, backend=backend, n_threads=2) as graph:
        graph.compute()
        values = graph.bytes_of(graph.tensors[0]).view(layers.dtype)
    found = values.reshape(apart.shape)
    assert (found[:, n:] == 7).all()
    return found[:, :n].reshape(layers.shape)


def each_alone(name: str, layers: np.ndarray, others: list[list[Any]], backend: str) -> np.ndarray:
    """Run the op on each layer with the operands of its own."""
    op = ggml.custom(name)
    kind = KINDS[layers.dtype]
    return np.stack(
        [
            ggml.run(op, [(layer, kind), *own], layer.shape, backend=backend, dtype=layers.dtype.type)
            for layer, own in zip(layers, others, strict=True)
        ]
    )


def compare(name: str, layers: np.ndarray, shared: list[Any], own: list[Any], gap: int, backend: str) -> None:
    """shared: operands of all layers; own: those before them, (array [L, ...], type), a part for each."""
    found = run_apart(name, layers, [*own, *shared], gap, backend)
    parts = [[*((x[i], kind) for x, kind in own), *shared] for i in range(len(layers))]
    assert np.array_equal(found, each_alone(name, layers, parts, backend))
    assert not any(np.array_equal(a, b) for a, b in zip(found, layers, strict=True))


def check_commits_of_layers(rng: np.random.Generator, backend: str) -> None:
    """All four ops; gaps such that layers begin at multiples of 16 bytes, and that they do not."""
    room, n, heads, key_heads, size, channels, kept = 9, 4, 4, 2, 16, 12, 3
    path = np.full(1 + room, 1 << 30, np.int32)
    path[: 1 + n] = [n, *np.sort(rng.permutation(room)[:n])]
    states = rng.standard_normal((N_LAYERS, heads, size, size)).astype(np.float32)
    n_factors = room * (key_heads * size + heads * size + heads)
    factors = rng.standard_normal((N_LAYERS, n_factors)).astype(np.float32)
    factors[:, -room * heads :] = -rng.exponential(0.5, (N_LAYERS, room * heads))
    conv = rng.standard_normal((N_LAYERS, channels, kept)).astype(np.float32)
    x = rng.standard_normal((N_LAYERS, room, channels)).astype(np.float32)
    rows = rng.integers(0, 200, (N_LAYERS, 2, 24, 8)).astype(np.float32)
    columns = rng.integers(0, 60000, (N_LAYERS, 2, 10, 24)).astype(np.uint16)
    moves = random_moves(rng, 48, 9)
    for gap in (0, 1, 8):
        compare("dw_tree_commit_state", states, [(path, "I32")], [(factors, "F32")], gap, backend)
        compare("dw_tree_commit_conv", conv, [(path, "I32")], [(x, "F32")], gap, backend)
        for name, cache in (("rows", rows), ("columns", columns)):
            compare(f"dw_tree_commit_{name}", cache, [(moves, "I32")], [], gap, backend)
