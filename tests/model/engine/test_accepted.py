"""Observers of a model hear of each accepted token once, in order, whichever engine's round it was."""

from __future__ import annotations

import pytest
from draftwood.engine.engine import Engine

from bench.testing_api import AcceptedLog
from tests.model.engine.calls import MTP
from tests.model.engine.story import BUDGET
from tests.model.rig import PROMPT, follow


@pytest.mark.parametrize("budget", [0, BUDGET])
def test_accepted_tokens_are_those_that_stay(rig, run_of, budget):
    """The root of each round and the drafts that its walk took; a prompt belongs to no round."""
    run, r = run_of("moe-mtp"), rig(drafter=MTP, tree_budget=budget)
    log = AcceptedLog(r.engine)
    r.start()
    assert log.entries() == []
    done = 1
    for accept in (3, 0, 5, 1):
        done = follow(r, run, done, accept)
    text = [*run.prompt, *run.tokens]
    at = range(len(PROMPT), r.engine.n_past)
    assert log.entries() == [(0, text[i], i) for i in at]


def test_a_round_that_was_undone_is_not_heard_of(rig, run_of):
    run, r = run_of("moe-mtp"), rig(drafter=MTP)
    r.start()
    log = AcceptedLog(r.engine)
    r.open_round(run, take=2)
    r.engine.reset()
    assert log.entries() == []
    r.start()
    follow(r, run, 1, 0)
    assert log.entries() == [(0, run.tokens[0], len(PROMPT))]


def test_all_sequences_are_heard_and_a_log_ends_when_it_is_freed(rig, run_of):
    run, r = run_of("moe-mtp"), rig(drafter=MTP, n_seq_max=2, n_ctx=512)
    second = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    log = AcceptedLog(second)
    short_lived = AcceptedLog(r.engine)
    for engine in (r.engine, second):
        engine.eval(PROMPT, 0)
        assert engine.next(r.sampler) == run.tokens[0]
    for engine in (second, r.engine):
        engine.propose_given(run.tokens[0], run.tokens[1:3])
        engine.verify()
        while engine.row() is not None:
            engine.next(r.sampler)
        engine.commit()
        if engine is second:
            heard = short_lived.entries()
            del short_lived
    expected = [(i, len(PROMPT) + i) for i in range(3)]
    assert log.entries() == [(seq, run.tokens[i], at) for seq in (1, 0) for i, at in expected]
    assert heard == log.entries()[:3]
    second.close()
