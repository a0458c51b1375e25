"""Rows and lengths of a batch: chosen for all of its sequences, whose texts do not depend on them.

Contract: dw_propose_all and dw_verify_all in src/include/draftwood.h, src/round/batch_model.h.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from draftwood.engine import _capi
from draftwood.engine.engine import Curve
from draftwood.engine.tree import Tree

from bench.testing_api import propose_all, verify_all
from tests.model.engine.calls import MTP
from tests.model.engine.test_sequences import Text, close, take, texts
from tests.model.rig import PROMPT
from tests.unit.cost_curves import curve, linear

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

PROMPTS = (PROMPT, (7, 8, 9), tuple(range(100, 140)), (5,) * 12)
SIZES: dict[str, Any] = {"n_seq_max": 4, "n_ctx": 1024, "draft_tokens": 8, "tree_budget": 12, "engine": False}
FREE = curve({1: 1, 63: 2}, {1: 1000, 64: 1001})
DEAR = linear(row=1000.0)


def chain(text: Text, n: int) -> None:
    """Propose the next n tokens."""
    text.accept = n
    tokens = text.run.tokens[text.done - 1 : text.done + n]
    text.engine.propose_tree(Tree(tuple(tokens), tuple(range(-1, n))))


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
@pytest.mark.parametrize("speculating", range(4))
def test_one_that_speculates_pads_no_other(rig, kv_unified, speculating):
    """On a CPU rows are dear: three plain steps have a graph of their own in the decode."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = texts(shared, rig(), PROMPTS)
    for text in made:
        text.engine.propose_given(text.run.tokens[0], [])  # each can verify trees
    verify_all([text.engine for text in made])
    for text in made:
        take(shared, text)
        text.engine.stats_reset()
    for _ in range(6):
        for seq, text in enumerate(made):
            chain(text, 6 if seq == speculating else 0)
        verify_all([text.engine for text in made])
        for text in made:
            take(shared, text)
            text.engine.commit()
    for seq, text in enumerate(made):
        stats = text.engine.stats()
        assert stats.accepted == (36 if seq == speculating else 0)
        assert stats.padding == 0
    close(made)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
def test_any_lengths(rig, kv_unified):
    """Graphs for those with many rows and those with few, in any mixture of lengths."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = texts(shared, rig(), PROMPTS)
    chance = random.Random(8)
    drafted = 0
    for _ in range(40):
        chosen = [text for text in made if text.done < 70]
        for text in chosen:
            chain(text, chance.choice([0, 0, 1, 2, 5, 8]))
            drafted += text.accept
        if not chosen:
            break
        verify_all([text.engine for text in chosen])
        for text in chosen:
            kept = text.accept
            take(shared, text)
            assert text.accept == kept
            text.engine.commit()
    assert sum(text.engine.stats().accepted for text in made) == drafted
    close(made)


def written(rig: Any, curve: Curve, n_rounds: int, subset: Any = lambda _: range(4)) -> list[Text]:
    """Write rounds together whose lengths are chosen by these times; return the texts, whose engines live."""
    sizes = {**SIZES, "drafter": MTP, "draft_tokens": 5, "tree_budget": 0}
    shared = rig("planted-moe", **sizes)
    made = texts(shared, rig("planted-moe"), PROMPTS, length=_capi.LENGTH_AUTO, curve=curve)
    for i in range(n_rounds):
        chosen = [made[seq] for seq in subset(i) if made[seq].done < 72]
        if not chosen:
            break
        engines = [text.engine for text in chosen]
        propose_all(engines, [text.run.tokens[text.done - 1] for text in chosen], [5] * len(chosen))
        verify_all(engines)
        for text in chosen:
            while text.engine.row() is not None:
                assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
                text.done += 1
    return made


def test_lengths_are_chosen_for_all(rig):
    """Where rows and drafts are free all draft, behind a few plain steps that are timed."""
    made = written(rig, FREE, 10)
    stats = [text.engine.stats() for text in made]
    for each in stats:
        assert each.rounds == 10
        assert 2 <= each.paused_rounds < 10
        assert each.joint_rounds > 0
    assert sum(each.accepted for each in stats) > 4
    close(made)


def test_nobody_drafts_where_rows_are_dear(rig):
    made = written(rig, DEAR, 20)
    for text in made:
        stats = text.engine.stats()
        assert (stats.rounds, stats.paused_rounds, stats.drafted) == (20, 20, 0)
    close(made)


def test_batches_that_change(rig):
    """Sequences come and go, one alone among them; each has its text."""
    chance = random.Random(3)
    made = written(rig, FREE, 60, lambda _: chance.sample(range(4), chance.randint(1, 4)))
    assert all(text.done > 30 for text in made)
    assert sum(text.engine.stats().accepted for text in made) > 20
    close(made)


def test_all_have_a_trial_together(rig):
    """Alone a draft seems to take a second: only a trial of the batch can show that it does not."""
    lie = curve({1: 1e6, 63: 63e6}, {1: 1000, 64: 1001})
    made = written(rig, lie, 64)
    stats = [text.engine.stats() for text in made]
    assert all(each.joint_rounds >= 1 for each in stats)
    assert all(each.paused_rounds >= 32 for each in stats)
    close(made)
