"""Several sequences in one decode: trees, chains and plain steps, each bit-equal to a context of its own.

Every sequence has an engine; verify_all decodes their proposals together. Contract: dw_verify_all in
src/include/draftwood.h, src/verify/target_context.h.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree
from draftwood.errors import DraftwoodError

from bench.testing_api import FUSE_EVERYWHERE, fuse, verify_all
from tests.model.engine.calls import HYBRIDS, MTP, NONE
from tests.model.engine.story import grow, true_length
from tests.model.rig import PROMPT, Rig, Run

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

PROMPTS = (PROMPT, (7, 8, 9), tuple(range(100, 140)))


@dataclass
class Text:
    """One sequence of a shared context and the run that it must repeat."""

    engine: Engine
    run: Run
    done: int = 1
    accept: int = 0


def texts(
    shared: Rig, alone: Rig, prompts: Any = PROMPTS, *, fused: bool = False, **settings: Any
) -> list[Text]:
    """Attach an engine to each sequence of `shared`, start its text, and make its reference on `alone`."""
    made = []
    for seq, prompt in enumerate(prompts):
        run = alone.reference(80, prompt)
        engine = Engine(shared.ctx, shared.params, **{**shared.settings, **settings}, seq_id=seq)
        if fused and seq == 0:
            fuse(engine, FUSE_EVERYWHERE)
        engine.eval(prompt, 0)
        assert engine.next(shared.sampler) == run.tokens[0]
        made.append(Text(engine, run))
    return made


def propose(text: Text, chance: random.Random, size: int) -> None:
    """Propose nothing, a chain or a tree; `size` bounds its nodes."""
    kind = chance.randrange(3)
    if kind == 0:
        tree = Tree((text.run.tokens[text.done - 1],), (-1,))
    elif kind == 1:
        tokens = text.run.tokens[text.done - 1 : text.done + 3]
        tree = Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))
    else:
        tree = grow(chance, text.run, text.done, chance.randint(2, size), chance.randint(0, 4))
    text.accept = true_length(text.run, text.done, tree)
    text.engine.propose_tree(tree)


def take(shared: Rig, text: Text, *, near: float = 0.0) -> None:
    """Sample all rows of the text's open round; each must be the run's, bit for bit or as `near`."""
    for i in range(text.accept + 1):
        found = text.engine.row()
        assert found is not None
        logits = shared.logits(found[0])
        assert text.engine.next(shared.sampler) == text.run.tokens[text.done + i]
        np.testing.assert_allclose(logits, text.run.rows[text.done + i], rtol=0, atol=near)
        if not text.engine.tree().parents[1:]:  # all took a plain step
            text.accept = 0
            break
    assert text.engine.row() is None
    text.done += text.accept + 1


def close(made: list[Text]) -> None:
    for text in made:
        text.engine.close()


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_each_text_is_that_of_its_own_context(rig, preset, drafter, flash):
    common: dict[str, Any] = {"drafter": drafter, "draft_tokens": 8, "tree_budget": 12, "flash": flash}
    shared = rig(preset, **common, n_seq_max=3, n_ctx=768, engine=False)
    made = texts(shared, rig(preset, flash=flash))
    chance = random.Random(6)
    while min(text.done for text in made) < 40:
        # some rounds leave a sequence out: those that remain need neighbouring ids
        chosen = chance.choice([made, made, made[:2], made[1:], made[2:]])
        chosen = [text for text in chosen if text.done < 60]
        for text in chosen:
            propose(text, chance, 12)
        verify_all([text.engine for text in chance.sample(chosen, len(chosen))])
        for text in chance.sample(chosen, len(chosen)):
            take(shared, text)
        for text in chance.sample(chosen, len(chosen)):
            text.engine.commit()
    stats = [text.engine.stats() for text in made]
    assert all(each.tree_rounds > 3 and each.accepted > 0 for each in stats)
    close(made)


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_one_cache_for_all_sequences(rig, preset, drafter, flash):
    """Each has pages of its own: no row rounds by the cells of others, which begin anew meanwhile."""
    common: dict[str, Any] = {"drafter": drafter, "draft_tokens": 8, "tree_budget": 12, "flash": flash}
    shared = rig(preset, **common, n_seq_max=3, n_ctx=1024, kv_unified=True, engine=False)
    made = texts(shared, rig(preset, flash=flash))
    chance = random.Random(7)
    begun_anew = 0
    while begun_anew < 6:
        for text in made:
            propose(text, chance, 12)
        verify_all([text.engine for text in made])
        for text in made:
            take(shared, text)
            text.engine.commit()
        for text in made:
            if text.done > 60 or (text.done > 20 and chance.random() < 0.05):
                text.engine.reset()
                text.engine.eval(text.run.prompt, 0)
                assert text.engine.next(shared.sampler) == text.run.tokens[0]
                text.done, begun_anew = 1, begun_anew + 1
    close(made)


def test_a_decode_of_one_settles_the_open_rounds_of_others(rig):
    shared = rig(draft_tokens=8, tree_budget=12, n_seq_max=3, n_ctx=768, engine=False)
    made = texts(shared, rig())
    chance = random.Random(8)
    for _ in range(6):
        for text in made:
            text.engine.propose_tree(grow(chance, text.run, text.done, 9, 3))
        verify_all([text.engine for text in made])
        for text in made[:2]:  # the third round stays open with two rows taken or none
            text.accept = true_length(text.run, text.done, text.engine.tree())
            take(shared, text)
        first = made[0]
        first.engine.propose_given(first.run.tokens[first.done - 1], [])
        first.engine.verify()
        first.engine.next(shared.sampler)
        first.done += 1
        assert made[1].engine.row() is None
        assert made[2].engine.n_past == len(PROMPTS[2]) + made[2].done  # its root was emitted before
        made[2].engine.reset()
        made[2].engine.eval([*PROMPTS[2], *made[2].run.tokens[: made[2].done - 1]], 0)
        assert made[2].engine.next(shared.sampler) == made[2].run.tokens[made[2].done - 1]
    close(made)


def test_bad_input(rig):
    shared = rig(draft_tokens=8, tree_budget=12, n_seq_max=3, n_ctx=768, engine=False)
    other = rig()
    made = texts(shared, rig())
    a, b, _ = (text.engine for text in made)
    with pytest.raises(DraftwoodError, match="dw_propose"):
        verify_all([a, b])
    a.propose_given(made[0].run.tokens[0], [])
    with pytest.raises(DraftwoodError, match="dw_propose"):
        verify_all([a, b])
    with pytest.raises(DraftwoodError, match="each once"):
        verify_all([a, a])
    other.start()
    other.engine.propose_given(3, [])
    with pytest.raises(DraftwoodError, match="one llama_context"):
        verify_all([a, other.engine])
    assert _capi.lib.dw_verify_all(None, 1) == _capi.ERR_ARGUMENT
    with pytest.raises(DraftwoodError, match="0 engines; expected 1 or more"):
        verify_all([])
    a.verify()
    assert a.next(shared.sampler) == made[0].run.tokens[1]
    close(made)


def test_a_tree_of_one_settles_the_open_trees_of_others(rig):
    """What their commits need goes with the next verify: they are committed before, and go on from there."""
    shared = rig(draft_tokens=8, tree_budget=12, n_seq_max=3, n_ctx=768, engine=False)
    made = texts(shared, rig())
    chance = random.Random(18)
    for _ in range(5):
        for text in made[:2]:
            text.engine.propose_tree(grow(chance, text.run, text.done, 9, 3))
        verify_all([text.engine for text in made[:2]])
        for text in made[:2]:
            text.accept = true_length(text.run, text.done, text.engine.tree())
            take(shared, text)
        made[2].engine.propose_tree(grow(chance, made[2].run, made[2].done, 9, 3))
        made[2].engine.verify()  # the two rounds are open still
        made[2].accept = true_length(made[2].run, made[2].done, made[2].engine.tree())
        take(shared, made[2])
        made[2].engine.commit()
        for text in made[:2]:
            assert text.engine.n_past == len(PROMPTS[made.index(text)]) + text.done - 1
    close(made)


def test_a_proposal_outlives_the_decode_of_another(rig):
    shared = rig(drafter=MTP, draft_tokens=8, tree_budget=12, n_seq_max=3, n_ctx=768, engine=False)
    made = texts(shared, rig())
    for text in made:
        text.engine.propose_tree(grow(random.Random(3), text.run, text.done, 9, 3))
    for text in made:
        text.engine.verify()
        text.accept = true_length(text.run, text.done, text.engine.tree())
        take(shared, text)
    close(made)


def test_a_drafter_that_goes_leaves_the_others_theirs(rig):
    shared = rig(drafter=MTP, draft_tokens=4, n_seq_max=3, n_ctx=768, engine=False)
    made = texts(shared, rig())
    made.pop(0).engine.close()
    for _ in range(4):
        for text in made:
            assert text.engine.propose(text.run.tokens[text.done - 1]) == 4
            text.engine.verify()
            text.accept = true_length(text.run, text.done, text.engine.tree())
            take(shared, text)
            text.engine.commit()
    assert sum(text.engine.stats().cold_rounds for text in made) == 0
    close(made)


def test_a_cache_that_is_nearly_full(rig):
    """Where a unified cache has no cells for all trees, each is cut to what fits."""
    common: dict[str, Any] = {"draft_tokens": 8, "tree_budget": 12, "n_seq_max": 2, "n_ctx": 256}
    shared = rig(**common, kv_unified=True, engine=False)
    long = tuple(range(100, 218))
    made = texts(shared, rig(), (long, long[:110]))
    chance = random.Random(5)
    left = 256 - 118 - 110
    for text in made:
        text.engine.propose_tree(grow(chance, text.run, text.done, 12, 3))
    verify_all([text.engine for text in made])  # 24 rows of 28 cells
    for text in made:
        text.accept = true_length(text.run, text.done, text.engine.tree())
        left -= text.accept + 1
        take(shared, text, near=0.02)
        text.engine.commit()
    assert 12 <= left < 24
    for text in made:
        text.engine.propose_tree(grow(chance, text.run, text.done, 12, 3))
    verify_all([text.engine for text in made])
    for text in made:
        tree = text.engine.tree()
        assert 1 < len(tree.tokens) <= left // 2
        text.accept = true_length(text.run, text.done, tree)
        take(shared, text, near=0.02)
        text.engine.commit()
    close(made)
