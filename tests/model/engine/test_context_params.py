"""Contexts with parameters of which llama.cpp asserts something: an error, or fewer drafts, same text."""

from __future__ import annotations

import ctypes

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaSampler
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree
from draftwood.errors import NativeError, OptionError

from bench.testing_api import propose_all
from tests.model.engine.calls import MTP, error_of, lib, new, params
from tests.model.rig import PROMPT, check_next, check_plain, hooked_sampler


@pytest.mark.parametrize("most", [1, 4])
def test_drafts_are_cut_to_the_rows_that_may_have_results(rig, run_of, most):
    """A verify needs logits of all its rows, and a batch may have n_outputs_max of them."""
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, context={"n_outputs_max": most})
    r.start()
    done = 1
    for _ in range(6):
        r.engine.propose_given(run.tokens[done - 1], run.tokens[done : done + 5])
        r.engine.verify()
        for _ in range(most):
            check_next(r, run, done)
            done += 1
        assert r.engine.row() is None
        r.engine.commit()
    check_plain(r, run, done)
    assert r.engine.stats().drafted == 6 * (most - 1)


@pytest.mark.parametrize("most", [3, 5])
def test_trees_are_cut_and_padded_to_the_rows_that_may_have_results(rig, run_of, most):
    """A graph of five nodes that branch is padded to eight rows elsewhere."""
    if rig.rollback != "tree":
        pytest.skip("snapshots verify no trees")
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, tree_budget=8, context={"n_outputs_max": most})
    r.start()
    root, first, second, third = run.tokens[:4]
    r.engine.propose_tree(Tree((root, first, 5, second, third), (-1, 0, 0, 1, 3)))
    r.engine.verify()
    done = 1
    while r.engine.row() is not None:
        check_next(r, run, done)
        done += 1
    r.engine.commit()
    assert done >= most - 1, "one of the nodes is wrong"
    check_plain(r, run, done)


def test_a_proposal_that_fails_for_one_leaves_none(rig):
    """The second sequence was moved on past its engine."""
    shared = rig(n_seq_max=2, n_ctx=512, engine=False)
    first, second = (Engine(shared.ctx, shared.params, **{**shared.settings, "seq_id": i}) for i in range(2))
    for engine in (first, second):
        engine.eval(PROMPT, 0)
    batch = native.llama_batch_init(1, 0, 1)
    batch.n_tokens, batch.token[0], batch.pos[0] = 1, 5, len(PROMPT)
    batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 1, True
    assert native.llama_decode(shared.ctx, batch) == 0
    native.llama_batch_free(batch)
    with pytest.raises(NativeError, match="the context holds 13 positions"):
        propose_all([first, second], [5, 5], [1, 1])
    with pytest.raises(NativeError, match="without a dw_propose before it"):
        first.verify()
    for engine in (first, second):
        engine.close()


def test_a_sampler_that_samples_from_another_context(rig, run_of):
    """Each has candidates of its own meanwhile."""
    run = run_of("moe-mtp")
    r, other = rig(), rig()
    other.engine.eval(PROMPT[:5], 0)
    sampler = hooked_sampler(lambda: other.engine.next(other.sampler))
    r.engine.eval(PROMPT, 0)
    assert r.engine.next(sampler.sampler) == run.tokens[0]
    sampler.close()


def test_more_logits_than_the_context_has_room_for(rig):
    r = rig(context={"n_outputs_max": 4})
    with pytest.raises(OptionError, match="5 tokens with logits; expected at most n_outputs_max = 4"):
        r.engine.eval(PROMPT[:5], 0, all_logits=True)
    r.engine.eval(PROMPT[:4], 0, all_logits=True)
    assert r.engine.n_past == 4


def test_snapshots_that_a_ubatch_is_too_small_for(rig):
    """Also of an engine that drafts nothing."""
    small = rig(engine=False, n_rs_seq=5, n_ubatch=6)
    text = error_of(new(small, params())[0], _capi.ERR_UNSUPPORTED)
    assert text == "n_ubatch is 6; 5 recurrent snapshots (n_rs_seq) need at least 7"
    enough = rig(n_rs_seq=5, n_ubatch=7)
    enough.engine.eval(PROMPT[:7], 0)


def test_samplers_of_the_target_are_not_the_drafters(rig, run_of):
    """A chain serves one context; llama.cpp asserts it."""
    run = run_of("moe-mtp")
    chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_greedy())
    own = (native.llama_sampler_seq_config * 1)(
        native.llama_sampler_seq_config(0, ctypes.cast(chain, ctypes.c_void_p))
    )
    field = {"samplers": own, "n_samplers": 1, "n_outputs_max_per_seq": 8}
    r = rig(drafter=MTP, context=field)
    r.engine.eval(PROMPT, 0)
    tokens = [r.engine.next(r.sampler)]
    while len(tokens) < 12:
        r.engine.propose(tokens[-1])
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.engine.next(r.sampler))
        r.engine.commit()
    assert tokens == run.tokens[: len(tokens)]
    assert r.engine.stats().drafted > 0
    r.close()
    native.llama_sampler_free(chain)


@pytest.mark.parametrize("results", [0, _capi.RESULTS_TOP], ids=["logits", "best"])
def test_a_sampler_that_chooses_nothing(rig, results):
    r = rig(results=results)
    r.engine.set_request(0.8, 40)
    r.engine.eval(PROMPT, 0)
    chain = LlamaSampler()
    native.llama_sampler_chain_add(chain.sampler, native.llama_sampler_init_temp(0.8))
    status = lib.dw_next(r.engine._handle, chain.sampler, ctypes.byref(ctypes.c_int32()))
    assert "chose no token" in error_of(status, _capi.ERR_ARGUMENT)
    chain.add_greedy()
    assert 0 <= r.engine.next(chain.sampler) < r.n_vocab
    chain.close()


@pytest.mark.parametrize("row", [-2, 4, 40])
def test_best_tokens_of_a_row_that_is_none(rig, row):
    r = rig(results=_capi.RESULTS_TOP)
    r.engine.eval(PROMPT[:-1], 0)
    r.engine.propose_given(PROMPT[-1], [5, 7, 9])
    r.engine.verify()
    tokens, logits, found = (_capi.Token * 4)(), (ctypes.c_float * 4)(), ctypes.c_bool()
    status = lib.dw_best(r.ctx, row, 4, tokens, logits, ctypes.byref(found))
    assert error_of(status, _capi.ERR_ARGUMENT) == f"found row {row}; expected 0 to 3, or -1 for the last"
