"""Steps that are queued before their token is known: the same text, and a memory that never shows them.

On a CPU a queued step is computed at once: what is tested is whose rows, states and results are whose.
Contract: src/llama/memory_fork.h, dw_params.queue_steps.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree
from draftwood.errors import ContextFullError

from bench.testing_api import fuse, verify_all
from tests.model.engine.calls import HYBRIDS, MTP, NONE
from tests.model.engine.queued import ON_TREES, QUEUES, begin, check_memory, large, queued, steps
from tests.model.engine.test_others import save_one
from tests.model.engine.test_tree_aborts import aborting
from tests.model.rig import PROMPT, Rig, write_llama
from tests.ops import ggml_graph as ggml


@ON_TREES
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


def test_other_architectures_wait_for_each_step(gguf, tmp_path):
    """They may read a token elsewhere than in its embedding, or have another memory."""
    write_llama(tmp_path / "llama.gguf", gguf("moe-mtp"))
    plain, r = Rig(tmp_path / "llama.gguf"), Rig(tmp_path / "llama.gguf", **QUEUES)
    run = plain.reference(40)
    assert [begin(r), *steps(r, run.tokens[0], 39)] == run.tokens
    assert queued(r) == (0, 0)
    for each in (plain, r):
        each.close()


@ON_TREES
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
    r, run = rig(**{**QUEUES, **settings}), run_of("moe-mtp")
    last = begin(r)
    for i in range(1, 20):
        r.engine.propose(last, 0)
        r.engine.verify()
        last = r.engine.next(r.sampler)
        assert last == run.tokens[i]
    assert queued(r) == (0, 0)


@ON_TREES
@pytest.mark.parametrize(
    "request_of",
    [
        {"temperature": 0.8, "n_top": 40},
        {"temperature": 0.8, "n_top": 1},
        {"n_top": 0},
        {"n_top": 2},
        {"n_top": 100},
    ],
    ids=str,
)
def test_other_requests_wait_for_each_step(rig, run_of, request_of):
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    r.engine.set_request(**request_of)
    assert steps(r, last, 20) == run.tokens[1:21]
    assert queued(r) == (0, 0)
    r.engine.set_request(n_top=1)
    assert steps(r, run.tokens[20], 20) == run.tokens[21:41]
    assert queued(r) == (19, 0)


@ON_TREES
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


@ON_TREES
def test_two_graphs_take_turns(rig, run_of):
    """None is built anew: each writes the cell that the other one reads."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    steps(r, begin(r), 3)
    before = native.llama_perf_context(r.ctx).n_reused
    assert steps(r, run.tokens[3], 40) == run.tokens[4:44]
    assert native.llama_perf_context(r.ctx).n_reused - before == 40


@ON_TREES
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


@ON_TREES
def test_drafts_have_the_room_that_they_have_without_a_queued_step(rig, run_of):
    plain, r = rig(tree_budget=8), large(rig)
    n = native.llama_n_ctx_seq(plain.ctx) - len(PROMPT) - 3
    run = plain.reference(n + 2)
    tree = Tree((run.tokens[n], run.wrong(n), run.tokens[n + 1]), (-1, 0, 0))
    for each in (plain, r):
        assert [begin(each), *steps(each, run.tokens[0], n)] == run.tokens[: n + 1]
        each.engine.propose_tree(tree)
        each.engine.verify()
        assert each.engine.next(each.sampler) == run.tokens[n + 1]
    assert queued(r) == (n - 1, 1)


@ON_TREES
def test_a_saved_text_is_that_of_steps_that_wait(rig):
    """Byte for byte, the token of each cell too."""
    plain, r = rig(**{**QUEUES, "queue_steps": False}), rig(**QUEUES)
    for each in (plain, r):
        steps(each, begin(each), 30)
    assert bytes(save_one(plain, 0)) == bytes(save_one(r, 0))
    assert queued(r) == (29, 1)


@ON_TREES
def test_no_state_is_cleared_for_a_step(rig):
    """As for a sequence that has none. The nodes are there, and have no elements."""
    sizes: list[int] = []

    @native.ggml_backend_sched_eval_callback
    def seen(tensor: int, asks: bool, _: Any) -> bool:
        if asks and ggml.base.ggml_op_desc(tensor) == b"SCALE":
            sizes.append(ggml.base.ggml_nelements(ctypes.c_void_p(tensor)))
        return not asks

    r = rig(**QUEUES, cb_eval=seen)
    last = begin(r)
    cleared = [size for size in sizes if size > 0]
    assert cleared, "the prompt's states are"
    sizes.clear()
    steps(r, last, 10)
    assert queued(r)[0] == 9
    assert sizes
    assert max(sizes) < max(cleared)


@ON_TREES
@pytest.mark.parametrize("reads_logits", [False, True])
def test_llama_cpp_counts_steps_as_steps(rig, reads_logits):
    """Each once, also where somebody waits for all that is queued."""
    for r in (rig(**{**QUEUES, "queue_steps": False}), rig(**QUEUES)):
        last = begin(r)
        native.llama_perf_context_reset(r.ctx)
        for _ in range(30):
            (last,) = steps(r, last, 1)
            if reads_logits:
                r.logits(0)
        r.engine.commit()
        native.llama_synchronize(r.ctx)
        counted = native.llama_perf_context(r.ctx)
        assert (counted.n_eval, counted.n_p_eval) == (30, 1)  # llama.cpp says 1 for 0


# ---- other sequences of the context ----


@ON_TREES
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


@ON_TREES
@pytest.mark.parametrize("n_others", [1, 3])
def test_others_may_clear_their_empty_sequences(rig, run_of, n_others):
    """As a server does before a prompt. The last sequence holds the state before the step."""
    r, run = rig(**{**QUEUES, "n_seq_max": n_others + 2}), run_of("moe-mtp")
    last = begin(r)
    assert steps(r, last, 5) == run.tokens[1:6]
    for seq in range(1, n_others + 1):
        assert native.llama_memory_seq_rm(r.memory, seq, -1, -1)
        assert native.llama_memory_seq_rm(r.memory, seq, 0, -1)
    r.engine.propose_given(run.wrong(5), [])  # the step is dropped
    r.engine.verify()
    r.engine.next(r.sampler)
    assert queued(r) == (4, 1)
    r.engine.commit()
    assert r.held == r.engine.n_past


@ON_TREES
def test_a_reset_of_the_other_sequence_drops_the_step(rig, run_of):
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    other = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    assert steps(r, last, 5) == run.tokens[1:6]
    other.reset()
    r.engine.commit()
    check_memory(r)
    assert steps(r, run.tokens[5], 5) == run.tokens[6:11]
    other.close()


@ON_TREES
@pytest.mark.parametrize("n", [17, 30])
def test_a_state_that_is_loaded_into_the_other_sequence_stays_there(rig, run_of, n):
    r, run = rig(**QUEUES), run_of("moe-mtp")
    r.engine.reset()
    batch = list(range(5, 5 + n))
    other = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    other.eval(batch, 0)
    state = save_one(r, 1)
    other.reset()
    assert steps(r, begin(r), 5) == run.tokens[1:6]
    assert native.llama_state_seq_set_data(r.ctx, state, len(state), 1) > 0
    assert queued(r) == (4, 1)
    assert steps(r, run.tokens[5], 5) == run.tokens[6:11]
    r.engine.commit()
    assert r.held == r.engine.n_past
    assert native.llama_memory_seq_pos_max(r.memory, 1) == n - 1
    assert bytes(save_one(r, 1)) == bytes(state)
    other.close()


@ON_TREES
def test_two_engines_count_their_own_steps(rig, run_of):
    """One at a time has a step queued; a verify of both drops it."""
    r, run = rig(**{**QUEUES, "n_seq_max": 3}), run_of("moe-mtp")
    assert steps(r, begin(r), 5) == run.tokens[1:6]
    other = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    other.set_request(n_top=1)
    other.eval(PROMPT, 0)
    assert queued(r) == (4, 1)
    assert other.next(r.sampler) == run.tokens[0]
    for engine, last in ((r.engine, run.tokens[5]), (other, run.tokens[0])):
        engine.propose(last)
    verify_all([r.engine, other])
    assert [each.next(r.sampler) for each in (r.engine, other)] == [run.tokens[6], run.tokens[1]]
    assert steps(r, run.tokens[6], 4) == run.tokens[7:11]
    other.propose(run.tokens[1])
    other.verify()  # drops the first one's, and queues its own
    assert other.next(r.sampler) == run.tokens[2]
    assert steps(r, run.tokens[10], 4) == run.tokens[11:15]
    assert queued(r) == (4 + 3 + 3, 2)
    stats = other.stats()
    assert (stats.queued_steps, stats.dropped_steps) == (0, 1)
    other.close()
    r.engine.commit()
    assert r.held == r.engine.n_past


@ON_TREES
def test_an_engine_with_a_drafter_that_comes_drops_the_step(rig, run_of):
    """It reads hidden states, for which llama.cpp makes its output buffer anew."""
    settings: dict[str, Any] = {**QUEUES, "n_seq_max": 3}
    r, run = rig(**settings, engine=False, drafter=MTP), run_of("moe-mtp")
    drafts = {**r.settings, "drafter": MTP}
    r.settings["drafter"] = NONE
    r.attach()
    last = begin(r)
    Engine(r.ctx, r.params, **drafts, seq_id=1).close()  # makes the state that verifies of drafts need
    assert steps(r, last, 5) == run.tokens[1:6]
    other = Engine(r.ctx, r.params, **drafts, seq_id=1)
    assert steps(r, run.tokens[5], 5) == run.tokens[6:11]
    assert np.array_equal(r.logits(0), run.rows[10])
    assert queued(r) == (8, 1)
    other.close()


# ---- steps that fail ----


@ON_TREES
@pytest.mark.parametrize("part", [0.0, 0.4, 0.9])
def test_a_step_that_is_aborted_is_not_there(rig, run_of, part):
    """Its row is taken back, and the row before it is whole; then steps are queued again."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    with aborting(r, 1 << 30) as nodes:
        steps(r, last, 1)
    of_a_step = len(nodes) // 2  # it and the one behind it were computed
    for done in (2, 3, 8):
        begin(r)
        assert steps(r, run.tokens[0], done - 1) == run.tokens[1:done]
        r.engine.propose(run.tokens[done - 1])
        with aborting(r, int(part * (of_a_step - 2))) as nodes:
            r.engine.verify()
        assert 0 < len(nodes) < of_a_step
        assert np.array_equal(r.logits(0), run.rows[done])
        assert r.engine.next(r.sampler) == run.tokens[done]
        assert r.held == r.engine.n_past
        before = queued(r)[0]
        assert steps(r, run.tokens[done], 12) == run.tokens[done + 1 : done + 13]
        assert queued(r)[0] == before + 11
