"""Verifies that an abort callback stops: a status in words, and the context is as it was before them.

It goes on exactly without a reset, its drafter too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.tree import Tree
from draftwood.errors import DecodeError, NativeError

from tests.model.engine.calls import MTP, error_of, lib
from tests.model.engine.story import BUDGET, story
from tests.model.rig import PROMPT, Rig, check_next, check_plain

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)


@contextmanager
def aborting(r: Rig, after: int) -> Iterator[list[int]]:
    """Let the context's decodes stop after so many nodes; yields a list that grows with each node."""
    nodes: list[int] = []

    def stop(_: Any) -> bool:
        nodes.append(0)
        return len(nodes) > after

    callback = native.ggml_abort_callback(stop)
    native.llama_set_abort_callback(r.ctx, callback, None)
    try:
        yield nodes
    finally:
        native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)


def aborted(r: Rig, after: int) -> None:
    """Verify what is proposed, stopped after so many nodes: the context is as it was."""
    held = r.engine.n_past
    with aborting(r, after) as nodes, pytest.raises(DecodeError, match="llama_decode returned 2 for"):
        r.engine.verify()
    assert len(nodes) == after + 1
    assert r.engine.row() is None
    assert r.engine.n_past == r.held == r.engine.reach(held) == held
    assert "without a dw_propose" in error_of(lib.dw_verify(r.engine._handle), _capi.ERR_STATE)


def nodes_of_a_verify(r: Rig, tree: Tree) -> int:
    """Return how many nodes the graph of its verify has."""
    r.start()
    r.engine.propose_tree(tree)
    with aborting(r, 1 << 30) as nodes:
        r.engine.verify()
    return len(nodes)


SHAPES = {
    "tree": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6, 8),
    "padded": (-1, 0, 0, 1, 1, 2, 3, 3, 4),
    "chain": (-1, 0, 1, 2, 3, 4),
}


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 1.0])
def test_an_aborted_verify_leaves_the_context_as_it_was(rig, run_of, shape, part, flash):
    """At the first node, in the middle, at the last one: without a reset the same story follows."""
    r = rig(drafter=MTP, tree_budget=BUDGET, flash=flash)
    run = r.reference(60) if flash else run_of("moe-mtp")
    parents = SHAPES[shape]
    rest = tuple(range(1, len(parents)))
    after = int(part * (nodes_of_a_verify(r, Tree((run.tokens[0], *rest), parents)) - 1))

    def abort(where: str, done: int) -> None:
        waiting = r.engine.tree()
        if where != "open":  # there a proposal would end the round
            r.engine.propose_tree(Tree((run.tokens[done - 1], *rest), parents))
            aborted(r, after)
        if where == "proposed":
            r.engine.propose_tree(waiting)

    undisturbed = story(r, run)
    r.engine.stats_reset()
    assert story(r, run, abort) == undisturbed
    assert r.engine.stats().rounds == 22, "those that were aborted do not count"


@pytest.mark.parametrize("draft_tokens", [1, 5])
def test_an_aborted_verify_of_the_drafters_own_tree(rig, run_of, draft_tokens):
    """Aborted again and again, the drafter drafts the same tree after the same text."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, tree_budget=BUDGET, draft_tokens=draft_tokens)

    def drafts(abort: bool) -> list[Tree]:
        found, done = [], 1
        r.start()
        while done < 30:
            r.engine.propose(run.tokens[done - 1])
            found.append(r.engine.tree())
            if abort:
                for _ in range(2):
                    aborted(r, 20)
                    r.engine.propose(run.tokens[done - 1])
                    assert r.engine.tree() == found[-1]
            r.engine.verify()
            check_next(r, run, done)
            done += 1
            while r.engine.row() is not None:
                check_next(r, run, done)
                done += 1
        r.engine.commit()
        check_plain(r, run, done)
        return found

    undisturbed = drafts(abort=False)
    assert len(undisturbed[-1]) > 1
    assert drafts(abort=True) == undisturbed


def test_an_aborted_plain_step_is_told(branching):
    """One row writes to the state, and nobody knows what that holds then: only a reset is left."""
    r, run = branching
    r.start()
    r.engine.propose_given(run.tokens[0], [])
    with aborting(r, 20), pytest.raises(DecodeError, match="llama_decode returned 2 for 1 tokens"):
        r.engine.verify()
    tree = Tree((run.tokens[0], 1, 2), (-1, 0, 0))
    with pytest.raises(NativeError, match=r"after a decode that failed; .* is unknown, call dw_reset"):
        r.engine.propose_tree(tree)
    assert r.engine.reach(r.engine.n_past) == 0
    assert not r.engine.trim(len(PROMPT))
    assert story(r, run) == story(r, run)
