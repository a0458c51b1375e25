"""The context's end, aborted decodes, samplers that throw: a status, then exact again."""

from __future__ import annotations

import ctypes

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaSampler
from draftwood.engine import _capi

from tests.model.engine.calls import MTP, error_of, lib, new, params
from tests.model.rig import PROMPT, check_next, check_plain, follow


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
        check_next(r, run, done + i)
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


def test_the_end_of_one_of_two_sequences(rig, run_of):
    """The positions of a sequence are those of its own cells, not of all."""
    run, r = run_of("moe-mtp", 264), rig(drafter=MTP, n_seq_max=2, n_ctx=512)
    text = [*run.prompt, *run.tokens]
    for start in range(0, 256, 64):
        r.engine.eval(text[start : start + 64], start)
    found = error_of(lib.dw_eval(r.engine._handle, (_capi.Token * 1)(), 1, 256, False), _capi.ERR_CONTEXT)
    assert "at position 256 of a context of 256" in found
    assert r.held == r.engine.n_past == 256


@pytest.mark.parametrize("where", ["eval", "verify"])
def test_aborted_decode(started, where):
    """An abort callback stops llama_decode half way; after a reset everything is exact again."""
    r, run = started
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


def test_a_trim_to_less_than_nothing_after_a_failed_decode(rig):
    r = rig("moe-plain")
    r.engine.eval(PROMPT, 0)
    stop = native.ggml_abort_callback(lambda _: True)
    native.llama_set_abort_callback(r.ctx, stop, None)
    error_of(lib.dw_eval(r.engine._handle, (_capi.Token * 3)(1, 2, 3), 3, 12, False), _capi.ERR_DECODE)
    native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
    assert "-5 positions" in error_of(lib.dw_trim(r.engine._handle, -5), _capi.ERR_ARGUMENT)
    assert r.engine.n_past >= 0


def test_an_engine_whose_rounds_cannot_be_timed_leaves_the_context_empty(rig):
    """Its decodes are stopped half way, at a node further on each time."""
    for last in range(20, 400, 60):
        r, n = rig(drafter=MTP, engine=False), [0]

        def stop(_, n=n, last=last):
            n[0] += 1
            return n[0] > last

        callback = native.ggml_abort_callback(stop)
        native.llama_set_abort_callback(r.ctx, callback, None)
        error_of(new(r, params(drafter=MTP, draft_tokens=5, length=_capi.LENGTH_AUTO))[0], _capi.ERR_DECODE)
        native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
        assert r.held == 0


def test_a_drafter_goes_back_after_an_aborted_verify(started, rig):
    """The draft was no text: the next one begins at the same root, with nothing of the old one."""
    if rig.rollback != "tree":
        pytest.skip("with snapshots an aborted verify leaves a memory that is not known")
    r, run = started
    assert r.engine.propose(run.tokens[0]) > 0
    draft = r.engine.draft()
    calls = []
    stop = native.ggml_abort_callback(lambda _: bool(calls.append(0)) or len(calls) > 20)
    native.llama_set_abort_callback(r.ctx, stop, None)
    error_of(lib.dw_verify(r.engine._handle), _capi.ERR_DECODE)
    native.llama_set_abort_callback(r.ctx, native.ggml_abort_callback(), None)
    other = rig(drafter=MTP)
    other.start()
    for each in (r, other):
        each.engine.eval(run.tokens[:4], len(PROMPT))
        assert each.engine.propose(run.tokens[4]) > 0
    assert r.engine.draft() == other.engine.draft() != draft


def failing_drafter(rig, **settings):
    """A rig whose MTP drafter fails each decode while the list that comes with it holds something."""
    r, fails = rig(drafter=MTP, engine=False, **settings), []
    r.params.abort_callback = native.ggml_abort_callback(lambda _: bool(fails))
    r.attach()
    return r, fails


def drafts_of(r, run, done):
    """Run a round; return how many tokens it drafted, and of the run how many are emitted afterwards."""
    n_drafts = r.engine.propose(run.tokens[done - 1])
    r.engine.verify()
    while r.engine.row() is not None:
        check_next(r, run, done)
        done += 1
    r.engine.commit()
    return n_drafts, done


def test_drafts_that_fail_are_counted_apart_from_cold_rounds(rig, run_of):
    """Two rounds without a draft, and the drafter goes on after them."""
    run = run_of("moe-mtp")
    r, fails = failing_drafter(rig)
    r.start()
    done, drafted = 1, []
    for fails[:] in ([], [1], [1], [], []):
        n_drafts, done = drafts_of(r, run, done)
        drafted.append(n_drafts)
    assert drafted == [5, 0, 0, 5, 5]
    stats = r.engine.stats()
    assert (stats.failed_drafts, stats.cold_rounds) == (2, 0)


def test_a_prompt_that_a_drafter_cannot_read_is_counted(rig):
    """A long one is read at once. Only the round after it has no draft, which lacks the hidden state then."""
    r, fails = failing_drafter(rig, n_ctx=512, n_ubatch=512)
    prompt = [2 + i % 100 for i in range(300)]
    run = r.reference(40, prompt)
    r.engine.stats_reset()
    fails.append(1)
    r.start(prompt)
    fails.clear()
    first, done = drafts_of(r, run, 1)
    second, done = drafts_of(r, run, done)
    assert (first, second) == (0, 5)
    stats = r.engine.stats()
    assert (stats.failed_drafts, stats.cold_rounds) == (1, 1)


def test_exception_in_a_sampler(started):
    """A grammar throws when made to accept what it forbids: a status, and the row can be sampled anew."""
    r, run = started
    vocab = native.llama_model_get_vocab(r.model)

    def force(data):
        data.contents.data[ord("z")].logit = 1e9

    r.open_round(run, 3)
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
