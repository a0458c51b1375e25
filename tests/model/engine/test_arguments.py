"""Null pointers, bad arguments and calls out of order: a status in words, and the round goes on."""

from __future__ import annotations

import ctypes
import math

import pytest
from draftwood.engine import _capi
from draftwood.engine.tree import Tree

from bench import testing_api
from tests.model.engine.calls import MTP, error_of, last_error, lib, params
from tests.model.rig import PROMPT, check_next, check_plain, follow


def call(name, engine, r):
    """Arguments with which `name` succeeds or fails for no reason of its pointers."""
    i32, tokens = ctypes.c_int32(), (_capi.Token * 64)(*PROMPT)
    limits = (ctypes.c_int32 * 1)(5)
    stats = _capi.Stats(struct_size=ctypes.sizeof(_capi.Stats))
    curve = _capi.Curve(struct_size=ctypes.sizeof(_capi.Curve))
    tree = Tree((1, 2), (-1, 0)).to_native()
    request = request_params()
    info = _capi.ModelInfo(struct_size=ctypes.sizeof(_capi.ModelInfo))
    table = {
        "dw_probe_model": [b"nowhere", ctypes.byref(info)],
        "dw_probe_drafter": [b"nowhere", b"nowhere"],
        "dw_engine_new": [
            r.ctx,
            ctypes.byref(r.params),
            ctypes.byref(params()),
            ctypes.byref(_capi.EngineHandle()),
        ],
        "dw_eval": [engine, tokens, 3, 0, False],
        "dw_propose": [engine, 1, 5, ctypes.byref(i32)],
        "dw_propose_all": [(_capi.EngineHandle * 1)(engine), tokens, limits, ctypes.byref(i32), 1],
        "dw_propose_given": [engine, 1, tokens, 2],
        "dw_propose_tree": [engine, ctypes.byref(tree)],
        "dw_set_request": [engine, ctypes.byref(request)],
        "dw_verify": [engine],
        "dw_verify_all": [(_capi.EngineHandle * 1)(engine), 1],
        "dw_row": [engine, ctypes.byref(i32), ctypes.byref(i32)],
        "dw_took": [engine, 1],
        "dw_next": [engine, r.sampler, ctypes.byref(i32)],
        "dw_next_scheduled": [engine, r.sampler, False, ctypes.byref(i32)],
        "dw_took_scheduled": [engine, 0],
        "dw_accepted_log_new": [engine, ctypes.byref(testing_api.AcceptedLogHandle())],
        "dw_limit_memory": [engine, 1 << 62, 1 << 62, 1 << 62],
        "dw_best": [r.ctx, 0, 3, tokens, (ctypes.c_float * 3)(), ctypes.byref(ctypes.c_bool())],
        "dw_fuse": [engine, 1],
        "dw_fused": [engine, False, (ctypes.c_int32 * len(testing_api.FUSED_PARTS))()],
        "dw_kq_masks": [
            *[engine, 1, 1, 1, True, False, tokens, tokens, 1],
            *[(ctypes.c_float * 1)(), (ctypes.c_float * 1)(), ctypes.c_bool()],
        ],
        "dw_end_of_cells": [engine, False, ctypes.byref(i32)],
        "dw_remove_from": [engine, 0, 0],
        "dw_replay": [engine, 1, ctypes.byref(ctypes.c_double())],
        "dw_rewind": [engine],
        "dw_last_row": [engine, ctypes.byref(i32)],
        "dw_commit": [engine],
        "dw_checkpoint": [engine],
        "dw_trim": [engine, 0],
        "dw_restore": [engine, ctypes.byref(i32), 4, 0],
        "dw_drafter_memory": [engine, ctypes.byref(ctypes.c_void_p())],
        "dw_reset": [engine],
        "dw_get_draft": [engine, tokens, ctypes.byref(i32)],
        "dw_get_tree": [engine, ctypes.byref(tree)],
        "dw_get_stats": [engine, ctypes.byref(stats)],
        "dw_get_curve": [engine, ctypes.byref(curve)],
        "dw_stats_reset": [engine],
    }
    return table[name]


NO_STATUS = (
    "dw_params_init",
    "dw_request_params_init",
    "dw_engine_free",
    "dw_n_past",
    "dw_draft_tokens",
    "dw_reach",
)
# tests: tests/unit/test_tree.py, test_cost_model.py, test_batch_model.py, test_thread_choice.py,
# test_recent_vocab.py, tests/model/test_expert_pool.py
WITHOUT_AN_ENGINE = (
    *("dw_tree_", "dw_cost_model_", "dw_batch_model_", "dw_load_", "dw_thread_choice_", "dw_expert_"),
    "dw_recent_vocab",
    *("dw_accepted_log_free", "dw_accepted_log_get"),
)
STATUS_CALLS = [
    name
    for name, (_, arguments) in {**_capi.SIGNATURES, **testing_api.SIGNATURES}.items()
    if arguments and name not in NO_STATUS and not name.startswith(WITHOUT_AN_ENGINE)
]


@pytest.mark.parametrize("name", STATUS_CALLS)
def test_null_pointers(rig, name):
    r = rig(drafter=MTP)
    good = call(name, r.engine._handle, r)
    for i, value in enumerate(good):
        if isinstance(value, (int, float)):
            continue
        text = error_of(getattr(lib, name)(*good[:i], None, *good[i + 1 :]), _capi.ERR_ARGUMENT)
        assert f"{name} was given a null pointer" in text


def test_what_is_known_without_an_engine():
    assert lib.dw_tree_refusal(None) is None


def test_an_empty_draft_may_be_null(rig, run_of):
    r = rig()
    run = run_of("moe-mtp")
    r.start()
    assert lib.dw_propose_given(r.engine._handle, run.tokens[0], None, 0) == _capi.OK
    r.engine.verify()
    assert r.sample()[0] == run.tokens[1]


def eval_call(tokens, n, at=None):
    def call(e):
        return lib.dw_eval(e, (_capi.Token * 200)(*tokens), n, lib.dw_n_past(e) if at is None else at, False)

    return call


def request_params(**changes):
    request = _capi.RequestParams()
    lib.dw_request_params_init(ctypes.byref(request))
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def request_call(**changes):
    return lambda e: lib.dw_set_request(e, ctypes.byref(request_params(**changes)))


def draft_call(tokens, n):
    return lambda e: lib.dw_propose_given(e, 1, (_capi.Token * 64)(*tokens), n)


# what is called, and what the error text must hold
BAD_CALLS = {
    "eval nothing": (eval_call([1], 0), "0 tokens"),
    "eval less than nothing": (eval_call([1], -3), "-3 tokens"),
    "eval over n_ubatch": (eval_call([1], 200), "n_ubatch = 128"),
    "eval before the start": (eval_call([1], 1, -1), "-1 positions"),
    "eval beyond the context": (eval_call([1], 1, 99999), "99999 positions"),
    "eval a token that is none": (eval_call([-5], 1), "token -5"),
    "eval a token over the vocabulary": (eval_call([384], 1), "token 384"),
    "propose a token that is none": (
        lambda e: lib.dw_propose(e, -5, 5, ctypes.byref(ctypes.c_int32())),
        "token -5",
    ),
    "draft a token that is none": (draft_call([2, -5], 2), "token -5"),
    "draft too much": (draft_call([], 6), "a draft of 6 tokens"),
    "draft less than nothing": (draft_call([], -1), "a draft of -1 tokens"),
    "a temperature below zero": (request_call(temperature=-0.5), "temperature is -0.5"),
    "a temperature that is none": (request_call(temperature=math.nan), "temperature is nan"),
    "an endless temperature": (request_call(temperature=math.inf), "temperature is inf"),
    "fewer than no tokens to sample from": (request_call(n_top=-1), "n_top is -1"),
    "trim before the start": (lambda e: lib.dw_trim(e, -1), "-1 positions"),
    "trim beyond the end": (lambda e: lib.dw_trim(e, 99), "99 positions"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_change_nothing(started, name):
    """DW_ERR_ARGUMENT in the middle of a round: the walk goes on as if the call had not been made."""
    r, run = started
    bad, found = BAD_CALLS[name]
    r.open_round(run, take=1)
    before = (r.engine.row(), r.engine.n_past, r.held)
    text = error_of(bad(r.engine._handle), _capi.ERR_ARGUMENT)
    assert found in text
    assert (r.engine.row(), r.engine.n_past, r.held) == before
    check_next(r, run, 2)
    r.engine.commit()
    check_plain(r, run, 3)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_engine_works_after_a_bad_argument(started, name):
    """The weaker promise of the above: whatever was changed, the next round is right, drafter included."""
    r, run = started
    done = follow(r, run, 1, 2)
    assert BAD_CALLS[name][0](r.engine._handle) == _capi.ERR_ARGUMENT
    assert r.engine.trim(len(PROMPT) + done - 1)
    assert r.engine.propose(run.tokens[done - 1]) == 5
    r.engine.verify()
    check_next(r, run, done)
    r.engine.commit()
    check_plain(r, run, done + 1)


@pytest.mark.parametrize(
    ("name", "struct", "call"),
    [
        ("dw_stats", _capi.Stats, "dw_get_stats"),
        ("dw_curve", _capi.Curve, "dw_get_curve"),
        ("dw_tree", _capi.Tree, "dw_get_tree"),
        ("dw_tree", _capi.Tree, "dw_propose_tree"),
        ("dw_request_params", _capi.RequestParams, "dw_set_request"),
        ("dw_model_info", _capi.ModelInfo, "dw_probe_model"),
    ],
)
def test_structs_need_their_size(rig, gguf, name, struct, call):
    """Nothing is written to a struct of another size."""
    r = rig()
    subject = gguf("moe-mtp").encode() if call == "dw_probe_model" else r.engine._handle
    raw = struct(struct_size=8)
    text = error_of(getattr(lib, call)(subject, ctypes.byref(raw)), _capi.ERR_ARGUMENT)
    assert f"{name} has struct_size 8" in text
    assert str(ctypes.sizeof(struct)) in text
    assert bytes(raw) == bytes(struct(struct_size=8))


def test_error_text_is_kept_until_the_next_failure(rig):
    r = rig()
    lib.dw_trim(r.engine._handle, -1)
    text = last_error()
    r.start()
    assert last_error() == text != ""


def test_calls_out_of_order(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    e, i32 = r.engine._handle, ctypes.c_int32()

    def refused(status, text):
        assert text in error_of(status, _capi.ERR_STATE)

    no_row = "dw_next without a row"
    refused(lib.dw_next(e, r.sampler, ctypes.byref(i32)), no_row)
    refused(lib.dw_took(e, 1), "dw_took without a row")
    refused(lib.dw_verify(e), "dw_verify without a dw_propose")
    refused(lib.dw_rewind(e), "evaluate a token first")
    assert lib.dw_commit(e) == _capi.OK
    assert r.engine.row() is None
    r.start()
    refused(lib.dw_next(e, r.sampler, ctypes.byref(i32)), no_row)
    r.engine.propose_given(run.tokens[0], [])
    refused(lib.dw_next(e, r.sampler, ctypes.byref(i32)), no_row)
    r.engine.verify()
    refused(lib.dw_verify(e), "dw_verify without a dw_propose")
    r.sample()
    refused(lib.dw_next(e, r.sampler, ctypes.byref(i32)), no_row)
    assert lib.dw_commit(e) == _capi.OK
    assert lib.dw_commit(e) == _capi.OK
    check_plain(r, run, 2)


@pytest.mark.parametrize("between", ["eval", "trim", "reset", "load", "failed verify"])
def test_a_proposal_does_not_outlive_what_it_stood_on(started, rig, between):
    r, run = started
    state = r.save()
    r.engine.eval(run.tokens[:3], len(PROMPT))
    r.engine.propose_given(run.tokens[3], run.tokens[4:6])
    if between == "eval":
        r.engine.eval([run.tokens[3]], len(PROMPT) + 3)
    elif between == "trim":
        # a state without snapshots goes back to nothing
        assert r.engine.trim(len(PROMPT) + 1 if rig.rollback == "snapshots" else 0)
    elif between == "reset":
        r.engine.reset()
    elif between == "load":
        r.load(state)
    else:
        r.engine.verify()
        r.engine.commit()
    held = r.held
    assert "dw_propose" in error_of(lib.dw_verify(r.engine._handle), _capi.ERR_STATE)
    assert r.held == held


def test_proposing_twice_takes_the_second(started):
    r, run = started
    r.engine.propose(run.tokens[0])
    first = r.engine.draft()
    r.engine.propose(run.wrong(0))
    r.engine.propose(run.tokens[0])
    assert r.engine.draft() == first
    r.engine.verify()
    assert r.sample()[0] == run.tokens[1]
