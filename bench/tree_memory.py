"""Measure the memory that a tree of draft tokens takes at 35B-A3B shapes, beside llama.cpp's snapshots.

    python bench/tree_memory.py [--nodes 24]

The model has the layers, heads and widths of Qwen3.5-35B-A3B, random weights and few small experts (which
have no part in it): 1.5 GB on disk instead of 20. Computed from the shapes, and measured: the bytes of the
buffers that the engine allocates for its trees, and how much the process grows by the first verify, its
graph's buffers included. Beside them what as many snapshots of n_rs_seq, llama.cpp's own way back from a
rejected chain, would take. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.bench.facts import machine
from draftwood.bench.results import append
from draftwood.engine.engine import build_info
from draftwood.engine.tree import Tree

import models

LIMIT = 50e6  # bytes, for 24 nodes
SCHEMA = 1


def shape() -> Any:
    """Return the synthetic model: 35b-a3b with 4 small experts and a small vocabulary."""
    from synth_gguf import PRESETS

    return replace(
        PRESETS["35b-a3b"], experts=4, top_k=2, expert_ff=64, shared_ff=64, vocab=384, types="Q8_0", mtp=False
    )


def computed(spec: Any, nodes: int) -> int:
    """Return the bytes that factors and conv inputs of `nodes` nodes take, all f32."""
    layers = spec.layers - spec.layers // spec.attention_interval
    key, value = spec.key_heads * spec.state_size, spec.value_heads * spec.state_size
    factors = key + value + spec.value_heads  # k, u, g
    return 4 * nodes * (layers * (factors + 2 * key + value) + value)  # and the newest layer's output


def snapshots(spec: Any, nodes: int) -> int:
    """Return the bytes of a copy of the recurrent state for each of `nodes` nodes, f32."""
    layers = spec.layers - spec.layers // spec.attention_interval
    channels = (2 * spec.key_heads + spec.value_heads) * spec.state_size
    state = spec.value_heads * spec.state_size**2 + (spec.conv - 1) * channels
    return 4 * nodes * layers * state


def resident() -> int:
    """Return the process's resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--results", type=Path, help="add what was measured to this file, as a row")
    args = parser.parse_args()
    nodes = args.nodes
    spec = shape()
    path = models.synthetic_of("tree-memory", spec)

    def load(budget: int) -> Any:
        return Llama(
            str(path),
            n_ctx=512,
            n_batch=128,
            verbose=False,
            speculation="ngram",
            draft_tokens=1,
            tree_budget=budget,
        )

    def verify(llm: Any, n: int) -> None:
        llm.eval([5, 6, 7])
        llm._engine.propose_tree(Tree((8, *range(20, 19 + n)), (-1, *(0 for _ in range(n - 1)))))
        llm._engine.verify()
        llm._engine.commit()

    small = load(2)
    verify(small, 2)
    small_bytes = small.speculation_stats.tree_bytes
    small.close()
    before = resident()
    large = load(nodes)
    loaded = resident()
    verify(large, nodes)
    row = {
        "schema": SCHEMA,
        **machine(build_info()),
        "nodes": nodes,
        "computed_bytes": computed(spec, nodes),
        "allocated_bytes": large.speculation_stats.tree_bytes,
        "allocated_for_2_nodes_bytes": small_bytes,
        "process_growth_of_the_verify_bytes": resident() - loaded,
        "process_growth_of_the_load_bytes": loaded - before,
        "snapshots_bytes": snapshots(spec, nodes),
    }
    large.close()
    if args.results:
        append(args.results, row)
    print(json.dumps(row))
    return 0 if row["allocated_bytes"] < LIMIT or nodes > 24 else 1


if __name__ == "__main__":
    sys.exit(main())
