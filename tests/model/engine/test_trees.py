"""Draft trees verified in one decode: every row is bit-equal to plain decoding of its path, and after a commit the
context is, cell for cell, one that decoded plainly.

The oracle plants the true continuation on a path of a random tree. Contract: src/include/draftwood.h,
src/spec/tree_state.h, src/ops/tree-attention.h.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from draftwood import _capi
from draftwood._llama_cpp import llama_cpp as native
from draftwood.tree import Tree, bucket

from tests.model.engine.calls import HYBRIDS, MTP, NONE
from tests.model.rig import PROMPT, Rig, Run, check_next, check_plain

BUDGETS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)
# flash attention off and on, and the types that a KV cache may have with each
CACHES = {
    "f16": {},
    "f32": {"type_kv": native.GGML_TYPE_F32},
    "flash-f16": {"flash": True},
    "flash-f32": {"flash": True, "type_kv": native.GGML_TYPE_F32},
    "flash-q8_0": {"flash": True, "type_kv": native.GGML_TYPE_Q8_0},
}


@pytest.fixture
def tree_rig(rig):
    """Rigs on which trees can be verified; without MTP block the snapshots' way has none."""
    if rig.rollback == "snapshots":
        pytest.skip("a context with snapshots verifies chains only")
    return rig


def grow(chance: random.Random, run: Run, done: int, size: int, accept: int) -> Tree:
    """Return a tree of `size` nodes after `done` tokens of `run`, the next `accept` of which are on one of its paths."""
    parents, true = [-1], [0]  # the nodes with the run's tokens
    for i in range(1, size):
        parents.append(chance.randint(parents[-1] if i > 1 else 0, i - 1))
    depths = Tree(tuple(parents), tuple(parents)).depths
    deepest = max(depths)
    accept = min(accept, deepest)
    path = [0]
    node = next(i for i in range(size) if depths[i] >= accept)
    while node > 0:
        path.append(node)
        node = parents[node]
    true = set(path)
    tokens, used = [run.tokens[done - 1]], {}
    for i in range(1, size):
        right = run.tokens[done - 1 + depths[i]]
        siblings = used.setdefault(parents[i], set())
        if i in true:
            token = right
        else:  # also below the true path's end: never the token that follows
            token = next(t for t in iter(lambda: chance.randrange(len(run.rows[0])), None) if t not in {right, *siblings})
        siblings.add(token)
        tokens.append(token)
    return Tree(tuple(tokens), tuple(parents))


def follow_tree(rig: Rig, run: Run, done: int, tree: Tree, accept: int, take: int | None = None) -> int:
    """Verify `tree`, whose true path has `accept` tokens, sample `take` rows, commit; return the tokens emitted."""
    rig.engine.propose_tree(tree)
    assert rig.engine.tree().tokens == tree.tokens
    rig.engine.verify()
    wanted = accept + 1 if take is None else take
    for i in range(wanted):
        assert rig.engine.row() is not None, f"the walk ended after {i} of {wanted} tokens"
        check_next(rig, run, done + i)
    if wanted == accept + 1:
        assert rig.engine.row() is None
    rig.engine.commit()
    kept = len(run.prompt) + done - 1 + max(wanted, 1)
    assert rig.engine.n_past == rig.held == kept
    return done + wanted


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("preset", HYBRIDS)
def test_random_trees_of_every_budget(tree_rig, run_of, preset, budget):
    run = run_of(preset)
    r = tree_rig(preset, tree_budget=budget)
    chance = random.Random(budget)
    done = 1
    assert r.start() == run.tokens[0]
    while done < 100:
        accept = chance.randint(0, 6)
        tree = grow(chance, run, done, chance.randint(max(1, budget // 2), budget), accept)
        accept = min(accept, max(tree.depths))
        done = follow_tree(r, run, done, tree, accept, chance.choice([None, None, chance.randint(0, accept + 1)]))
    check_plain(r, run, done)
    stats = r.engine.stats()
    assert (stats.tree_rounds > 0) == (budget > 2)
    assert stats.accepted > 0 or budget == 1


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("preset", [*HYBRIDS, "gqa", "odd"])
def test_every_row_is_that_of_its_path(tree_rig, run_of, preset, cache):
    """Also rows that nobody accepts, at every kind of KV cache."""
    settings: dict[str, Any] = {"draft_tokens": 20, **CACHES[cache]}
    r, plain = tree_rig(preset, tree_budget=24, **settings), tree_rig(preset, **settings)
    chance = random.Random(5)
    run = run_of(preset)
    for size in (2, 5, 9, 24):
        tree = grow(chance, run, 1, size, 3)
        first = r.start()
        tree = Tree((first, *tree.tokens[1:]), tree.parents)
        r.engine.propose_tree(tree)
        r.engine.verify()
        for node in range(size):
            path, i = [], node
            while i >= 0:
                path.insert(0, tree.tokens[i])
                i = tree.parents[i]
            plain.start()
            for token in path:
                plain.engine.propose_given(token, [])
                plain.engine.verify()
                _, row = plain.sample()
            assert np.array_equal(r.logits(node), row), (size, tree.parents, node)


@pytest.mark.parametrize("cache", CACHES)
def test_a_commit_leaves_what_plain_decoding_leaves(tree_rig, run_of, cache):
    """Saved states hold cells in their order, positions and the recurrent state: they are equal byte for byte."""
    settings: dict[str, Any] = {"draft_tokens": 8, **CACHES[cache]}
    r, plain = tree_rig(tree_budget=16, **settings), tree_rig(**settings)
    run = plain.reference(60)
    chance = random.Random(3)
    done = 1
    r.start()
    while done < 50:
        accept = chance.randint(0, 5)
        tree = grow(chance, run, done, chance.randint(1, 16), accept)
        done = follow_tree(r, run, done, tree, min(accept, max(tree.depths)))
        plain.start()
        plain.plain(run.tokens[0], done - 1)
        assert r.save() == plain.save()
    assert r.engine.stats().tree_rounds > 5


def test_padding_is_neither_seen_nor_kept(tree_rig, run_of):
    run = run_of("moe-mtp")
    r = tree_rig(tree_budget=64)
    chance = random.Random(9)
    for size in (3, 5, 9, 13, 17, 25, 33, 49):
        r.start()
        r.engine.stats_reset()
        done = follow_tree(r, run, 1, grow(chance, run, 1, size, 2), 2)
        assert r.engine.stats().padding == bucket(size) - size > 0
        check_plain(r, run, done)


def test_near_the_end_of_the_context(tree_rig, run_of):
    """A tree whose padding has no cells goes without; one that has none itself is refused."""
    run = run_of("moe-mtp")
    n_ctx = 256
    r = tree_rig(tree_budget=16, n_ctx=n_ctx)
    chance = random.Random(4)
    r.start()
    _, _ = r.plain(run.tokens[0], n_ctx - len(PROMPT) - 9)
    done = n_ctx - len(PROMPT) - 8
    tree = grow(chance, run, done, 10, 2)
    with pytest.raises(Exception, match="10 nodes at position 247 of a context of 256"):
        r.engine.propose_tree(tree)
    tree = grow(chance, run, done, 9, 2)
    done = follow_tree(r, run, done, tree, 2)
    assert r.engine.stats().padding == 0


@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
def test_trees_chains_and_plain_steps_mix(tree_rig, run_of, drafter):
    run = run_of("moe-mtp")
    r = tree_rig(drafter=drafter, tree_budget=12)
    chance, done = random.Random(8), 1
    r.start()
    while done < 120:
        kind = chance.randrange(3)
        if kind == 0:
            _, rows = r.plain(run.tokens[done - 1], 2)
            assert np.array_equal(rows[1], run.rows[done + 1])
            done += 2
            continue
        accept = chance.randint(0, 4)
        tree = grow(chance, run, done, 12 if kind == 1 else 6, accept)
        if kind == 2:
            tree = Tree(tuple(run.tokens[done - 1 : done + 5]), (-1, 0, 1, 2, 3, 4))
            accept = 5
        done = follow_tree(r, run, done, tree, min(accept, max(tree.depths)))
    check_plain(r, run, done)
