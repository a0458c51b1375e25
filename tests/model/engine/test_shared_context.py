"""Others at the engine's context: they decode, save, load and clear it, in the middle of a round too."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from tests.model.engine.calls import MTP, error_of, lib
from tests.model.rig import PROMPT, Rig, check_plain, follow, hooked_sampler


@pytest.mark.parametrize("positions", ["given", "left to llama.cpp"])
@pytest.mark.parametrize("take", range(5))
def test_raw_decode_in_mid_round(started, take, positions):
    """A llama_decode by others lands behind the accepted rows, and its logits are right."""
    r, run = started
    r.open_round(run, take=take)
    kept = max(take, 1)
    at = len(PROMPT) + kept if positions == "given" else None
    assert r.raw_decode([run.tokens[kept]], at) == 0
    assert r.held == len(PROMPT) + kept + 1
    assert np.array_equal(r.logits(-1), run.rows[kept + 1])
    assert r.engine.row() is None
    assert r.engine.trim(r.held)
    check_plain(r, run, kept + 2)


@pytest.mark.parametrize("take", range(5))
def test_state_save_in_mid_round(started, rig, take):
    r, run = started
    r.open_round(run, take=take)
    state = r.save()
    done = max(take, 1) + 1
    assert r.held == r.engine.n_past == len(PROMPT) + done - 1
    check_plain(r, run, done)
    r.load(state)
    assert r.engine.row() is None
    assert r.engine.trim(r.held)
    check_plain(r, run, done)
    other = rig(drafter=MTP)
    other.load(state)
    assert other.engine.trim(other.held)
    check_plain(other, run, done)


def test_loaded_state_has_no_snapshots(started):
    r, run = started
    r.engine.eval(run.tokens[:5], len(PROMPT))
    state = r.save()
    r.load(state)
    assert not r.engine.trim(r.held - 1)
    assert r.engine.trim(r.held)
    check_plain(r, run, 6)


def test_drafting_over_a_moved_context_is_refused(started):
    r, run = started
    r.raw_decode([run.tokens[0]])
    text = error_of(lib.dw_propose(r.engine._handle, 1, 5, ctypes.byref(ctypes.c_int32())), _capi.ERR_STATE)
    assert "12" in text
    assert "13" in text
    assert "dw_trim or dw_reset" in text
    assert r.engine.trim(13)
    check_plain(r, run, 2)


def test_raw_decode_between_propose_and_verify(started):
    r, run = started
    r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    assert r.raw_decode([run.tokens[0]]) == 0
    error_of(lib.dw_verify(r.engine._handle), _capi.ERR_STATE)
    assert r.held == 13
    assert r.engine.trim(13)
    check_plain(r, run, 2)


def test_others_clear_the_memory_in_mid_round(rig, run_of):
    r = rig(drafter=MTP)
    r.start()
    r.engine.propose_given(5, [6, 7])
    r.engine.verify()
    native.llama_memory_clear(r.memory, True)
    r.engine.reset()
    assert r.start() == run_of("moe-mtp").tokens[0]


def test_sampler_that_saves_the_state(rig, run_of):
    """A flush from inside dw_next, by a logits processor that saves, keeps the very row being sampled."""
    run = run_of("moe-mtp")
    for at in range(4):
        r = rig(drafter=MTP)
        r.start()
        states, calls = [], []

        def hook(r=r, at=at, states=states, calls=calls):
            calls.append(0)
            if len(calls) == at + 1:
                states.append((r.save(), r.held))

        chain = hooked_sampler(hook)
        r.open_round(run)
        for i in range(at + 1):
            assert r.engine.next(chain.sampler) == run.tokens[1 + i]
        r.engine.commit()
        assert r.engine.n_past == r.held == len(PROMPT) + at + 1
        check_plain(r, run, at + 2)
        state, held = states[0]
        assert held == len(PROMPT) + at + 1
        r.load(state)
        assert r.engine.trim(r.held)
        check_plain(r, run, at + 2)
        chain.close()


def test_an_engine_that_cuts_chains_back_beside_one_of_trees(gguf):
    """Snapshots suffice for the drafts of one only: what a verify leaves is of its engine's kind."""
    texts = []
    for second, wrong in ((False, False), (False, True), (True, True)):
        r = Rig(gguf("moe-mtp"), draft_tokens=4, n_ubatch=64, n_rs_seq=4, n_seq_max=2, engine=False)
        settings = {**r.settings, "drafter": _capi.DRAFTER_GIVEN}
        engines = [Engine(r.ctx, r.params, **settings, seq_id=0)]
        if second:
            engines.append(Engine(r.ctx, r.params, **{**settings, "draft_tokens": 8}, seq_id=1))
        first = engines[0]
        assert "snapshots" in first.tree_refusal
        first.eval(list(PROMPT), 0)
        text = [first.next(r.sampler)]
        while len(text) < 16:
            first.propose_given(text[-1], [5, 6, 7] if wrong else [])
            first.verify()
            while first.row() is not None:
                text.append(first.next(r.sampler))
            first.commit()
        texts.append(text[:16])
        for engine in engines:
            engine.close()
        r.close()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("budget", [0, 8])
def test_memory_that_is_reserved_anew_in_a_verify(rig, run_of, budget):
    """After a change of adapters the next decode first builds a graph of n_ubatch rows: not a verify's."""
    run, r = run_of("moe-mtp"), rig(drafter=MTP, tree_budget=budget)
    r.start()
    done = 1
    for accept in (2, 0, 3, 1):
        assert native.llama_set_adapter_cvec(r.ctx, None, 0, 0, 0, 0) == 0
        done = follow(r, run, done, accept)
    check_plain(r, run, done)
