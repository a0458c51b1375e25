"""Greedy texts whose steps are queued, for the tests of them. Must not know: what any test expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi

from tests.model.rig import PROMPT, Rig

ON_TREES = pytest.mark.parametrize("rig", ["tree"], indirect=True)
QUEUES: dict[str, Any] = {
    "results": _capi.RESULTS_TOP,
    "queue_steps": True,
    "n_seq_max": 2,
    "kv_unified": True,
}


def begin(r: Rig, prompt: tuple[int, ...] = PROMPT) -> int:
    """Start a greedy text whose steps are queued."""
    token = r.start(prompt)
    r.engine.set_request(n_top=1)
    return token


def steps(r: Rig, last: int, n: int) -> list[int]:
    """Take n plain steps as `Llama` does: a step stays queued between two of them."""
    taken = []
    for _ in range(n):
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(last)
        r.engine.verify()
        last = r.engine.next(r.sampler)
        assert r.engine.row() is None
        taken.append(last)
    return taken


def queued(r: Rig) -> tuple[int, int]:
    """Return how many queued steps were taken, and how many were dropped."""
    stats = r.engine.stats()
    return stats.queued_steps, stats.dropped_steps


def check_memory(r: Rig) -> None:
    """The context holds what the engine says and nothing of a step."""
    assert r.held == r.engine.n_past
    assert native.llama_memory_seq_pos_max(r.memory, 1) == -1


def large(rig: Callable[..., Rig], **settings: Any) -> Rig:
    """Make a rig that keeps checkpoints, and verifies trees that are given."""
    r = rig(**QUEUES, engine=False, **settings)
    r.settings |= {"checkpoint_bytes": 1 << 22, "tree_budget": 8}
    r.attach()
    return r
