"""What is no tree, trees that have no room, calls out of order.

Each gives a status in words, and the context goes on exactly, its drafter too.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Sequence
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.tree import Tree
from draftwood.errors import ContextFullError, DraftwoodError, OptionError, UnsupportedError

from tests.model.engine.calls import MTP, error_of, lib, new, params
from tests.model.engine.story import BUDGET, follow_tree, grow, seen, story, true_length
from tests.model.rig import PROMPT, Rig, check_next, check_plain

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

N_VOCAB = 384  # of the random models


def propose(r: Rig, tokens: Sequence[int], parents: Sequence[int]) -> int:
    """Return the status of a proposal."""
    tree = Tree(tuple(tokens), tuple(parents)).to_native()
    return int(lib.dw_propose_tree(r.engine._handle, ctypes.byref(tree)))


CHAIN = [-1, *range(63)]
# the nodes after the root, and what the refusal must say
NO_TREES: dict[str, tuple[list[int], list[int], str]] = {
    "nothing": ([], [], "a tree of 0 nodes; expected 1 to 64"),
    "more than a dw_tree holds": (list(range(65)), [-1, *range(64)], "a tree of 65 nodes; expected 1 to 64"),
    "over the budget": (
        list(range(BUDGET + 1)),
        CHAIN[: BUDGET + 1],
        f"a tree of {BUDGET + 1} nodes; expected 1 to tree_budget = {BUDGET}",
    ),
    "no root": ([1, 2], [0, 0], "the root's parent is 0; expected -1"),
    "two roots": ([1, 2], [-1, -1], "the parent of node 1 is -1; expected a node before it"),
    "its own parent": ([1, 2], [-1, 1], "the parent of node 1 is 1; expected a node before it"),
    "a cycle": ([1, 2, 3], [-1, 2, 1], "the parent of node 1 is 2; expected a node before it"),
    "a parent that is none": ([1, 2], [-1, 1 << 30], f"the parent of node 1 is {1 << 30}; expected a node"),
    "a parent behind": ([1, 2, 3, 4], [-1, 0, 3, 0], "the parent of node 2 is 3; expected a node before it"),
    "twins": ([1, 2, 2], [-1, 0, 0], "which has a child with token 2 already; expected one"),
    "depth before breadth": (
        [1, 2, 3, 4],
        [-1, 0, 1, 0],
        "the parent of node 3 is 0, less deep than that of node 2; expected depth after depth",
    ),
    "a root that is no token": ([-1, 2], [-1, 0], f"token -1; expected 0 to {N_VOCAB - 1}"),
    "a node that is no token": ([1, N_VOCAB], [-1, 0], f"token {N_VOCAB}; expected 0 to {N_VOCAB - 1}"),
    "the last is no token": (
        [*range(BUDGET - 1), -9],
        CHAIN[:BUDGET],
        f"token -9; expected 0 to {N_VOCAB - 1}",
    ),
}


@pytest.mark.parametrize("name", NO_TREES)
def test_what_is_no_tree_changes_nothing(branching, name):
    r, run = branching
    tokens, parents, text = NO_TREES[name]

    def bad_call(*_: Any) -> None:
        before = seen(r)
        assert text in error_of(propose(r, tokens, parents), _capi.ERR_ARGUMENT)
        assert seen(r) == before

    assert story(r, run, bad_call) == story(r, run)


def test_fewer_nodes_than_none(branching):
    r, _ = branching
    raw = Tree((1,), (-1,)).to_native()
    raw.n = -1
    status = lib.dw_propose_tree(r.engine._handle, ctypes.byref(raw))
    assert error_of(status, _capi.ERR_ARGUMENT) == "a tree of -1 nodes; expected 1 to 64"


def test_no_budget_means_chains(rig, run_of):
    """An engine that was made for chains refuses trees, and drafts none."""
    r, run = rig(drafter=MTP), run_of("moe-mtp")
    r.start()
    with pytest.raises(OptionError, match="a tree of 3 nodes; expected 1 to tree_budget = 0"):
        r.engine.propose_tree(Tree((run.tokens[0], 1, 2), (-1, 0, 0)))
    assert r.engine.propose(run.tokens[0]) == 5
    assert r.engine.tree().parents == (-1, 0, 1, 2, 3, 4)
    r.engine.verify()
    check_next(r, run, 1)


def test_a_tree_without_free_cells(rig, run_of):
    """In an open round near the context's end; it goes on, and a tree that fits is verified behind it."""
    n_ctx = 256
    run, r = run_of("moe-mtp", n=260), rig(drafter=MTP, tree_budget=BUDGET, n_ctx=n_ctx)
    chance = random.Random(2)
    text = [*run.prompt, *run.tokens]
    for start in (0, 64, 128, 192):
        r.engine.eval(text[start : min(start + 64, n_ctx - 12)], start)
    done = n_ctx - 12 - len(PROMPT) + 1
    r.engine.propose_given(run.tokens[done - 1], run.tokens[done : done + 5])
    r.engine.verify()
    for i in range(3):
        check_next(r, run, done + i)
    before = seen(r)
    with pytest.raises(ContextFullError, match="a tree of 10 nodes at position 247 of a context of 256"):
        r.engine.propose_tree(grow(chance, run, done + 3, 10, 2))
    assert seen(r) == before
    check_next(r, run, done + 3)
    r.engine.commit()
    tree = grow(chance, run, done + 4, 8, 3)
    follow_tree(r, run, done + 4, tree, true_length(run, done + 4, tree))
    assert r.engine.stats().tree_rounds == 1


def test_a_tree_over_n_ubatch(rig, run_of):
    """Refused when the engine is made, or without a drafter when the first draft comes; plain steps go on."""
    run = run_of("moe-mtp")
    r = rig(engine=False, drafter=MTP, n_ubatch=20)
    text = "n_ubatch is 20; 5 draft tokens in trees of 24 need at least 24"
    assert text == error_of(
        new(r, params(drafter=MTP, draft_tokens=5, tree_budget=24))[0], _capi.ERR_UNSUPPORTED
    )
    r = rig(n_ubatch=20, tree_budget=24)
    r.start()
    tree = Tree((run.tokens[0], 1, 2), (-1, 0, 0))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=text):
            r.engine.propose_tree(tree)
    check_plain(r, run, 1)


def test_a_tree_as_large_as_n_ubatch(rig, run_of):
    """One whose padding would not fit into a ubatch goes without."""
    run, r = run_of("moe-mtp"), rig(drafter=MTP, n_ubatch=20, tree_budget=20)
    chance, done = random.Random(6), 1
    r.start()
    for size in (20, 17, 20):
        tree = grow(chance, run, done, size, 3)
        done = follow_tree(r, run, done, tree, true_length(run, done, tree))
    assert r.engine.stats().tree_rounds == 3
    check_plain(r, run, done)


def test_contexts_with_snapshots_verify_chains_only(rig, run_of):
    run, r = run_of("moe-mtp"), rig(drafter=MTP, tree_budget=BUDGET, n_rs_seq=5)
    assert "snapshots" in r.engine.tree_refusal
    r.start()
    r.open_round(run, n=3, take=2)
    with pytest.raises(UnsupportedError, match="no draft trees here: the context keeps snapshots"):
        r.engine.propose_tree(Tree((run.tokens[2], 1, 2), (-1, 0, 0)))
    r.engine.commit()
    check_plain(r, run, 3)
    assert r.engine.propose(run.tokens[22]) > 0
    parents = r.engine.tree().parents
    assert parents == (-1, *range(len(parents) - 1)), "its own drafts are chains too"


def test_calls_out_of_order(branching):
    """Each is refused wherever it has no place."""
    r, run = branching
    handle, token = r.engine._handle, ctypes.c_int32()
    called = []

    def bad_calls(where: str, _: int) -> None:
        before = seen(r)
        if where != "proposed":
            text = error_of(lib.dw_verify(handle), _capi.ERR_STATE)
            assert text == "dw_verify without a dw_propose before it"
        if where not in ("start", "open"):
            text = error_of(lib.dw_next(handle, r.sampler, ctypes.byref(token)), _capi.ERR_STATE)
            assert "dw_next without a row to sample" in text
        if where in ("open", "all rows sampled"):
            text = error_of(lib.dw_rewind(handle), _capi.ERR_STATE)
            assert "evaluate a token first" in text
        assert seen(r) == before
        called.append(where)

    assert story(r, run, bad_calls) == story(r, run)
    assert called == ["start", "proposed", "open", "all rows sampled", "settled"]


def test_engines_that_cannot_be_verified_at_once(branching, rig):
    """None, the same twice, one of another context, a null pointer: the proposal goes on waiting."""
    r, run = branching
    other = rig()
    other.start()
    other.engine.propose_given(run.tokens[0], [])
    mine, theirs = r.engine._handle, other.engine._handle
    lists = [
        ([], "0 engines; expected 1 or more"),
        ([mine, None], "dw_verify_all was given a null pointer"),
        ([mine, mine], "expected engines of one llama_context, each once"),
        ([mine, theirs], "expected engines of one llama_context"),
    ]

    def bad_calls(where: str, _: int) -> None:
        before = seen(r)
        for engines, text in lists if where == "proposed" else []:
            handles = (_capi.EngineHandle * len(engines))(*engines)
            assert text in error_of(lib.dw_verify_all(handles, len(engines)), _capi.ERR_ARGUMENT)
        assert seen(r) == before

    assert story(r, run, bad_calls) == story(r, run)
    other.engine.verify()
    assert other.sample()[0] == run.tokens[1]


def test_the_second_of_two_proposals_counts(branching):
    r, run = branching
    r.start()
    chance = random.Random(3)
    r.engine.propose_tree(grow(chance, run, 1, 7, 0))
    r.engine.propose(run.tokens[0])
    tree = grow(chance, run, 1, BUDGET, 3)
    done = follow_tree(r, run, 1, tree, true_length(run, 1, tree))
    check_plain(r, run, done)


def test_a_proposal_ends_the_round_before_it(branching):
    """Two trees without a commit between: what was sampled of the first is kept, the rest is gone."""
    r, run = branching
    r.start()
    chance = random.Random(4)
    r.engine.propose_tree(grow(chance, run, 1, BUDGET, 4))
    r.engine.verify()
    check_next(r, run, 1)
    tree = grow(chance, run, 2, BUDGET, 3)
    done = follow_tree(r, run, 2, tree, true_length(run, 2, tree))
    check_plain(r, run, done)


@pytest.mark.parametrize("change", ["clear", "remove", "copy"])
@pytest.mark.parametrize("when", ["proposed", "open"])
def test_a_memory_that_others_change_in_a_round(rig, run_of, change, when):
    """Between two calls of a round: an error or what plain decoding gives, never another text."""
    run, r = run_of("moe-mtp"), rig(drafter=MTP, tree_budget=BUDGET, n_seq_max=2, n_ctx=512)
    chance = random.Random(6)
    r.start()
    r.engine.propose_tree(grow(chance, run, 1, 8, 2))
    if when == "open":
        r.engine.verify()
        check_next(r, run, 1)
    if change == "clear":
        native.llama_memory_clear(r.memory, True)
    elif change == "remove":
        native.llama_memory_seq_rm(r.memory, 0, -1, -1)
    else:
        native.llama_memory_seq_cp(r.memory, 0, 1, -1, -1)
    if change == "copy" and when == "proposed":  # a plain step makes the state our own again
        r.engine.verify()
        check_next(r, run, 1)
        r.engine.commit()
        check_plain(r, run, 2)
    else:
        if when == "open":
            with contextlib.suppress(DraftwoodError):  # the round is lost, and may say so
                r.engine.commit()
        with pytest.raises(DraftwoodError):
            r.engine.verify()
    assert r.start() == run.tokens[0]
    check_plain(r, run, 1)
