"""Trees with the true continuation planted on a path, and rounds with them that tests may disturb.

Must not know: what disturbs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from draftwood.engine.tree import Tree

from tests.model.rig import PROMPT, Rig, Run, check_next, check_plain

BUDGET = 12  # of the story's trees, and of the rigs that it runs on


def grow(chance: random.Random, run: Run, done: int, size: int, accept: int) -> Tree:
    """Return a random tree of `size` nodes after `done` tokens of `run`.

    One of its paths, no longer than `accept`, has the run's next tokens; no other node has one that follows.
    """
    parents = [-1, 0, 0][:size]
    for i in range(3, size):
        parents.append(chance.randint(parents[-1], i - 1))
    depths = Tree(tuple(parents), tuple(parents)).depths
    node = max(i for i in range(size) if depths[i] <= accept)
    true = set()
    while node > 0:
        true.add(node)
        node = parents[node]
    tokens = [run.tokens[done - 1]]
    for i in range(1, size):
        right = run.tokens[done - 1 + depths[i]]
        taken = {right, *(tokens[j] for j in range(1, i) if parents[j] == parents[i])}
        free = [token for token in range(len(run.rows[0])) if token not in taken]
        tokens.append(right if i in true else chance.choice(free))
    return Tree(tuple(tokens), tuple(parents))


def true_length(run: Run, done: int, tree: Tree) -> int:
    """Return how many tokens of the run the tree holds after its root."""
    return len(tree.walk(run.tokens[done:])) - 1


def follow_tree(rig: Rig, run: Run, done: int, tree: Tree, accept: int, take: int | None = None) -> int:
    """Verify `tree`, whose true path has `accept` tokens, take `take` rows; return the tokens emitted."""
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


def seen(r: Rig) -> tuple[Any, ...]:
    """What the calls of the C API tell of an engine."""
    return (r.engine.row(), r.engine.n_past, r.held, r.engine.tree(), r.engine.reach(r.engine.n_past))


Disturb = Callable[[str, int], None]


def story(r: Rig, run: Run, disturb: Disturb = lambda *_: None) -> tuple[Tree, bytes]:
    """Run rounds with `disturb(where, tokens emitted)` in between; return a later draft and the last state.

    What comes in between must change neither, nor any row.
    """
    chance = random.Random(1)
    assert r.start() == run.tokens[0]
    disturb("start", 1)
    tree = grow(chance, run, 1, BUDGET, 3)
    accept = true_length(run, 1, tree)
    assert accept > 1
    r.engine.propose_tree(tree)
    disturb("proposed", 1)
    r.engine.verify()
    check_next(r, run, 1)
    disturb("open", 2)
    for i in range(1, accept + 1):
        check_next(r, run, 1 + i)
    done = 2 + accept
    disturb("all rows sampled", done)
    r.engine.commit()
    disturb("settled", done)
    assert r.engine.n_past == r.held == len(PROMPT) + done - 1
    assert r.engine.propose(run.tokens[done - 1]) > 0
    drafted = r.engine.tree()
    r.engine.verify()
    check_next(r, run, done)
    r.engine.commit()
    check_plain(r, run, done + 1)
    return drafted, r.save()
