"""Others change the context while a round is open, decodes fail: a status, never a wrong text."""

from __future__ import annotations

import ctypes
import pickle

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.errors import DraftwoodError

from tests.model.rig import PROMPT, check_plain, follow

lib = _capi.lib


@pytest.fixture(params=["tree", "snapshots"])
def open_round(request, rig, run_of):
    """A rig with a verified, fully right draft of three tokens, of which one row was sampled, and its run."""
    run = run_of("moe-mtp")
    r = rig(drafter=_capi.DRAFTER_MTP, n_rs_seq=5 if request.param == "snapshots" else 0)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    r.engine.verify()
    r.engine.next(r.sampler)
    return r, run


@pytest.mark.parametrize("then", ["raw decode", "commit", "save", "close", "propose"])
@pytest.mark.parametrize("how", ["clear", "remove"])
def test_the_memory_is_cleared(open_round, how, then):
    r, run = open_round
    if how == "clear":
        native.llama_memory_clear(r.memory, True)
    else:
        assert native.llama_memory_seq_rm(r.memory, 0, -1, -1)
    if then == "raw decode":
        assert r.raw_decode(PROMPT) == 0
    elif then == "commit":
        lib.dw_commit(r.engine._handle)
    elif then == "save":
        r.save()
    elif then == "propose":
        lib.dw_propose(r.engine._handle, 5, 3, ctypes.byref(ctypes.c_int32()))
    else:
        r.detach()
        r.attach()
    assert r.start() == run.tokens[0]
    check_plain(r, run, 1)


def test_a_state_is_loaded_over_it(open_round):
    r, run = open_round
    other = r.save()  # ends the round
    r.engine.propose_given(run.tokens[1], run.tokens[2:5])
    r.engine.verify()
    r.load(other)
    r.engine.trim(r.held)
    check_plain(r, run, 2)


def test_going_back_behind_a_tree_verify_is_refused(rig, run_of):
    """A context with some snapshots, but fewer than drafts: the verify wrote none of them."""
    run = run_of("moe-mtp")
    r = rig(drafter=_capi.DRAFTER_MTP, n_rs_seq=3)
    r.start()
    done = follow(r, run, 1, 5)
    for back in (1, 2, 3):
        assert not r.engine.trim(r.held - back)
    check_plain(r, run, done)


def test_given_drafts_need_a_ubatch_too(rig):
    r = rig("moe-plain", drafter=_capi.DRAFTER_NONE, draft_tokens=6, n_ubatch=4)
    r.engine.eval(PROMPT[:4], 0)
    draft = (_capi.Token * 6)(*range(6))
    assert lib.dw_propose_given(r.engine._handle, 5, draft, 6) == _capi.ERR_UNSUPPORTED
    assert b"n_ubatch is 4; 6 draft tokens need at least 7" in lib.dw_last_error()


@pytest.mark.parametrize("layers", [2, 6, 7, 11])
def test_any_share_of_recurrent_layers(rig, gguf, layers):
    changes = {"layers": layers, "attention_interval": min(4, layers)}
    path = gguf("moe-mtp", **changes)
    plain = rig(path)
    run = plain.reference(60)
    r = rig(path, drafter=_capi.DRAFTER_MTP)
    r.start()
    done = 1
    for accept in range(6):
        done = follow(r, run, done, accept)
    check_plain(r, run, done)


def test_after_a_failed_verify_the_context_is_as_before(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=_capi.DRAFTER_MTP)
    r.start()
    nodes = iter(range(10**6))
    for last in (0, 20, 100):  # graph nodes that run before the abort
        abort = native.ggml_abort_callback(lambda _, last=last: next(nodes) >= last)
        native.llama_set_abort_callback(r.ctx, abort, None)
        r.engine.propose_given(run.tokens[0], run.tokens[1:4])
        with pytest.raises(DraftwoodError, match="llama_decode returned 2"):
            r.engine.verify()
        native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
        assert r.engine.n_past == r.held == len(PROMPT)
    assert follow(r, run, 1, 3) == 5
    check_plain(r, run, 5)


@pytest.mark.parametrize("call", ["eval", "verify"])
def test_after_a_failed_decode_only_a_reset_helps(rig, run_of, call):
    """A verify with snapshots writes the state as it goes."""
    run = run_of("moe-mtp")
    r = rig(drafter=_capi.DRAFTER_MTP, n_rs_seq=5)
    r.start()
    abort = native.ggml_abort_callback(lambda _: True)
    native.llama_set_abort_callback(r.ctx, abort, None)
    if call == "verify":
        r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    failing = r.engine.verify if call == "verify" else lambda: r.engine.eval(run.tokens[:3], len(PROMPT))
    with pytest.raises(DraftwoodError):
        failing()
    native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
    for attempt in (
        lambda: r.engine.propose_given(run.tokens[0], []),
        lambda: r.engine.eval(run.tokens[:1], r.held),
    ):
        with pytest.raises(DraftwoodError, match="dw_reset"):
            attempt()
    assert not r.engine.trim(r.held)
    assert r.start() == run.tokens[0]
    check_plain(r, run, 1)


def test_a_commit_is_not_aborted(open_round):
    r, run = open_round
    abort = native.ggml_abort_callback(lambda _: True)
    native.llama_set_abort_callback(r.ctx, abort, None)
    r.engine.commit()
    native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
    check_plain(r, run, 2)


def test_a_pickled_llama_keeps_every_option(gguf):
    given = {"speculation": "mtp", "draft_tokens": 3, "draft_p_min": 0.25, "exact": False}
    llm = Llama(gguf("moe-mtp"), n_ctx=64, verbose=False, **given)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy._options == llm._options
    for each in (llm, copy):
        each.close()
