"""Memory of draft trees beside llama.cpp's snapshots, on the model of the cases and the device they run on.

Ours: what the engine says that verifies need, and how much device memory the first verify takes. Stock's:
n_rs_seq snapshots, computed from the shapes, and what a context with them takes more than one without.
Must not know: speed. Runs in a worker (Ours.memory). Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

from bench.gpu.files import Reads

_PROMPT = (5, 6, 7, 8)


def of_trees(make: Any, nodes: int) -> dict[str, Any]:
    """Return the bytes that a tree of `nodes` nodes takes; `make(**arguments)` gives a Llama."""
    llm = make(speculation="ngram", draft_tokens=1, tree_budget=nodes, n_ctx=512)
    try:
        if llm.tree_refusal:
            return {"refused": llm.tree_refusal}
        from draftwood.engine.tree import Tree

        llm.eval(_PROMPT)
        draw = random.Random(nodes)
        tokens = tuple(draw.randrange(llm.n_vocab()) for _ in range(nodes))
        before = _used()
        llm._engine.propose_tree(Tree(tokens, (-1, *(0 for _ in range(nodes - 1)))))
        llm._engine.verify()
        grown = _used() - before
        llm._engine.commit()
        return {"tree_bytes": llm.speculation_stats.tree_bytes, "device_bytes_of_the_first_verify": grown}
    finally:
        llm.close()


def of_snapshots(make: Any, reads: Reads, n_snapshots: int) -> dict[str, Any]:
    """Return the bytes of so many snapshots: computed, and of device memory as a context takes them."""
    return {
        "snapshot_bytes": reads.state * n_snapshots,
        "device_bytes_of_the_context": _context(make, n_snapshots) - _context(make, 0),
    }


def _context(make: Any, n_rs_seq: int) -> int:
    """Return how much device memory a bare context with these snapshots takes."""
    from draftwood._llama_cpp import llama_cpp as native

    llm = make(speculation="off", n_ctx=512)
    try:
        params = type(llm.context_params).from_buffer_copy(llm.context_params)
        params.n_rs_seq = n_rs_seq
        before = _used()
        ctx = native.llama_init_from_model(llm._model.model, params)
        if not ctx:
            raise MemoryError(f"no context with {n_rs_seq} snapshots")
        used = _used() - before
        native.llama_free(ctypes.c_void_p(ctx) if isinstance(ctx, int) else ctx)
        return used
    finally:
        llm.close()


def _used() -> int:
    """Return the memory in use on the first card; 0 without one."""
    from draftwood.load.devices import cards, describe

    found = [describe(each) for each in cards()]
    return found[0]["memory_total"] - found[0]["memory_free"] if found else 0
