"""What callers and others do while a step is queued (dw_params.queue_steps): the text goes on.

Contract: src/verify/target_context.h, src/llama/memory_fork.h.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine.tree import Tree

from tests.model.engine.queued import ON_TREES, begin, check_memory, large, queued, steps
from tests.model.engine.test_others import load_one, remove_one, save_one
from tests.model.rig import Rig, Run, check_plain


def again(r: Rig, run: Run, done: int) -> None:
    """Evaluate the run up to its `done`-th token again."""
    r.engine.reset()
    check_memory(r)
    r.engine.eval([*run.prompt, *run.tokens[: done - 1]], 0)
    assert r.engine.next(r.sampler) == run.tokens[done - 1]


def other_token(r: Rig, run: Run, done: int) -> None:
    """Go on with another token than was sampled: its row follows the state before the step."""
    r.engine.propose(run.wrong(done))
    r.engine.verify()
    row = r.logits(r.engine.row()[0])
    r.engine.next(r.sampler)
    again(r, run, done)
    r.engine.eval([run.wrong(done)], len(run.prompt) + done - 1)
    assert np.array_equal(r.logits(), row)
    again(r, run, done)


def own_draft(r: Rig, run: Run, done: int) -> None:
    """Rows of a draft follow the state before the step, too; the run goes on behind it."""
    r.engine.propose_given(run.tokens[done - 1], [run.tokens[done], run.wrong(done + 1)])
    r.engine.verify()
    for i in range(2):
        assert np.array_equal(r.logits(r.engine.row()[0]), run.rows[done + i])
        assert r.engine.next(r.sampler) == run.tokens[done + i]


def own_tree(r: Rig, run: Run, done: int) -> None:
    tree = Tree((run.tokens[done - 1], run.wrong(done), run.tokens[done]), (-1, 0, 0))
    r.engine.propose_tree(tree)
    r.engine.verify()
    for i in range(2):
        assert np.array_equal(r.logits(r.engine.row()[0]), run.rows[done + i])
        assert r.engine.next(r.sampler) == run.tokens[done + i]


def sampled_again(r: Rig, run: Run, done: int) -> None:
    assert r.engine.trim(r.engine.n_past)  # the round is over, its step still queued
    assert r.engine.rewind()
    assert np.array_equal(r.logits(r.engine.row()[0]), run.rows[done - 1])
    assert r.engine.next(r.sampler) == run.tokens[done - 1]


def proposed_and_left(r: Rig, run: Run, done: int) -> None:
    r.engine.propose(run.tokens[done - 1])


def checkpointed(r: Rig, run: Run, done: int) -> None:
    """Save the state at this position, go on, and come back to it."""
    r.engine.checkpoint()
    check_memory(r)
    steps(r, run.tokens[done - 1], 3)
    assert r.engine.trim(len(run.prompt) + done - 1)
    check_memory(r)


def whole_state(r: Rig, run: Run, done: int) -> None:
    r.load(r.save())
    check_memory(r)
    assert r.engine.trim(len(run.prompt) + done - 1)


def state_of_one(r: Rig, run: Run, done: int) -> None:
    load_one(r, 0)
    check_memory(r)
    assert r.engine.trim(len(run.prompt) + done - 1)


def saved_one(r: Rig, run: Run, done: int) -> None:
    """Of the sequence that holds the old state: it is empty to whoever asks."""
    assert len(save_one(r, 1)) < 1000
    check_memory(r)


def cleared(r: Rig, run: Run, done: int) -> None:
    """By somebody who says nothing: the engine finds it out."""
    native.llama_memory_clear(r.memory, True)
    assert r.engine.n_past > 0
    assert r.engine.trim(0)
    assert r.engine.n_past == 0
    again(r, run, done)


def copied(r: Rig, run: Run, done: int) -> None:
    """To the sequence that holds the old state, without a commit: the step cannot be taken back any more."""
    of_step = r.held - r.engine.n_past
    native.llama_memory_seq_cp(r.memory, 0, 1, -1, -1)
    native.llama_memory_seq_rm(r.memory, 1, -1, -1)
    r.engine.commit()
    assert r.held == r.engine.n_past + of_step
    again(r, run, done)


def decoded(r: Rig, run: Run, done: int) -> None:
    """By somebody else, behind the sequence's text: the step is not in front of it."""
    tokens = (ctypes.c_int32 * 2)(5, 6)
    batch = native.llama_batch_get_one(tokens, 2)
    batch.pos = (ctypes.c_int32 * 2)(r.engine.n_past, r.engine.n_past + 1)
    assert native.llama_decode(r.ctx, batch) == 0
    assert r.held == r.engine.n_past + 2
    again(r, run, done)


def removed(r: Rig, run: Run, done: int) -> None:
    remove_one(r, 0)
    again(r, run, done)


def control_vector(r: Rig, run: Run, done: int) -> None:
    """Set and removed again: a step that was computed without it is not the next one."""
    n_embd, n_layer = native.llama_model_n_embd(r.model), native.llama_model_n_layer(r.model)
    values = np.ones((n_layer, n_embd), np.float32)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    set_vector = native.llama_set_adapter_cvec
    assert set_vector(r.ctx, pointer, values.size, n_embd, 1, n_layer) == 0
    r.engine.propose(run.tokens[done - 1])
    r.engine.verify()
    assert not np.array_equal(r.logits(r.engine.row()[0]), run.rows[done])
    r.engine.next(r.sampler)
    assert set_vector(r.ctx, None, 0, 0, 0, 0) == 0
    again(r, run, done)


def embeddings(r: Rig, run: Run, done: int) -> None:
    """They go to the host with each decode: no step is queued behind a row whose embedding is asked for."""
    native.llama_set_embeddings(r.ctx, True)
    assert steps(r, run.tokens[done - 1], 1) == [run.tokens[done]]
    assert r.held == r.engine.n_past  # nothing is queued
    native.llama_set_embeddings(r.ctx, False)
    again(r, run, done)


def engine_anew(r: Rig, run: Run, done: int) -> None:
    r.detach()
    assert r.held == len(run.prompt) + done - 1
    assert native.llama_memory_seq_pos_max(r.memory, 1) == -1
    r.attach()
    r.engine.set_request(n_top=1)


class Does(NamedTuple):
    what: Callable[[Rig, Run, int], Any]
    taken: int = 0
    """Steps that are taken meanwhile."""
    dropped: int = 1
    more: int = 0
    """Tokens that the run is further on."""


def closed_and(what: Callable[[Rig, Run, int], Any]) -> Callable[[Rig, Run, int], None]:
    """Do it when the round is over: the step is all that is open."""

    def does(r: Rig, run: Run, done: int) -> None:
        assert r.engine.trim(r.engine.n_past)
        what(r, run, done)

    return does


DOES = {
    "nothing": Does(lambda *_: None, dropped=0),
    "commit": Does(lambda r, *_: r.engine.commit()),
    "other token": Does(other_token, dropped=2),
    "own draft": Does(own_draft, more=2),
    "own tree": Does(own_tree, more=2),
    "evaluates": Does(again),
    "rewind": Does(sampled_again, dropped=0),
    "proposes": Does(proposed_and_left, dropped=0),
    "checkpoint": Does(checkpointed, taken=2, dropped=2),
    "state": Does(whole_state),
    "state of one": Does(state_of_one),
    "saves the other": Does(saved_one),
    "clear": Does(cleared),
    "copy": Does(copied),
    "decode": Does(decoded),
    "remove": Does(removed),
    "clear later": Does(closed_and(cleared)),
    "remove later": Does(closed_and(removed)),
    "control vector": Does(control_vector, dropped=2),
    "embeddings": Does(embeddings),
}


@ON_TREES
@pytest.mark.parametrize("name", DOES)
@pytest.mark.parametrize("before", [1, 2, 7])
def test_the_text_goes_on_whatever_a_caller_does(rig, run_of, name, before):
    """Steps of either graph are queued when it happens; those behind it are queued again."""
    r, run, does = large(rig), run_of("moe-mtp"), DOES[name]
    assert steps(r, begin(r), before) == run.tokens[1 : before + 1]
    assert queued(r) == (before - 1, 0)
    done = before + 1
    does.what(r, run, done)
    done += does.more
    assert steps(r, run.tokens[done - 1], 20) == run.tokens[done : done + 20]
    kept = does.dropped == 0  # the step that was queued before
    assert queued(r) == (before - 1 + does.taken + 19 + kept, does.dropped)
    r.engine.commit()
    assert queued(r)[1] == does.dropped + 1
    check_memory(r)
    check_plain(r, run, done + 20)


@ON_TREES
def test_an_engine_that_goes_drops_its_step(rig, run_of):
    r, run = large(rig), run_of("moe-mtp")
    assert steps(r, begin(r), 5) == run.tokens[1:6]
    engine_anew(r, run, 6)
    assert steps(r, run.tokens[5], 20) == run.tokens[6:26]
    r.engine.commit()
    check_plain(r, run, 26)


@ON_TREES
def test_random_callers(rig, run_of):
    r, run = large(rig), run_of("moe-mtp")
    chance = random.Random(7)
    begin(r)
    done, taken, seen = 1, 0, set()
    for _ in range(150):
        n = chance.randrange(5)
        if done + n > 40:
            again(r, run, 1)
            done = 1
        before = queued(r)[0]
        assert steps(r, run.tokens[done - 1], n) == run.tokens[done : done + n]
        taken += queued(r)[0] - before
        done += n
        name = chance.choice(sorted(DOES))
        seen.add(name)
        DOES[name].what(r, run, done)
        done += DOES[name].more
    assert seen == DOES.keys()
    assert taken > 50
    r.engine.commit()
    check_memory(r)
    check_plain(r, run, done, 5)
