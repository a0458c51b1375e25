"""What a decode leaves where it was computed: best tokens for logits, drafts made ahead, logits on demand.

On a CPU this only happens when asked for (RESULTS_TOP); on a GPU it is the rule: tests/gpu.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.status import check
from draftwood.errors import ContextFullError, NativeError, OptionError, UnsupportedError

from bench.testing_api import next_scheduled, replay
from tests.model.engine.calls import MTP, NONE
from tests.model.engine.test_joint_dflash import DFLASH, TARGET
from tests.model.rig import PROMPT, Rig

TOKENS = 96
TREES = {"chain": 0, "tree": 12}


def chain(seed: int | None) -> object:
    """Return a sampler: greedy, or top-k, top-p, temperature and a seeded choice."""
    sampler = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    if seed is None:
        native.llama_sampler_chain_add(sampler, native.llama_sampler_init_greedy())
        return sampler
    for part in (
        native.llama_sampler_init_top_k(40),
        native.llama_sampler_init_top_p(0.95, 1),
        native.llama_sampler_init_temp(0.8),
        native.llama_sampler_init_dist(seed),
    ):
        native.llama_sampler_chain_add(sampler, part)
    return sampler


def text(r: Rig, seed: int | None, n_top: int) -> list[int]:
    """Generate greedily or with a seed, from n_top tokens a row (0: all of them)."""
    sampler = chain(seed)
    r.engine.reset()
    r.engine.set_request(0.0 if seed is None else 0.8, n_top)
    r.engine.eval(PROMPT, 0)
    tokens = [r.engine.next(sampler)]
    while len(tokens) < TOKENS:
        r.engine.propose(tokens[-1])
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.engine.next(sampler))
        r.engine.commit()
    native.llama_sampler_free(sampler)
    return tokens[:TOKENS]


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
@pytest.mark.parametrize("budget", TREES.values(), ids=TREES)
@pytest.mark.parametrize("draft_vocab", [0, 64], ids=["whole-head", "short-head"])
def test_best_tokens_give_the_text_that_logits_give(rig, budget, draft_vocab, seed):
    plain = text(rig(), seed, 0)
    r = rig(drafter=MTP, results=_capi.RESULTS_TOP, tree_budget=budget, draft_vocab=draft_vocab)
    assert text(r, seed, 1 if seed is None else 40) == plain
    stats = r.engine.stats()
    assert stats.logits_rows == 0
    assert stats.drafted > 0
    in_trees = budget > 0 and rig.rollback == "tree"
    assert stats.ahead_rounds == (0 if in_trees else stats.rounds)


def test_all_logits_are_used_where_the_sampler_needs_them(rig):
    r = rig(drafter=MTP, results=_capi.RESULTS_TOP)
    assert text(r, 7, 0) == text(rig(), 7, 0)
    assert r.engine.stats().logits_rows == TOKENS


def test_a_draft_made_ahead_is_the_draft(rig):
    """The tokens of such a draft come to the host when somebody asks, or with the walk."""
    ahead, r = rig(drafter=MTP, results=_capi.RESULTS_TOP), rig(drafter=MTP)
    assert ahead.start() == (last := r.start())
    for _ in range(12):
        assert ahead.engine.propose(last) == r.engine.propose(last) == 5
        drafts = [each.engine.draft() for each in (ahead, r)]
        assert drafts[0] == drafts[1]
        assert len(set(drafts[0])) > 1
        for each in (ahead, r):
            each.engine.verify()
        last, _ = r.sample()
        assert ahead.engine.next(ahead.sampler) == last
        for each in (ahead, r):
            each.engine.commit()


@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
def test_a_block_drafted_ahead_is_the_block(draft_tokens):
    """The same of DFlash: features of kept tokens wait, and the block's tokens stay on their device."""
    both = [Rig(TARGET, engine=False, draft_tokens=draft_tokens) for _ in range(2)]
    for r, results in zip(both, [_capi.RESULTS_TOP, _capi.RESULTS_AUTO], strict=True):
        r.settings |= {**DFLASH, "results": results}
        r.attach()
    ahead, r = both
    assert (last := ahead.start()) == r.start()
    for i in range(20):
        assert ahead.engine.propose(last) == r.engine.propose(last) > 0
        if i % 2:  # else its tokens come with the walk
            assert ahead.engine.draft() == r.engine.draft()
        for each in both:
            each.engine.verify()
        while r.engine.row() is not None:
            assert ahead.engine.next(ahead.sampler) == (last := r.engine.next(r.sampler))
        assert ahead.engine.row() is None
        assert ahead.engine.tree() == replace(r.engine.tree(), log_probs=ahead.engine.tree().log_probs)
        for each in both:
            each.engine.commit()
    stats = ahead.engine.stats()
    assert (stats.ahead_rounds, stats.accepted) == (10, r.engine.stats().accepted)
    assert stats.begun_drafts == 10
    assert stats.accepted > 0
    for each in both:
        each.close()


def test_logits_of_kept_rows_are_there_for_whoever_asks(rig, run_of):
    """llama_get_logits_ith works as ever, also late in a round and for each row."""
    run, r = run_of("moe-mtp"), rig(results=_capi.RESULTS_TOP)
    r.start()
    r.engine.set_request(n_top=1)
    r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    r.engine.verify()
    for i in range(4):
        assert r.engine.next(r.sampler) == run.tokens[1 + i]
    for i in range(4):
        assert np.array_equal(r.logits(i), run.rows[1 + i])


def test_a_sampler_of_the_backend_that_is_not_there_reads_no_logits(rig):
    """llama-server asks after each row for the token that such a sampler chose."""
    r = rig(drafter=MTP, results=_capi.RESULTS_TOP)
    last = r.start()
    r.engine.set_request(n_top=1)
    for first in (True, False):
        r.engine.propose(last)
        r.engine.verify()
        if first:  # rows have their place in host memory now
            host = np.ctypeslib.as_array(native.llama_get_logits_ith(r.ctx, 0), shape=(r.n_vocab,))
            host[:] = -1.0
            last, _ = r.sample()
            r.engine.commit()
    assert native.llama_get_sampled_token_ith(r.ctx, 0) == native.LLAMA_TOKEN_NULL
    assert (host == -1.0).all()
    assert r.logits(0).max() > -1.0
    assert (host != -1.0).any()


def test_a_schedule_decides_whatever_comes_out(rig):
    r = rig(drafter=MTP)
    last = r.start()
    for accepted in (0, 1, 3, 5):
        r.engine.propose(last)
        draft = r.engine.draft()
        r.engine.verify()
        taken = [next_scheduled(r.engine, r.sampler, accept=True) for _ in range(accepted)]
        assert taken == draft[:accepted]
        last = next_scheduled(r.engine, r.sampler, accept=False)
        assert r.engine.row() is None
        r.engine.commit()
        assert r.engine.n_past == r.held


@pytest.mark.parametrize("n", [-1, -40])
def test_fewer_than_no_tokens_are_refused(rig, n):
    with pytest.raises(OptionError, match="expected 0"):
        rig(drafter=NONE).engine.set_request(n_top=n)


def test_a_verify_is_not_run_again_on_a_cpu(rig):
    """Its graph writes over what it read; without an open round there is nothing to run."""
    r = rig(drafter=MTP)
    with pytest.raises(NativeError, match="expected one or more"):
        replay(r.engine, 2)
    r.engine.propose(r.start())
    r.engine.verify()
    with pytest.raises((NativeError, UnsupportedError)):
        replay(r.engine, 2)


def test_tokens_of_a_verify_that_failed_go_into_no_other_decode(rig):
    """A draft made ahead waits for the decode it is for; if that fails, the next one is not fed with it."""

    def text(fails: bool) -> list[int]:
        shared = {"n_seq_max": 2, "kv_unified": True, "n_ctx": 256}
        r = rig(drafter=MTP, results=_capi.RESULTS_TOP, **shared)
        other = Engine(
            r.ctx, r.params, drafter=NONE, draft_tokens=5, draft_p_min=0.0, exact_rows=64, seq_id=1
        )
        last = r.start()
        if fails:
            assert r.engine.propose(last) == 5
            full = 256 - len(PROMPT) - 3
            other.eval(range(40, 168), 0)
            other.eval(range(40, 40 + full - 128), 128)
            with pytest.raises(ContextFullError):
                r.engine.verify()
            other.reset()
        r.engine.reset()
        r.engine.eval(range(200, 230), 0)
        tokens = [r.engine.next(r.sampler)]
        other.close()
        return tokens + r.plain(tokens[0], 8)[0]

    assert text(fails=True) == text(fails=False)


def test_logits_outlive_the_graph_that_computed_them(rig, run_of):
    """A second engine that needs larger verifies makes the context drop the kept ones."""
    if rig.rollback == "snapshots":
        pytest.skip("snapshots need no tree state that could grow")
    run, r = run_of("moe-mtp"), rig(n_seq_max=2, draft_tokens=5)
    r.start()
    r.engine.propose_given(run.tokens[0], run.tokens[1:4])
    r.engine.verify()
    larger = Engine(
        r.ctx,
        r.params,
        drafter=_capi.DRAFTER_GIVEN,
        draft_tokens=40,
        draft_p_min=0.0,
        exact_rows=64,
        seq_id=1,
    )
    for i in range(4):
        assert np.array_equal(r.logits(i), run.rows[1 + i])
    larger.close()


def test_logits_are_there_when_the_engine_is_gone(rig):
    """They were left where they were computed until somebody asks."""
    rows = []
    for goes in (False, True):
        r = rig(drafter=_capi.DRAFTER_MTP)
        r.start()
        if goes:
            r.detach()
        rows.append(r.logits(-1).copy())
    assert rows[0].any()
    assert np.array_equal(*rows)


def best_of(r: Rig, row: int, n: int) -> tuple[list[int], list[float]] | None:
    """Return tokens and logits of dw_best, or None if it found none."""
    tokens, logits, found = (_capi.Token * n)(), (ctypes.c_float * n)(), ctypes.c_bool()
    check(_capi.lib.dw_best(r.ctx, row, n, tokens, logits, ctypes.byref(found)))
    return (list(tokens), list(logits)) if found.value else None


def test_best_tokens_of_each_row_of_a_verify(rig):
    r = rig(results=_capi.RESULTS_TOP)
    r.engine.eval(PROMPT[:-1], 0)
    r.engine.propose_given(PROMPT[-1], [5, 7, 9])
    r.engine.verify()
    for row in range(4):
        tokens, logits = best_of(r, row, 64)
        all_logits = r.logits(row)
        order = np.lexsort((np.arange(r.n_vocab), -all_logits))[:64]
        assert tokens == order.tolist()
        assert logits == all_logits[order].tolist()
    r.engine.commit()


def test_best_tokens_are_found_only_where_somebody_looked(rig):
    r = rig()
    r.engine.eval(PROMPT[:-1], 0)
    r.engine.propose_given(PROMPT[-1], [5])
    r.engine.verify()
    assert best_of(r, 0, 8) is None
    with pytest.raises(OptionError, match="expected 1 to 64"):
        best_of(r, 0, 65)
