"""What others do to one sequence of a context concerns that sequence: saves, loads, decodes, cuts and copies.

Contract: src/hooks/hooks.h, sequence_listener in src/verify/target_context.h.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine.engine import Engine

from bench.testing_api import propose_all, verify_all
from tests.model.engine.calls import MTP
from tests.model.engine.story import grow, true_length
from tests.model.engine.test_sequences import Text, close, take
from tests.model.rig import PROMPT, Rig

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

SIZES: dict[str, Any] = {
    "drafter": MTP,
    "draft_tokens": 6,
    "tree_budget": 10,
    "n_seq_max": 4,
    "n_ctx": 1024,
    "engine": False,
}
PROMPTS = (PROMPT, (7, 8, 9, 10), tuple(range(100, 140)))


def save_one(r: Rig, seq: int) -> ctypes.Array[ctypes.c_uint8]:
    size = native.llama_state_seq_get_size(r.ctx, seq)
    state = (ctypes.c_uint8 * size)()
    assert native.llama_state_seq_get_data(r.ctx, state, size, seq) > 0
    return state


def load_one(r: Rig, seq: int) -> None:
    """Load a state into the sequence: its own of now."""
    state = save_one(r, seq)
    assert native.llama_state_seq_set_data(r.ctx, state, len(state), seq) > 0


def decode_one(r: Rig, seq: int) -> None:
    """llama_decode of two rows behind the sequence's text."""
    end = native.llama_memory_seq_pos_max(r.memory, seq) + 1
    batch = native.llama_batch_init(2, 0, 1)
    batch.n_tokens = 2
    for i in range(2):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 5 + i, end + i, 1, 1
        batch.seq_id[i][0] = seq
    assert native.llama_decode(r.ctx, batch) == 0
    native.llama_batch_free(batch)


def remove_one(r: Rig, seq: int) -> None:
    assert native.llama_memory_seq_rm(r.memory, seq, -1, -1)


def copy_one(r: Rig, seq: int) -> None:
    native.llama_memory_seq_cp(r.memory, seq, 3, -1, -1)
    assert native.llama_memory_seq_rm(r.memory, 3, -1, -1)


Disturb = Callable[[Rig, int], None]
DISTURB: dict[str, Disturb] = {
    "save": save_one,
    "load": load_one,
    "decode": decode_one,
    "remove": remove_one,
    "copy": copy_one,
}
# these leave the logits of the newest decode alone
KEEPS_ROWS = ["save", "load", "remove", "copy"]


def three(shared: Rig, alone: Rig, **settings: Any) -> list[Text]:
    """Texts of three sequences, each with a checkpoint behind its prompt and some rounds behind that."""
    made = []
    for seq, prompt in enumerate(PROMPTS):
        run = alone.reference(60, prompt)
        engine = Engine(
            shared.ctx,
            shared.params,
            **{**shared.settings, "checkpoint_bytes": 1 << 24, **settings},
            seq_id=seq,
        )
        engine.eval(prompt, 0)
        assert engine.next(shared.sampler) == run.tokens[0]
        engine.checkpoint()
        made.append(Text(engine, run))
    chance = random.Random(1)
    for _ in range(3):
        propose(made, chance)
        verify_all([text.engine for text in made])
        for text in made:
            take(shared, text)
            text.engine.commit()
    return made


def propose(made: list[Text], chance: random.Random) -> None:
    for text in made:
        tree = grow(chance, text.run, text.done, 8, 3)
        text.accept = true_length(text.run, text.done, tree)
        text.engine.propose_tree(tree)


@pytest.mark.parametrize("what", DISTURB)
@pytest.mark.parametrize("kv_unified", [False, True], ids=["streams", "unified"])
def test_proposals_of_others_stay(rig, what, kv_unified):
    """Whoever drafted verifies the same draft afterwards."""
    shared = rig(**SIZES, kv_unified=kv_unified)
    made = three(shared, rig())
    others = [made[0], made[2]]
    propose(made, random.Random(5))
    DISTURB[what](shared, 1)
    verify_all([text.engine for text in others])
    for text in others:
        assert text.accept > 0
        kept = text.accept
        take(shared, text)
        assert text.accept == kept
    close(made)


@pytest.mark.parametrize("what", KEEPS_ROWS)
def test_open_rounds_of_others_stay_open(rig, what):
    """Their rows can be sampled, the first ones before and the others behind it."""
    shared = rig(**SIZES)
    made = three(shared, rig())
    propose(made, random.Random(5))
    verify_all([text.engine for text in made])
    for text in made:
        assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
        text.done, text.accept = text.done + 1, text.accept - 1
    DISTURB[what](shared, 1)
    for text in (made[0], made[2]):
        take(shared, text)
        text.engine.commit()
        assert text.engine.n_past == len(text.run.prompt) + text.done - 1
    close(made)


def test_a_decode_by_others_settles_open_rounds(rig):
    """What was sampled stays; the rows that were not are another decode's."""
    shared = rig(**SIZES)
    made = three(shared, rig())
    propose(made, random.Random(5))
    verify_all([text.engine for text in made])
    for text in made:
        assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
        text.done += 1
    decode_one(shared, 1)
    chance = random.Random(2)
    others = [made[0], made[2]]
    for text in others:
        assert text.engine.row() is None
        assert text.engine.n_past == len(text.run.prompt) + text.done - 1
    propose(others, chance)
    verify_all([text.engine for text in others])
    for text in others:
        take(shared, text)
    close(made)


@pytest.mark.parametrize("what", DISTURB)
def test_checkpoints_of_others_stay(rig, what):
    shared = rig(**SIZES)
    made = three(shared, rig())
    DISTURB[what](shared, 1)
    for text in (made[0], made[2]):
        n_prompt = len(text.run.prompt)
        assert text.engine.reach(n_prompt + 1) == n_prompt
        assert text.engine.trim(n_prompt)
        text.done = 1
        propose([text], random.Random(3))
        text.engine.verify()
        take(shared, text)
        text.engine.commit()
        assert text.engine.stats().restored == 1
    close(made)


@pytest.mark.parametrize("what", DISTURB)
def test_drafters_of_others_draft_as_before(rig, what):
    """The next draft is the one of a context that nobody disturbed."""
    found = []
    for disturb in (lambda *_: None, DISTURB[what]):
        shared = rig(**{**SIZES, "tree_budget": 0})
        made = three(shared, rig(), tree_budget=10)
        disturb(shared, 1)
        others = [made[0], made[2]]
        propose_all(
            [text.engine for text in others], [text.run.tokens[text.done - 1] for text in others], [6, 6]
        )
        found.append([text.engine.draft() for text in others])
        assert sum(text.engine.stats().cold_rounds for text in others) == 0
        close(made)
    assert found[0] == found[1]
    assert all(len(draft) > 0 for draft in found[0])


@pytest.mark.parametrize("what", ["save", "load"])
def test_of_the_sequence_itself_only_accepted_rows_are_saved(rig, what):
    shared = rig(**SIZES)
    made = three(shared, rig())
    text = made[1]
    propose([text], random.Random(5))
    text.engine.verify()
    assert text.engine.next(shared.sampler) == text.run.tokens[text.done]
    text.done += 1
    DISTURB[what](shared, 1)
    assert text.engine.row() is None
    end = native.llama_memory_seq_pos_max(shared.memory, 1) + 1
    assert end == len(text.run.prompt) + text.done - 1
    close(made)


def test_a_batch_without_sequences_is_of_sequence_0(rig):
    shared = rig(**SIZES)
    made = three(shared, rig())
    propose(made, random.Random(5))
    assert shared.raw_decode([5, 6]) == 0
    verify_all([text.engine for text in made[1:]])
    for text in made[1:]:
        take(shared, text)
    assert made[0].engine.reach(len(PROMPT)) == 0, "its checkpoint may be another text's"
    close(made)


def test_a_reset_leaves_sequences_without_an_engine(rig):
    shared = rig(**SIZES)
    made = three(shared, rig())
    ends = [native.llama_memory_seq_pos_max(shared.memory, seq) for seq in range(3)]
    made[1].engine.close()
    made[2].engine.close()
    made[0].engine.reset()
    assert [native.llama_memory_seq_pos_max(shared.memory, seq) for seq in range(3)] == [-1, *ends[1:]]
    made[0].engine.close()
