"""The C API, call by call: each status, each order of calls, and rows bit-equal to plain decoding.

The reference is a context without recurrent snapshots that decodes one token at a time (rig.Run). Drafts
come from an oracle, so that every accepted length really happens. Contract: src/include/draftwood.h.
"""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from draftwood import _capi
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaSampler
from draftwood.options import DEFAULT_DRAFT_P_MIN, DEFAULT_DRAFT_TOKENS, EXACT_ROWS

from tests.model.rig import PROMPT, check_plain, follow, hooked_sampler

lib = _capi.lib
MTP, NONE = _capi.DRAFTER_MTP, _capi.DRAFTER_NONE
HYBRIDS = ["moe-mtp", "dense-mtp"]


@pytest.fixture(params=["tree", "snapshots"])
def rig(request, rig):
    """Both ways back from rejected drafts: the state left alone in a verify, and snapshots of it."""

    def make(preset="moe-mtp", **settings):
        if request.param == "snapshots":
            settings = {"n_rs_seq": settings.get("draft_tokens", 5), **settings}
        return rig(preset, **settings)

    make.rollback = request.param
    return make


def last_error() -> str:
    return lib.dw_last_error().decode()


def error_of(status: int, expected: int) -> str:
    assert status == expected, f"status {status}, expected {expected}; last error: {last_error()}"
    return last_error()


# --- exactness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_every_accepted_length(rig, run_of, preset, drafter):
    run = run_of(preset)
    r = rig(preset, drafter=drafter)
    for accept in range(6):
        for take in range(1, accept + 2):
            assert r.start() == run.tokens[0]
            done = follow(r, run, 1, accept, take)
            check_plain(r, run, done)


@pytest.mark.parametrize("preset", [*HYBRIDS, "moe-plain", "odd", "much-attention", "deep"])
def test_long_walk_of_mixed_rounds(rig, run_of, preset):
    run = run_of(preset)
    r = rig(preset, drafter=MTP if preset != "moe-plain" else NONE)
    r.start()
    chance, done = random.Random(1), 1
    while done < 150:
        accept = chance.randrange(6)
        done = follow(r, run, done, accept, chance.choice([None, None, chance.randrange(1, accept + 2)]))
    check_plain(r, run, done)
    stats = r.engine.stats()
    assert 0 < stats.accepted < stats.drafted


def test_longest_draft(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, draft_tokens=_capi.MAX_DRAFT)
    for accept in (0, 1, 31, 62, 63):
        r.start()
        done = follow(r, run, 1, accept, depth=_capi.MAX_DRAFT)
        check_plain(r, run, done)


def test_no_consumer_at_all(rig, run_of):
    """A round whose rows nobody samples keeps its root, which was emitted before."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    done = follow(r, run, 1, 5, take=0)
    check_plain(r, run, done + 1)


def test_drafts_do_not_depend_on_how_the_prefix_came(rig, run_of):
    """The drafter saw only accepted pairs: it proposes what it would after evaluating the prefix anew."""
    run = run_of("planted-moe")
    fresh, r = rig("planted-moe", drafter=MTP), rig("planted-moe", drafter=MTP)
    r.start()
    chance, done, drafts = random.Random(2), 1, 0
    for _ in range(12):
        done = follow(r, run, done, chance.randrange(6))
        fresh.engine.reset()
        fresh.engine.eval([*run.prompt, *run.tokens[: done - 1]], 0)
        drafts += fresh.engine.propose(run.tokens[done - 1])
        assert r.engine.propose(run.tokens[done - 1]) == len(fresh.engine.draft())
        assert r.engine.draft() == fresh.engine.draft()
    assert drafts == 60


def test_own_drafts_are_accepted_and_exact(rig, run_of):
    run = run_of("planted-moe")
    r = rig("planted-moe", drafter=MTP)
    last, done = r.start(), 1
    while done < 120:
        r.engine.propose(last)
        r.engine.verify()
        while r.engine.row() is not None:
            last, logits = r.sample()
            assert last == run.tokens[done]
            assert np.array_equal(logits, run.rows[done])
            done += 1
    assert r.engine.stats().tokens_per_round > 1.5


@pytest.mark.parametrize("n", [1, 2, 5, 7, 63, 64])
def test_eval_rows_equal_single_steps(rig, run_of, n):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.engine.eval(run.tokens[:n], len(PROMPT), all_logits=True)
    for i in range(n):
        assert np.array_equal(r.logits(i), run.rows[i + 1]), f"row {i}"
    check_plain(r, run, n + 1)


def test_attention_only_models_roll_back_anywhere(rig, llama_arch):
    """Their memory can be cut at any position: given drafts need no snapshots, and every trim is exact."""
    r = rig(llama_arch, n_rs_seq=0)
    run = r.reference(120)
    for accept in range(6):
        r.start()
        done = follow(r, run, 1, accept)
        check_plain(r, run, done)
    text = [*run.prompt, *run.tokens]
    r.engine.reset()
    r.engine.eval(text[:60], 0)
    for keep in (59, 50, 50, 20, 13):
        assert r.engine.trim(keep)
        assert r.held == r.engine.n_past == keep
        check_plain(r, run, keep - len(run.prompt) + 1, 5)


def test_draft_p_min_ends_a_draft_early(rig):
    every = rig("planted-moe", drafter=MTP)
    assert every.engine.propose(every.start()) == 5
    none = rig("planted-moe", drafter=MTP, draft_p_min=1.0)
    assert none.engine.propose(none.start()) == 0


# --- trim, rewind, reset ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_prompt", [1, 3, 5, 6, 7, 20, 64])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_trim_is_exact_or_refused(rig, run_of, preset, n_prompt):
    """After each possible trim the next rows equal plain ones; what snapshots do not reach is refused."""
    run = run_of(preset)
    text = [*run.prompt, *run.tokens]
    r = rig(preset, drafter=MTP)
    for back in range(1, n_prompt + 1):
        r.engine.reset()
        r.engine.eval(text[:12], 0)
        r.engine.eval(text[12 : 12 + n_prompt], 12)
        keep = 12 + n_prompt - back
        reach = min(5, n_prompt - 1) if rig.rollback == "snapshots" else 0
        if back > reach:
            assert not r.engine.trim(keep), f"back {back} of {n_prompt}"
            assert r.held == r.engine.n_past == 12 + n_prompt
            continue
        assert r.engine.trim(keep), f"back {back} of {n_prompt}"
        assert r.held == r.engine.n_past == keep
        check_plain(r, run, keep - len(run.prompt) + 1)


def test_trim_after_a_round(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    for accept in range(6):
        for back in range(1, 8):
            r.start()
            done = follow(r, run, 1, accept)
            end = r.held
            if r.engine.trim(end - back):
                check_plain(r, run, done - back)
            else:
                assert r.held == end
                check_plain(r, run, done)


def test_trim_to_where_it_stands_keeps_the_row(rig, run_of):
    run = run_of("moe-mtp")
    r = rig()
    r.engine.eval(PROMPT, 0)
    assert r.engine.trim(len(PROMPT))
    assert r.sample()[0] == run.tokens[0]


def test_trim_to_nothing_is_a_reset(rig, run_of):
    r = rig(drafter=MTP)
    r.start()
    assert r.engine.trim(0)
    assert r.held == r.engine.n_past == 0
    assert r.start() == run_of("moe-mtp").tokens[0]


def test_snapshots_older_than_the_last_decode_are_refused(rig, run_of):
    """llama_memory_seq_rm would take them and restore another position's state."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    check_plain(r, run, 1, 3)
    end = r.held
    assert not r.engine.trim(end - 1)
    assert "cannot go back from 15 to 14" in last_error()
    check_plain(r, run, 4)


def test_rewind(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    assert r.engine.rewind()
    token, logits = r.sample()
    assert token == run.tokens[0]
    assert np.array_equal(logits, run.rows[0])
    for accept in range(6):
        r.start()
        done = follow(r, run, 1, accept)
        assert r.engine.rewind()
        token, logits = r.sample()
        assert token == run.tokens[done - 1]
        assert np.array_equal(logits, run.rows[done - 1])
        assert r.engine.row() is None
        check_plain(r, run, done)


def test_rewind_refuses_what_is_gone(rig):
    r = rig(drafter=MTP)
    assert not r.engine.rewind()
    r.start()
    r.engine.propose_given(1, [2, 3])
    r.engine.verify()
    assert not r.engine.rewind(), "a round is open"
    r.engine.commit()
    r.raw_decode([5])
    assert not r.engine.rewind(), "another decode's logits"


# --- others at the same context ------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["given", "left to llama.cpp"])
@pytest.mark.parametrize("take", range(5))
def test_raw_decode_in_mid_round(rig, run_of, take, positions):
    """A llama_decode by others lands behind the accepted rows, and its logits are right."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:6])
    r.engine.verify()
    for _ in range(take):
        r.sample()
    kept = max(take, 1)
    at = len(PROMPT) + kept if positions == "given" else None
    assert r.raw_decode([run.tokens[kept]], at) == 0
    assert r.held == len(PROMPT) + kept + 1
    assert np.array_equal(r.logits(-1), run.rows[kept + 1])
    assert r.engine.row() is None
    assert r.engine.trim(r.held)
    check_plain(r, run, kept + 2)


@pytest.mark.parametrize("take", range(5))
def test_state_save_in_mid_round(rig, run_of, take):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:6])
    r.engine.verify()
    for _ in range(take):
        r.sample()
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


def test_loaded_state_has_no_snapshots(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.engine.eval(run.tokens[:5], len(PROMPT))
    state = r.save()
    r.load(state)
    assert not r.engine.trim(r.held - 1)
    assert r.engine.trim(r.held)
    check_plain(r, run, 6)


def test_drafting_over_a_moved_context_is_refused(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.raw_decode([run.tokens[0]])
    text = error_of(lib.dw_propose(r.engine._handle, 1, 5, ctypes.byref(ctypes.c_int32())), _capi.ERR_STATE)
    assert "12" in text
    assert "13" in text
    assert "dw_trim or dw_reset" in text
    assert r.engine.trim(13)
    check_plain(r, run, 2)


def test_raw_decode_between_propose_and_verify(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
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
        r.engine.propose_given(run.tokens[0], run.tokens[1:6])
        r.engine.verify()
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


# --- statuses, orders, pointers ------------------------------------------------------------------------


def params(**changes):
    p = _capi.Params()
    lib.dw_params_init(ctypes.byref(p))
    for name, value in changes.items():
        setattr(p, name, value)
    return p


def new(r, p, context_params=None):
    handle = _capi.EngineHandle(1)
    status = lib.dw_engine_new(
        r.ctx, ctypes.byref(context_params or r.params), ctypes.byref(p), ctypes.byref(handle)
    )
    if status not in (_capi.OK, _capi.ERR_ARGUMENT):
        assert not handle
    return status, handle


def test_params_init():
    p = params()
    assert p.struct_size == ctypes.sizeof(_capi.Params)
    assert (p.drafter, p.draft_tokens, p.draft_p_min) == (NONE, DEFAULT_DRAFT_TOKENS, DEFAULT_DRAFT_P_MIN)
    assert p.exact_rows == EXACT_ROWS
    lib.dw_params_init(None)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"struct_size": 4}, "struct_size 4"),
        ({"struct_size": 2000}, "struct_size 2000"),
        ({"draft_tokens": 0}, "draft_tokens is 0"),
        ({"draft_tokens": -1}, "draft_tokens is -1"),
        ({"draft_tokens": 64}, "draft_tokens is 64"),
        ({"draft_p_min": float("nan")}, "draft_p_min is nan"),
        ({"draft_p_min": -0.5}, "draft_p_min is -0.5"),
        ({"draft_p_min": 1.5}, "draft_p_min is 1.5"),
        ({"exact_rows": -1}, "exact_rows is -1"),
        ({"drafter": 7}, "drafter is 7"),
        ({"drafter": -1}, "drafter is -1"),
    ],
)
def test_params_that_make_no_sense(rig, changes, found):
    r = rig(engine=False)
    text = error_of(new(r, params(**changes))[0], _capi.ERR_ARGUMENT)
    assert found in text
    assert "expect" in text


def test_a_model_without_an_mtp_block_cannot_draft(rig):
    r = rig("moe-plain", engine=False, drafter=MTP)
    text = error_of(new(r, params(drafter=MTP, draft_tokens=5))[0], _capi.ERR_UNSUPPORTED)
    assert "no MTP block" in text
    r.settings["drafter"] = NONE
    assert r.attach().n_past == 0, "without drafting this context works"


def test_fewer_snapshots_than_drafts_are_not_needed(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, n_rs_seq=3)
    r.start()
    done = 1
    for accept in range(6):
        done = follow(r, run, done, accept)
    check_plain(r, run, done)


def test_ubatch_too_small_for_a_draft(rig):
    """A verify is one ubatch, and with snapshots llama.cpp's own split asserts n_ubatch > n_rs_seq + 1."""
    need = 6 if rig.rollback == "snapshots" else 5
    enough = rig(engine=False, drafter=MTP, draft_tokens=4, n_ubatch=need)
    assert enough.attach().n_past == 0
    small = rig(engine=False, drafter=MTP, draft_tokens=4, n_ubatch=need - 1)
    text = error_of(new(small, params(drafter=MTP, draft_tokens=4))[0], _capi.ERR_UNSUPPORTED)
    assert f"n_ubatch is {need - 1}; 4 draft tokens need at least {need}" in text


def test_mtp_of_a_model_loaded_without_it(gguf, python):
    """The file has the block, the loaded model has not: llama.cpp would assert."""
    done = python(
        """
        import sys
        from draftwood import _capi
        from tests.model.rig import Rig
        rig = Rig(sys.argv[1], engine=False)
        rig.settings["drafter"] = _capi.DRAFTER_MTP
        try:
            rig.attach()
        except ValueError as error:
            print(type(error).__name__, error)
        """,
        gguf("moe-mtp"),
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert "UnsupportedError" in done.stdout
    assert "MTP" in done.stdout


def test_two_engines_on_one_context(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    text = error_of(new(r, params())[0], _capi.ERR_UNSUPPORTED)
    assert "has an engine already" in text
    assert follow(r, run, 1, 3) == 5
    r.detach()
    r.attach()
    assert r.engine.n_past == r.held
    check_plain(r, run, 5)


def test_freeing_in_mid_round_leaves_what_was_taken(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:6])
    r.engine.verify()
    r.sample()
    r.sample()
    r.detach()
    assert r.held == len(PROMPT) + 2
    r.attach()
    check_plain(r, run, 3)


def test_freed_engine_leaves_stock_kernels(rig):
    """The context computes as if no engine had ever been attached."""
    stock, used = rig(engine=False), rig(drafter=MTP)
    used.start()
    used.engine.reset()
    used.detach()
    for tokens in (PROMPT, [7], [8, 9], list(range(100, 180))):
        stock.raw_decode(tokens)
        used.raw_decode(tokens)
        assert np.array_equal(stock.logits(-1), used.logits(-1)), f"{len(tokens)} rows"


def test_freeing_nothing():
    lib.dw_engine_free(None)
    assert lib.dw_n_past(None) == 0
    assert lib.dw_draft_tokens(None) == 0


def call(name, engine, r):
    """Arguments with which `name` succeeds or fails for no reason of its pointers."""
    i32, tokens = ctypes.c_int32(), (_capi.Token * 64)(*PROMPT)
    stats = _capi.Stats(struct_size=ctypes.sizeof(_capi.Stats))
    curve = _capi.Curve(struct_size=ctypes.sizeof(_capi.Curve))
    table = {
        "dw_probe_model": [b"nowhere", ctypes.byref(_capi.ModelInfo())],
        "dw_engine_new": [
            r.ctx,
            ctypes.byref(r.params),
            ctypes.byref(params()),
            ctypes.byref(_capi.EngineHandle()),
        ],
        "dw_eval": [engine, tokens, 3, 0, False],
        "dw_propose": [engine, 1, 5, ctypes.byref(i32)],
        "dw_propose_given": [engine, 1, tokens, 2],
        "dw_verify": [engine],
        "dw_row": [engine, ctypes.byref(i32), ctypes.byref(i32)],
        "dw_next": [engine, r.sampler, ctypes.byref(i32)],
        "dw_rewind": [engine],
        "dw_commit": [engine],
        "dw_checkpoint": [engine],
        "dw_trim": [engine, 0],
        "dw_reset": [engine],
        "dw_get_draft": [engine, tokens, ctypes.byref(i32)],
        "dw_get_stats": [engine, ctypes.byref(stats)],
        "dw_get_curve": [engine, ctypes.byref(curve)],
        "dw_stats_reset": [engine],
    }
    return table[name]


NO_STATUS = ("dw_params_init", "dw_engine_free", "dw_n_past", "dw_draft_tokens", "dw_reach")
STATUS_CALLS = [
    name for name, (_, arguments) in _capi.SIGNATURES.items() if arguments and name not in NO_STATUS
]


@pytest.mark.parametrize("name", STATUS_CALLS)
def test_null_pointers(rig, name):
    r = rig(drafter=MTP)
    good = call(name, r.engine._handle, r)
    for i, value in enumerate(good):
        if isinstance(value, (int, bool)):
            continue
        text = error_of(getattr(lib, name)(*good[:i], None, *good[i + 1 :]), _capi.ERR_ARGUMENT)
        assert f"{name} was given a null pointer" in text


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
    "trim before the start": (lambda e: lib.dw_trim(e, -1), "-1 positions"),
    "trim beyond the end": (lambda e: lib.dw_trim(e, 99), "99 positions"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_change_nothing(rig, run_of, name):
    """DW_ERR_ARGUMENT in the middle of a round: the walk goes on as if the call had not been made."""
    run = run_of("moe-mtp")
    bad, found = BAD_CALLS[name]
    r = rig(drafter=MTP)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:6])
    r.engine.verify()
    r.sample()
    before = (r.engine.row(), r.engine.n_past, r.held)
    text = error_of(bad(r.engine._handle), _capi.ERR_ARGUMENT)
    assert found in text
    assert (r.engine.row(), r.engine.n_past, r.held) == before
    token, logits = r.sample()
    assert token == run.tokens[2]
    assert np.array_equal(logits, run.rows[2])
    r.engine.commit()
    check_plain(r, run, 3)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_engine_works_after_a_bad_argument(rig, run_of, name):
    """The weaker promise of the above: whatever was changed, the next round is right, drafter included."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    done = follow(r, run, 1, 2)
    assert BAD_CALLS[name][0](r.engine._handle) == _capi.ERR_ARGUMENT
    assert r.engine.trim(len(PROMPT) + done - 1)
    assert r.engine.propose(run.tokens[done - 1]) == 5
    r.engine.verify()
    token, logits = r.sample()
    assert token == run.tokens[done]
    assert np.array_equal(logits, run.rows[done])
    r.engine.commit()
    check_plain(r, run, done + 1)


def test_max_draft_bounds(rig):
    r = rig("planted-moe", drafter=MTP)
    last = r.start()
    for asked, given in ((0, 0), (1, 1), (3, 3), (5, 5), (63, 5), (10**9, 5)):
        assert r.engine.propose(last, asked) == given
        assert len(r.engine.draft()) == given


def test_calls_out_of_order(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    e, i32 = r.engine._handle, ctypes.c_int32()

    def refused(status, text):
        assert text in error_of(status, _capi.ERR_STATE)

    no_row = "dw_next without a row"
    refused(lib.dw_next(e, r.sampler, ctypes.byref(i32)), no_row)
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
def test_a_proposal_does_not_outlive_what_it_stood_on(rig, run_of, between):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    state = r.save()
    r.engine.eval(run.tokens[:3], len(PROMPT))
    r.engine.propose_given(run.tokens[3], run.tokens[4:6])
    if between == "eval":
        r.engine.eval([run.tokens[3]], len(PROMPT) + 3)
    elif between == "trim":
        keep = (
            len(PROMPT) + 1 if rig.rollback == "snapshots" else 0
        )  # a state without snapshots goes back to nothing
        assert r.engine.trim(keep)
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


def test_proposing_twice_takes_the_second(rig, run_of):
    run = run_of("moe-mtp")
    r = rig("moe-mtp", drafter=MTP)
    r.start()
    r.engine.propose(run.tokens[0])
    first = r.engine.draft()
    r.engine.propose(run.wrong(0))
    r.engine.propose(run.tokens[0])
    assert r.engine.draft() == first
    r.engine.verify()
    assert r.sample()[0] == run.tokens[1]


def test_stats_need_their_size(rig):
    r = rig()
    stats = _capi.Stats(struct_size=8)
    text = error_of(lib.dw_get_stats(r.engine._handle, ctypes.byref(stats)), _capi.ERR_ARGUMENT)
    assert "dw_stats has struct_size 8" in text
    assert str(ctypes.sizeof(_capi.Stats)) in text


def test_stats_count(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    done = 1
    for accept in (0, 3, 5):
        done = follow(r, run, done, accept)
    done = follow(r, run, done, 4, take=2)
    stats = r.engine.stats()
    assert (stats.rounds, stats.drafted, stats.prompt_tokens, stats.cold_rounds) == (4, 20, 12, 0)
    assert stats.accepted == 0 + 3 + 5 + 2
    assert stats.emitted == done
    assert stats.drafted_by_depth == (4, 4, 4, 4, 4)
    assert stats.accepted_by_depth == (3, 3, 2, 1, 1)
    r.engine.stats_reset()
    empty = r.engine.stats()
    assert (empty.rounds, empty.emitted, empty.exact_batches, empty.drafted_by_depth) == (0, 0, 0, ())


# --- the context's end, failed decodes -----------------------------------------------------------------


@pytest.mark.parametrize("left", range(7))
def test_draft_is_cut_to_the_context(rig, run_of, left):
    """With room for `left` more tokens a draft has at most left - 1: the root needs one."""
    run = run_of("moe-mtp", 264)
    r = rig(drafter=MTP)
    text = [*run.prompt, *run.tokens]
    for start in range(0, 256 - left, 64):
        r.engine.eval(text[start : min(start + 64, 256 - left)], start)
    last = text[256 - left]
    expected = max(0, min(5, left - 1))
    assert r.engine.propose(last) == expected
    r.engine.propose_given(last, text[257 - left : 262 - left])
    assert len(r.engine.draft()) == expected
    if left == 0:
        found = error_of(lib.dw_verify(r.engine._handle), _capi.ERR_CONTEXT)
        assert "no room for 1 tokens at position 256 of a context of 256" in found
        assert r.held == r.engine.n_past == 256
        return
    r.engine.verify()
    done = 256 - left - len(run.prompt) + 1
    for i in range(expected + 1):
        token, logits = r.sample()
        assert token == run.tokens[done + i]
        assert np.array_equal(logits, run.rows[done + i])
    r.engine.commit()
    assert r.held == 256


def test_eval_over_the_end(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    text = [*run.prompt, *run.tokens]
    for start in (0, 64, 128):
        r.engine.eval(text[start : start + 64], start)
    found = error_of(lib.dw_eval(r.engine._handle, (_capi.Token * 65)(), 65, 192, False), _capi.ERR_CONTEXT)
    assert "no room for 65 tokens at position 192" in found
    assert r.held == r.engine.n_past == 192
    check_plain(r, run, 192 - len(PROMPT) + 1, n=5)


@pytest.mark.parametrize("where", ["eval", "verify"])
def test_aborted_decode(rig, run_of, where):
    """An abort callback stops llama_decode half way; after a reset everything is exact again."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    r.start()
    calls = []
    stop = native.ggml_abort_callback(lambda _: bool(calls.append(0)) or len(calls) > 20)
    native.llama_set_abort_callback(r.ctx, stop, None)
    if where == "eval":
        status = lib.dw_eval(r.engine._handle, (_capi.Token * 3)(1, 2, 3), 3, 12, False)
    else:
        r.engine.propose_given(run.tokens[0], run.tokens[1:6])
        status = lib.dw_verify(r.engine._handle)
    assert "llama_decode returned 2" in error_of(status, _capi.ERR_DECODE)
    assert r.engine.row() is None
    native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
    assert r.start() == run.tokens[0]
    check_plain(r, run, follow(r, run, 1, 3))


def test_exception_in_a_sampler(rig, run_of):
    """A grammar throws when made to accept what it forbids: a status, and the row can be sampled anew."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    vocab = native.llama_model_get_vocab(r.model)

    def force(data):
        data.contents.data[ord("z")].logit = 1e9

    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    r.engine.verify()
    for i in range(3):
        chain = LlamaSampler()
        grammar = native.llama_sampler_init_grammar(vocab, b'root ::= "a"+', b"root")
        native.llama_sampler_chain_add(chain.sampler, grammar)
        chain.add_custom(force)
        chain.add_greedy()
        before = (r.engine.row(), r.engine.n_past)
        status = lib.dw_next(r.engine._handle, chain.sampler, ctypes.byref(ctypes.c_int32()))
        assert "empty grammar stack" in error_of(status, _capi.ERR_INTERNAL)
        assert (r.engine.row(), r.engine.n_past) == before
        assert r.sample()[0] == run.tokens[1 + i]
        chain.close()
    r.engine.commit()
    check_plain(r, run, 4)


def test_probe_statuses(gguf, tmp_path):
    info = _capi.ModelInfo()
    assert lib.dw_probe_model(gguf("moe-mtp").encode(), ctypes.byref(info)) == _capi.OK
    assert (info.architecture, info.n_layer_nextn, info.can_draft_mtp) == (b"qwen35moe", 1, 1)
    assert lib.dw_probe_model(gguf("dense-plain").encode(), ctypes.byref(info)) == _capi.OK
    assert (info.architecture, info.n_layer_nextn, info.can_draft_mtp) == (b"qwen35", 0, 0)
    text = error_of(lib.dw_probe_model(str(tmp_path / "none").encode(), ctypes.byref(info)), _capi.ERR_FILE)
    assert "cannot be opened" in text


def test_error_text_is_kept_until_the_next_failure(rig):
    r = rig()
    lib.dw_trim(r.engine._handle, -1)
    text = last_error()
    r.start()
    assert last_error() == text != ""


def test_exact_batches_are_counted_up_to_64_rows(rig):
    r = rig()
    counts = []
    for n in (1, 64, 65, 128):
        r.engine.reset()
        r.engine.stats_reset()
        r.engine.eval([1] * n, 0)
        counts.append(r.engine.stats().exact_batches)
    assert counts == [1, 1, 0, 0]
    off = rig(exact_rows=0)
    off.engine.eval([1, 2], 0)
    assert off.engine.stats().exact_batches == 0
