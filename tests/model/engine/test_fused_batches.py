"""Several sequences on fused layers: all rows of a verify fit into one graph of them, and are a plain step's.

On a CPU the ops are references; engines run them there because a test says so.
Contract: row_limit in src/verify/target_context.h, max_fused_rows in src/decode/fused_layers.h.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench import testing_api as api
from bench.testing_api import propose_all, verify_all
from tests.model.engine.calls import MTP
from tests.model.engine.test_joint_drafts import any_of, check_counts, written
from tests.model.engine.test_sequences import Text, close, propose, texts
from tests.model.rig import PROMPT

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

MODEL = "planted-moe"
PROMPTS = (PROMPT, (7, 8, 9), tuple(range(100, 140)), (5,) * 12, (9, 8, 7), (30, 31), (64,) * 3, (1, 2))
LONG = tuple(tuple(range(begin, begin + 40)) for begin in (10, 60, 110, 160))  # no layer of theirs is fused
MAX_ROWS = 16


def start(rig, n: int, prompts=PROMPTS, **settings):
    """Begin n texts on fused layers; the run of each is of a context of its own, fused as well."""
    alone = rig(MODEL, flash=True)
    api.fuse(alone.engine, api.FUSE_EVERYWHERE)
    shared = rig(MODEL, flash=True, n_seq_max=n, n_ctx=256 * n, engine=False, **settings)
    return shared, texts(shared, alone, [prompts[i % len(prompts)] for i in range(n)], fused=True)


def is_fused(engine) -> bool:
    found = api.fused(engine)
    return all(found[part] == 3 for part in ("delta inputs", "delta tree", "delta output"))


def take(shared, text: Text) -> None:
    """Sample the rows of the text's open round, however many were verified of its tree."""
    while (found := text.engine.row()) is not None:
        np.testing.assert_array_equal(shared.logits(found[0]), text.run.rows[text.done])
        assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
        text.done += 1


@pytest.mark.parametrize(
    ("n", "tokens"), [(1, 7), (2, 7), (3, 4), (4, 3), (5, 2), (8, 1), (9, 0), (16, 0), (17, 0)]
)
def test_drafts_are_as_long_as_one_graph_has_room_for(rig, n, tokens):
    """From nine sequences on there is none."""
    _, made = start(rig, n, drafter=MTP, draft_tokens=7)
    engines = [text.engine for text in made]
    assert propose_all(engines, [text.run.tokens[0] for text in made], [7] * n) == [tokens] * n
    verify_all(engines)
    if tokens > 0:
        assert is_fused(engines[0])
    else:
        assert (api.fused(engines[0])["delta inputs"] > 0) is (n <= MAX_ROWS)
    close(made)


def test_long_prompts_tell_it_too(rig):
    _, made = start(rig, 4, LONG, drafter=MTP, draft_tokens=7)
    engines = [text.engine for text in made]
    assert propose_all(engines, [text.run.tokens[0] for text in made], [7] * 4) == [3] * 4
    close(made)


def test_without_fused_layers_drafts_are_as_long_as_asked(rig):
    shared = rig(MODEL, n_seq_max=4, n_ctx=1024, drafter=MTP, draft_tokens=7, engine=False)
    made = texts(shared, rig(MODEL), PROMPTS[:4])
    engines = [text.engine for text in made]
    assert propose_all(engines, [text.run.tokens[0] for text in made], [7] * 4) == [7] * 4
    close(made)


@pytest.mark.parametrize("n", [2, 4])
def test_trees_that_callers_give_are_cut_to_one_graph(rig, n):
    """Rows of every verify are those of a context of its own, bit for bit."""
    shared, made = start(rig, n, tree_budget=12)
    chance = random.Random(11)
    while min(text.done for text in made) < 40:
        chosen = [text for text in made if text.done < 60]
        for text in chosen:
            propose(text, chance, 12)
        verify_all([text.engine for text in chosen])
        sizes = [len(text.engine.tree().tokens) for text in chosen]
        assert max(sizes) <= MAX_ROWS // len(chosen) or len(chosen) == 1
        for text in chosen:
            take(shared, text)
            text.engine.commit()
    assert all(text.engine.stats().tree_rounds > 3 for text in made)
    close(made)


def test_texts_of_all_are_those_of_plain_steps(rig):
    shared, made = start(rig, 4, drafter=MTP, draft_tokens=7)
    written(made, shared.sampler, propose_all, 60, any_of)
    check_counts([text.engine.stats() for text in made])
    close(made)
