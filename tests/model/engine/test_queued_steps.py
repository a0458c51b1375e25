"""Steps that are queued before their token is known: the same text, and a memory that never shows them.

On a CPU a queued step is computed at once: what is tested is whose rows, states and results are whose.
Contract: src/llama/memory_fork.h, dw_params.queue_steps.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree
from draftwood.errors import ContextFullError

from bench.testing_api import fuse
from tests.model.engine.calls import HYBRIDS, MTP
from tests.model.engine.test_others import DISTURB, save_one
from tests.model.engine.test_tree_aborts import aborting
from tests.model.rig import PROMPT, Rig, Run, check_plain, write_llama

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

QUEUES: dict[str, Any] = {
    "results": _capi.RESULTS_TOP,
    "queue_steps": True,
    "n_seq_max": 2,
    "kv_unified": True,
}


def begin(r: Rig, prompt: tuple[int, ...] = PROMPT) -> int:
    """Start a greedy text whose steps are queued."""
    token = r.start(prompt)
    r.engine.set_request(n_top=1)
    return token


def steps(r: Rig, last: int, n: int) -> list[int]:
    """Take n plain steps as `Llama` does: a step stays queued between two of them."""
    taken = []
    for _ in range(n):
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(last)
        r.engine.verify()
        last = r.engine.next(r.sampler)
        assert r.engine.row() is None
        taken.append(last)
    return taken


def queued(r: Rig) -> tuple[int, int]:
    """Return how many queued steps were taken, and how many were dropped."""
    stats = r.engine.stats()
    return stats.queued_steps, stats.dropped_steps


def check_memory(r: Rig) -> None:
    """The context holds what the engine says and nothing of a step."""
    assert r.held == r.engine.n_past
    assert native.llama_memory_seq_pos_max(r.memory, 1) == -1


@pytest.mark.parametrize("where", [0, 2], ids=["", "fused"])
@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_the_text_is_that_of_steps_that_wait(rig, preset, flash, where):
    plain = rig(preset, flash=flash)
    fuse(plain.engine, where)
    run = plain.reference(100)
    r = rig(preset, flash=flash, **QUEUES)
    fuse(r.engine, where)
    for text in range(1, 4):
        assert [begin(r), *steps(r, run.tokens[0], 99)] == run.tokens
        assert queued(r) == (98 * text, text - 1)
        r.engine.commit()
        assert queued(r) == (98 * text, text)
        check_memory(r)


def test_a_model_without_recurrent_layers_needs_no_second_sequence(rig, gguf, tmp_path):
    write_llama(tmp_path / "llama.gguf", gguf("moe-mtp"))
    one = {**QUEUES, "n_seq_max": 1, "kv_unified": False}
    plain, r = Rig(tmp_path / "llama.gguf"), Rig(tmp_path / "llama.gguf", **one)
    run = plain.reference(60)
    assert [begin(r), *steps(r, run.tokens[0], 59)] == run.tokens
    assert queued(r) == (58, 0)
    r.engine.commit()
    check_plain(r, run, 60, 0)
    assert r.held == r.engine.n_past
    for each in (plain, r):
        each.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"queue_steps": False},
        {"n_seq_max": 1},  # no room for a second state
        {"results": _capi.RESULTS_AUTO},  # a CPU's best tokens are on the host
        {"drafter": MTP},
    ],
    ids=str,
)
def test_other_engines_wait_for_each_step(rig, run_of, settings):
    r = rig(**{**QUEUES, **settings})
    last = begin(r)
    while len(taken := [last]) < 20:
        r.engine.propose(taken[-1], 0)
        r.engine.verify()
        taken.append(r.engine.next(r.sampler))
        last = taken[-1]
        if r.engine.stats().rounds == 20:
            break
    assert queued(r) == (0, 0)


@pytest.mark.parametrize("request_of", [{}, {"temperature": 0.8, "n_top": 40}, {"n_top": 0}], ids=str)
def test_other_requests_wait_for_each_step(rig, run_of, request_of):
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    r.engine.set_request(**request_of)
    assert steps(r, last, 20) == run.tokens[1:21]
    assert queued(r) == (0, 0)
    r.engine.set_request(n_top=1)
    assert steps(r, run.tokens[20], 20) == run.tokens[21:41]
    assert queued(r) == (19, 0)


# ---- what a caller does while a step is queued ----


def other_token(r: Rig, run: Run, done: int) -> None:
    """Go on with another token than was sampled, and come back to the run by an evaluation."""
    r.engine.propose(run.wrong(done))
    r.engine.verify()
    r.engine.next(r.sampler)
    again(r, run, done)


def own_draft(r: Rig, run: Run, done: int) -> None:
    r.engine.propose_given(run.tokens[done - 1], [run.tokens[done], run.wrong(done + 1)])
    r.engine.verify()
    assert [r.engine.next(r.sampler) for _ in range(2)] == run.tokens[done : done + 2]
    again(r, run, done)


def own_tree(r: Rig, run: Run, done: int) -> None:
    tree = Tree((run.tokens[done - 1], run.wrong(done), run.tokens[done]), (-1, 0, 0))
    r.engine.propose_tree(tree)
    r.engine.verify()
    assert [r.engine.next(r.sampler) for _ in range(2)] == run.tokens[done : done + 2]
    again(r, run, done)


def again(r: Rig, run: Run, done: int) -> None:
    """Evaluate the run up to its `done`-th token again."""
    r.engine.reset()
    check_memory(r)
    r.engine.eval([*run.prompt, *run.tokens[: done - 1]], 0)
    assert r.engine.next(r.sampler) == run.tokens[done - 1]


def sampled_again(r: Rig, run: Run, done: int) -> None:
    assert r.engine.trim(r.engine.n_past)  # the round is over, its step still queued
    assert r.engine.rewind()
    assert np.array_equal(r.logits(r.engine.row()[0]), run.rows[done - 1])
    assert r.engine.next(r.sampler) == run.tokens[done - 1]


def proposed_and_left(r: Rig, run: Run, done: int) -> None:
    r.engine.propose(run.tokens[done - 1])


def whole_state(r: Rig, run: Run, done: int) -> None:
    r.load(r.save())
    again(r, run, done)


def checkpointed(r: Rig, run: Run, done: int) -> None:
    r.engine.checkpoint()
    check_memory(r)


def cleared(r: Rig, run: Run, done: int) -> None:
    """By somebody who says nothing: the engine finds it out."""
    native.llama_memory_clear(r.memory, True)
    again(r, run, done)


def copied(r: Rig, run: Run, done: int) -> None:
    """The copy takes the queued step with it, as rows of an open round; the text goes on after a reset."""
    native.llama_memory_seq_cp(r.memory, 0, 1, -1, -1)
    native.llama_memory_seq_rm(r.memory, 1, -1, -1)
    again(r, run, done)


def disturbed(what: str) -> Callable[[Rig, Run, int], None]:
    def disturb(r: Rig, run: Run, done: int) -> None:
        DISTURB[what](r, 0)
        again(r, run, done)

    return disturb


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


def engine_anew(r: Rig, run: Run, done: int) -> None:
    r.detach()
    assert r.held == len(run.prompt) + done - 1
    assert native.llama_memory_seq_pos_max(r.memory, 1) == -1
    r.attach()
    r.engine.set_request(n_top=1)


DOES: dict[str, Callable[[Rig, Run, int], None]] = {
    "nothing": lambda *_: None,
    "commit": lambda r, *_: r.engine.commit(),
    "other token": other_token,
    "own draft": own_draft,
    "own tree": own_tree,
    "evaluates": again,
    "rewind": sampled_again,
    "proposes": proposed_and_left,
    "checkpoint": checkpointed,
    "state": whole_state,
    "clear": cleared,
    "copy": copied,
    "control vector": control_vector,
    "engine anew": engine_anew,
    "save one": lambda r, *_: save_one(r, 0) and None,
    "decode": disturbed("decode"),
    "load": disturbed("load"),
    "remove": disturbed("remove"),
}
LARGE = {"checkpoint_bytes": 1 << 22, "tree_budget": 8}


def large(rig: Any, **settings: Any) -> Rig:
    r: Rig = rig(**QUEUES, engine=False, **settings)
    r.settings |= LARGE
    r.attach()
    return r


@pytest.mark.parametrize("what", DOES)
@pytest.mark.parametrize("before", [1, 2, 7])
def test_the_text_goes_on_whatever_a_caller_does(rig, run_of, what, before):
    """Steps of either graph are queued when it happens; those behind it are queued again."""
    r, run = large(rig), run_of("moe-mtp")
    assert steps(r, begin(r), before) == run.tokens[1 : before + 1]
    done = before + 1
    DOES[what](r, run, done)
    assert steps(r, run.tokens[done - 1], 20) == run.tokens[done : done + 20]
    taken, dropped = queued(r)
    assert taken >= 19
    assert dropped <= 2
    r.engine.commit()
    check_memory(r)
    check_plain(r, run, done + 20)


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
        what = chance.choice(sorted(DOES))
        seen.add(what)
        DOES[what](r, run, done)
    assert seen == DOES.keys()
    assert taken > 150
    r.engine.commit()
    check_memory(r)
    check_plain(r, run, done, 5)


def test_rows_of_a_step_have_their_logits_though_the_next_one_is_queued(rig, run_of):
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    for i in range(1, 40):
        r.engine.propose(last)
        r.engine.verify()
        assert np.array_equal(r.logits(0), run.rows[i])
        last = r.engine.next(r.sampler)
        assert np.array_equal(r.logits(0), run.rows[i])
        assert last == run.tokens[i]
    assert queued(r) == (38, 0)


def test_two_graphs_take_turns(rig, run_of):
    """None is built anew: each writes the cell that the other one reads."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    steps(r, begin(r), 3)
    before = native.llama_perf_context(r.ctx).n_reused
    assert steps(r, run.tokens[3], 40) == run.tokens[4:44]
    assert native.llama_perf_context(r.ctx).n_reused - before == 40


def test_the_context_can_be_filled(rig):
    """To its last position, as without queued steps."""
    plain, r = rig(), rig(**QUEUES)
    n = native.llama_n_ctx_seq(plain.ctx) - len(PROMPT)
    assert native.llama_n_ctx_seq(r.ctx) - len(PROMPT) == n
    run = plain.reference(n + 1)
    assert [begin(r), *steps(r, run.tokens[0], n)] == run.tokens
    assert queued(r) == (n - 1, 0)
    r.engine.propose(run.tokens[n])
    with pytest.raises(ContextFullError):
        r.engine.verify()


def test_a_sequence_that_is_in_use_lends_no_state(rig, run_of):
    """With both in use steps wait; once the second is free again they are queued."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    other = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    other.eval([5, 6, 7], 0)
    assert steps(r, last, 5) == run.tokens[1:6]
    assert queued(r) == (0, 0)
    other.reset()
    assert steps(r, run.tokens[5], 5) == run.tokens[6:11]
    assert queued(r) == (4, 0)
    other.eval([5, 6, 7], 0)  # the other one's decode drops what is queued
    assert queued(r) == (4, 1)
    assert r.held == r.engine.n_past
    assert native.llama_memory_seq_pos_max(r.memory, 1) == 2
    assert steps(r, run.tokens[10], 5) == run.tokens[11:16]
    other.close()


@pytest.mark.parametrize("part", [0.0, 0.4, 0.9])
def test_a_step_that_is_aborted_is_not_there(rig, run_of, part):
    """Its row is taken back, and the row before it can be sampled; then steps are queued again."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    with aborting(r, 1 << 30) as nodes:
        steps(r, last, 1)
    both = len(nodes)  # of a step and the one behind it
    for done in (2, 3, 8):
        begin(r)
        assert steps(r, run.tokens[0], done - 1) == run.tokens[1:done]
        with aborting(r, int(part * (both // 2 - 2))) as nodes:
            assert steps(r, run.tokens[done - 1], 1) == [run.tokens[done]]
        assert 0 < len(nodes) < both // 2
        assert r.held == r.engine.n_past
        before = queued(r)[0]
        assert steps(r, run.tokens[done], 12) == run.tokens[done + 1 : done + 13]
        assert queued(r)[0] == before + 11
