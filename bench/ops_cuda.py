"""What our ops take on a device at 35B-A3B shapes, beside the bytes that they must move.

    python bench/ops_cuda.py [--rows 1 2 4 8 16 24 64] [--repeats 15] [--backend CUDA]

A graph holds an op once a layer, each layer with memory of its own, and a commit once for all layers. It is
computed again and again: ggml-cuda replays it as a CUDA graph. One JSON line an op: microseconds a layer
(median of the repeats), and
floor_pct, which part of them its bytes take at the rate of a large copy, measured first. "stock" is ggml's
own delta net, which writes the state, too; commits apply a path as deep as the tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ops import ggml_graph as ggml
from tests.ops.test_top_rows import shape_of
from tests.ops.test_tree_ops import Case
from tests.ops.trees import batch, depths_of, heavy_last

LAYERS, CACHES = 30, 20  # of keys and of values
HEADS, KEY_HEADS, SIZE, CHANNELS, WIDTH = 32, 16, 128, 8192, 4
CELLS, KV_WIDTH, VOCAB = 4096, 512, 248320
LOGITS = 4  # batches of them: a GPU's cache may hold one
TREES = {"chain": lambda i: i - 1, "bushy": lambda i: (i - 1) // 2}
RNG = np.random.default_rng(0)


def seconds(graph: ggml.Graph, repeats: int) -> float:
    """Return the median time of a computation, the first ones left out: there a CUDA graph is captured."""
    for _ in range(5):
        graph.compute()
    times = [time.perf_counter()]
    for _ in range(repeats):
        graph.compute()
        times.append(time.perf_counter())
    return statistics.median(np.diff(times))


def layers(op: Any, operands: list[Any], n: int) -> tuple[Any, list[Any]]:
    """Return op and operands of a graph with n nodes, each with operands of its own."""
    each = len(operands)
    return lambda context, *t: [op(context, *t[i * each : (i + 1) * each]) for i in range(n)], operands * n


def cases(n: int, shape: str) -> Any:
    """Yield (name, op and operands of a graph, its layers, bytes that one moves) for a tree of n rows."""
    parents = [-1, *(TREES[shape](i) for i in range(1, n))]
    case = Case(RNG, 1, n, HEADS, KEY_HEADS, SIZE)
    case.order, case.room = heavy_last, n
    case.cells, case.states = np.zeros(1, np.int32), case.state.reshape(1, -1)
    operands = case.operands([parents])
    state, row = case.state.nbytes, 4 * (2 * KEY_HEADS + HEADS) * SIZE  # bytes; q, k, v of a node
    moved = state + n * (2 * row + 4 * HEADS)
    yield "delta_net", *layers(ggml.custom("dw_tree_delta_net"), operands, LAYERS), LAYERS, moved
    if shape == "chain":
        inputs = [*operands[1:6], (case.state, "F32")]
        stock = layers(lambda *tensors: ggml.base.ggml_gated_delta_net(*tensors, 1), inputs, LAYERS)
        yield "stock", *stock, LAYERS, 2 * state + n * row
    depth = depths_of(parents)[-1] + 1
    path = np.array([depth, *range(depth), *[0] * (n - depth)], np.int32)
    kept = depth * 4 * (KEY_HEADS * SIZE + HEADS * SIZE + HEADS)
    factors = np.full((LAYERS, case.n_factors), 1e-3, np.float32)
    operands = [(np.repeat(case.state, LAYERS, axis=0), "F32"), (factors, "F32"), (path, "I32")]
    yield "commit_state", ggml.custom("dw_tree_commit_state"), operands, LAYERS, 2 * state + kept
    x, old = np.ones((n, CHANNELS), np.float32), np.ones((1, CHANNELS * (WIDTH - 1)), np.float32)
    windows = ggml.custom("dw_tree_conv_windows", (n, CHANNELS, WIDTH))
    operands = [(x, "F32"), (old, "F32"), (case.cells, "I32"), (batch([parents], n), "I32")]
    yield "conv_windows", *layers(windows, operands, LAYERS), LAYERS, x.nbytes * (1 + WIDTH) + old.nbytes
    states = np.ones((LAYERS, CHANNELS, WIDTH - 1), np.float32)
    operands = [(states, "F32"), (np.repeat(x[None], LAYERS, axis=0), "F32"), (path, "I32")]
    yield "commit_conv", ggml.custom("dw_tree_commit_conv"), operands, LAYERS, 2 * old.nbytes
    cache = np.zeros((CACHES, 1, CELLS, KV_WIDTH), np.float16)
    moves = np.array([n - 1, *np.stack([np.arange(1, n), np.arange(n - 1)], 1).ravel()], np.int32)
    operands = [(cache, "F16"), (moves, "I32")]
    yield "commit_rows", ggml.custom("dw_tree_commit_rows"), operands, CACHES, (n - 1) * 2 * 2 * KV_WIDTH
    for k in (1, 64) if shape == "chain" else ():
        logits = RNG.standard_normal((n, VOCAB), np.float32)

        def top_rows(context: Any, *tensors: Any, k: int = k, logits: Any = logits) -> list[Any]:
            op = ggml.custom("dw_top_rows", shape_of(logits, k))
            return [op(context, tensors[i % LOGITS]) for i in range(LAYERS)]

        yield f"top_rows {k}", top_rows, [(logits, "F32")] * LOGITS, LAYERS, logits.nbytes


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backend", default="CUDA", help="CPU: only to see that it runs")
    args = parser.parse_args()
    large = np.ones(1 << 26, np.float32)
    with ggml.Graph(ggml.base.ggml_cpy, [(large, "F32")] * 2, backend=args.backend) as graph:
        rate = 2 * large.nbytes / seconds(graph, args.repeats)
    print(json.dumps({"op": "copy", "gigabytes_per_second": round(rate / 1e9)}), flush=True)
    for n in args.rows:
        for shape in TREES if n > 2 else ["chain"]:
            for name, op, operands, nodes, moved in cases(n, shape):
                with ggml.Graph(op, operands, backend=args.backend) as graph:
                    each = seconds(graph, args.repeats) / nodes
                floor = round(100 * moved / rate / each, 1)
                row = {"op": name, "rows": n, "tree": shape, "us": round(each * 1e6, 2), "floor_pct": floor}
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
