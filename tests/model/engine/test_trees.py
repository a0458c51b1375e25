"""Draft trees verified in one decode: every row is bit-equal to plain decoding of its path.

After a commit the context is, cell for cell, one that decoded plainly.

The oracle (story.py) plants the true continuation on a path of a random tree.
Contract: src/include/draftwood.h, src/verify/tree_state.h, src/ops/tree-attention/tree-attention.h.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine.tree import Tree
from draftwood.errors import ContextFullError

from bench.testing_api import bucket
from tests.model.engine.calls import HYBRIDS, MTP, NONE
from tests.model.engine.story import follow_tree, grow, true_length
from tests.model.rig import PROMPT, check_plain

BUDGETS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)
# flash attention off and on, and the types that a KV cache may have with each
CACHES = {
    "f16": {},
    "f32": {"type_kv": native.GGML_TYPE_F32},
    "flash-f16": {"flash": True},
    "flash-f32": {"flash": True, "type_kv": native.GGML_TYPE_F32},
    "flash-q8_0": {"flash": True, "type_kv": native.GGML_TYPE_Q8_0},
}

# contexts with snapshots of their state verify chains only
pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("preset", HYBRIDS)
def test_random_trees_of_every_budget(rig, run_of, preset, budget):
    run = run_of(preset)
    r = rig(preset, tree_budget=budget)
    chance = random.Random(budget)
    done = 1
    assert r.start() == run.tokens[0]
    while done < 100:
        accept = chance.randint(0, 6)
        tree = grow(chance, run, done, chance.randint(max(1, budget // 2), budget), accept)
        accept = true_length(run, done, tree)
        done = follow_tree(
            r, run, done, tree, accept, chance.choice([None, None, chance.randint(1, accept + 1)])
        )
    check_plain(r, run, done)
    stats = r.engine.stats()
    assert (stats.tree_rounds > 0) == (budget > 2)
    assert stats.accepted > 0 or budget == 1


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("preset", [*HYBRIDS, "gqa", "much-attention"])
def test_every_row_is_that_of_its_path(rig, run_of, preset, cache):
    """Also rows that nobody accepts, at every kind of KV cache."""
    settings: dict[str, Any] = {"draft_tokens": 20, **CACHES[cache]}
    r, plain = rig(preset, tree_budget=24, **settings), rig(preset, **settings)
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
def test_a_commit_leaves_what_plain_decoding_leaves(rig, run_of, cache):
    """Saved states hold cells in their order, positions, recurrent state: they are equal byte for byte."""
    settings: dict[str, Any] = {"draft_tokens": 8, **CACHES[cache]}
    r, plain = rig(tree_budget=16, **settings), rig(**settings)
    run = plain.reference(60)
    chance = random.Random(3)
    done = 1
    r.start()
    while done < 50:
        accept = chance.randint(0, 5)
        tree = grow(chance, run, done, chance.randint(1, 16), accept)
        done = follow_tree(r, run, done, tree, true_length(run, done, tree))
        plain.start()
        plain.plain(run.tokens[0], done - 1)
        assert r.save() == plain.save()
    assert r.engine.stats().tree_rounds > 5


def test_padding_is_neither_seen_nor_kept(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(tree_budget=64)
    chance = random.Random(9)
    for size in (3, 5, 9, 13, 17, 25, 33, 49):
        r.start()
        r.engine.stats_reset()
        tree = grow(chance, run, 1, size, 2)
        done = follow_tree(r, run, 1, tree, true_length(run, 1, tree))
        assert r.engine.stats().padding == bucket(size) - size > 0
        check_plain(r, run, done)


def test_near_the_end_of_the_context(rig, run_of):
    """A tree whose padding has no cells goes without; one that has none itself is refused."""
    n_ctx = 256
    run = run_of("moe-mtp", n=260)
    r = rig(tree_budget=16, n_ctx=n_ctx)
    chance = random.Random(4)
    r.start()
    done = n_ctx - len(PROMPT) - 8
    r.plain(run.tokens[0], done - 1)
    assert r.engine.n_past == n_ctx - 9
    with pytest.raises(ContextFullError, match="10 nodes at position 247 of a context of 256"):
        r.engine.propose_tree(grow(chance, run, done, 10, 2))
    tree = grow(chance, run, done, 9, 2)
    done = follow_tree(r, run, done, tree, true_length(run, done, tree))
    assert r.engine.stats().padding == 0
    with pytest.raises(ContextFullError):
        r.plain(run.tokens[done - 1], 10)


@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
def test_trees_chains_and_plain_steps_mix(rig, run_of, drafter):
    run = run_of("moe-mtp")
    r = rig(drafter=drafter, tree_budget=12)
    chance, done = random.Random(8), 1
    r.start()
    while done < 120:
        kind = chance.randrange(3)
        if kind == 0:
            _, rows = r.plain(run.tokens[done - 1], 2)
            assert np.array_equal(rows[1], run.rows[done + 1])
            done += 2
            continue
        tree = grow(chance, run, done, 12, chance.randint(0, 4))
        if kind == 2:
            tree = Tree(tuple(run.tokens[done - 1 : done + 5]), (-1, 0, 1, 2, 3, 4))
        done = follow_tree(r, run, done, tree, true_length(run, done, tree))
    check_plain(r, run, done)
