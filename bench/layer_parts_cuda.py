"""What the parts of layers take on a device at 35B-A3B shapes, beside the bytes that they must read.

    python bench/layer_parts_cuda.py [--rows 1 2 4 6 8 16] [--repeats 15] [--backend CUDA]

Weights are Q4_K, random; rows choose experts as a random router does, so that n rows take about 8 n of 256.
Otherwise as ops_cuda.py: a graph holds an op several times, with memory of its own each time, and is replayed
as a CUDA graph. One JSON line an op and number of rows. Attention has ggml's own beside it, over caches of
1,024 to 98,304 cells.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ops_cuda import layers, seconds

from tests.ops import flash_attention
from tests.ops import ggml_graph as ggml
from tests.ops import layer_parts as parts
from tests.ops.layer_part import Operand, Part
from tests.ops.test_quant_rows import random_weights

WIDTH, HIDDEN, EXPERTS, USED = 2048, 512, 256, 8
KIND = "Q4_K"
COPIES = {"dw_experts": 4}  # of an op in a graph; others: 24
RNG = np.random.default_rng(0)


def weights(*shape: int) -> Operand:
    """Return random weights."""
    return random_weights(RNG, shape, KIND), KIND


def f32(*shape: int) -> Operand:
    """Return random values."""
    return RNG.normal(0, 1, shape).astype(np.float32), "F32"


def part(name: str, shape: tuple[int, ...], *operands: Operand, **settings: int) -> Part:
    """Return a node of which nobody knows the result."""
    return Part(name, list(operands), shape, np.zeros(0), (), (), **settings)


def cases(n: int) -> Iterator[tuple[Part, int]]:
    """Yield each op at n rows, and the bytes of weights that it reads."""
    x, norm, heads = f32(n, WIDTH), f32(WIDTH), (32, 128)
    expert = 3 * HIDDEN * WIDTH * 144 // 256
    chosen = round(EXPERTS * (1 - (1 - USED / EXPERTS) ** n))
    gate_up, down = [weights(EXPERTS, HIDDEN, WIDTH) for _ in range(2)], weights(EXPERTS, WIDTH, HIDDEN)
    shared = (f32(1, WIDTH), weights(HIDDEN, WIDTH), weights(HIDDEN, WIDTH), weights(WIDTH, HIDDEN))
    inputs = (x, norm, f32(EXPERTS, WIDTH), *gate_up, down, *shared)
    moved = (chosen + 1) * expert + 4 * EXPERTS * WIDTH
    yield part("dw_experts", (n, WIDTH), *inputs, n_used=USED), moved
    inputs = (weights(8192, WIDTH), weights(4096, WIDTH), f32(32, WIDTH), f32(32, WIDTH), f32(32), f32(32))
    yield part("dw_delta_inputs", (n * 12352,), x, norm, *inputs), _bytes(inputs)
    inputs = (weights(8192, WIDTH), weights(512, WIDTH), weights(512, WIDTH))
    yield part("dw_attention_inputs", (n * 9216,), x, norm, *inputs), _bytes(inputs)
    y, z, out = f32(n, *heads), f32(n, *heads), weights(WIDTH, 4096)
    yield part("dw_delta_output", (n, WIDTH), y, z, f32(128), out, x), _bytes([out])
    y, gate = f32(n, 4096), f32(n, 16, 256)
    yield part("dw_attention_output", (n, WIDTH), y, out, x, gate), _bytes([out])
    windows, kernel = f32(n, 8192, 4), f32(8192, 4)
    yield part("dw_delta_heads", (n * 8192,), windows, kernel, size=128, n_keys=16), _bytes([windows, kernel])
    tree = parts.delta_tree(RNG, [list(range(-1, n - 1))], size=128, n_keys=16, heads=32)
    yield tree, _bytes(operand for operand in tree.operands if operand[1] == "F32")
    step = parts.delta_step(RNG, n, size=128, n_keys=16, heads=32)
    yield step, 2 * step.operands[7][0].nbytes


def attentions(n: int) -> Iterator[tuple[str, Any, Any, int, int]]:
    """Yield (name, op, operands, copies, bytes of keys and values) over caches of several lengths."""
    for n_cells in (1024, 4096, 32768, 98304):
        case = flash_attention.chain(RNG, n, n_cells, size=256, n_heads=16, n_keys=2)
        for name, op in (("dw_flash_attention", case.op()), ("flash_attn_ext", case.stock_op())):
            yield f"{name} {n_cells}", op, case.operands, 10, 2 * case.k.nbytes


def _bytes(operands: Any) -> int:
    return sum(stored.nbytes for stored, _ in operands)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8, 16])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backend", default="CUDA", help="CPU: only to see that it runs")
    args = parser.parse_args()
    large = np.ones(1 << 26, np.float32)
    with ggml.Graph(ggml.base.ggml_cpy, [(large, "F32")] * 2, backend=args.backend) as graph:
        rate = 2 * large.nbytes / seconds(graph, args.repeats)
    print(json.dumps({"op": "copy", "gigabytes_per_second": round(rate / 1e9)}), flush=True)
    for n in args.rows:
        ops = ((p.name, p.op(), p.operands, COPIES.get(p.name, 24), moved) for p, moved in cases(n))
        for name, op, operands, copies, moved in chain(ops, attentions(n)):
            with ggml.Graph(*layers(op, operands, copies), backend=args.backend) as graph:
                each = seconds(graph, args.repeats) / copies
            floor = round(100 * moved / rate / each, 1)
            row = {"op": name, "rows": n, "us": round(each * 1e6, 2), "floor_pct": floor}
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
