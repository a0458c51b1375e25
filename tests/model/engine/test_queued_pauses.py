"""Steps that are queued in pauses of "auto": drafters see what they see where each step waits.

Contract: cost_model::plain_step_comes(), src/verify/target_steps.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.engine.tree import Tree

from tests.model.engine.calls import MTP
from tests.model.engine.queued import ON_TREES, QUEUES, begin, check_memory, large, queued, steps
from tests.model.engine.test_joint_dflash import DFLASH, TARGET
from tests.model.rig import Rig
from tests.unit.cost_curves import curve

DEAR = curve({1: 1e9, 63: 63e9}, {1: 1e6, 64: 64e6})
"""Microseconds: no draft pays, so the first one is a trial of rounds 65 and 66."""
TRIAL = [64, 65]


def auto(r: Rig, drafter: dict[str, Any], times: Any = DEAR) -> Rig:
    """Give the rig an engine that drafts by costs, with these times."""
    own = {"tree_budget": 8, "length": _capi.LENGTH_AUTO, "curve": times, **drafter}
    r.engine = Engine(r.ctx, r.params, **{**r.settings, **own})
    return r


def write(r: Rig, last: int, n_rounds: int, settle_at: int) -> tuple[list[int], list[list[int]]]:
    """Take rounds, settled before one of them; return the tokens and what each round drafted."""
    text, drafts = [], []
    for i in range(n_rounds):
        if i == settle_at:
            r.engine.commit()
        r.engine.propose(last)
        drafts.append(r.engine.draft())
        r.engine.verify()
        while r.engine.row() is not None:
            text.append(r.engine.next(r.sampler))
        last = text[-1]
    return text, drafts


def check_trials(waits: Rig, r: Rig, settle_at: int) -> None:
    """Check text, drafts and counts of both, around a trial that no step is queued before."""
    written = []
    for each in (waits, r):
        written.append(write(each, begin(each), 80, settle_at))
        assert queued(each) == (0, 0) if each is waits else queued(each)[0] > 40
        each.engine.commit()
        check_memory(each)
    assert written[0] == written[1]
    assert [i for i, draft in enumerate(written[0][1]) if draft] == TRIAL
    assert queued(r)[1] == (2 if settle_at < 80 else 1)


@ON_TREES
@pytest.mark.parametrize("settle_at", [80, 40, 41], ids=["", "even", "odd"])
@pytest.mark.parametrize("preset", ["planted-moe", "moe-mtp", "dense-mtp"])
def test_trials_draft_what_they_draft_where_steps_wait(rig, preset, settle_at):
    """Hidden states of queued steps reach the block, whichever cell the last one left its state in."""
    both = [
        auto(rig(preset, engine=False, n_ctx=512, **QUEUES, drafter=MTP), {"queue_steps": queues})
        for queues in (False, True)
    ]
    check_trials(*both, settle_at)


@pytest.mark.parametrize("settle_at", [80, 41])
def test_so_does_a_block_that_reads_inputs_of_layers(settle_at):
    both = []
    for queues in (False, True):
        r = Rig(TARGET, engine=False, n_ctx=512, **QUEUES)
        both.append(auto(r, {**DFLASH, "draft_tokens": 5, "queue_steps": queues}))
    check_trials(*both, settle_at)
    for each in both:
        each.close()


@ON_TREES
def test_where_drafts_pay_no_step_is_queued(rig):
    free = curve({1: 1, 63: 2}, {1: 1e6, 64: 1e6 + 1})
    r = auto(rig("planted-moe", engine=False, n_ctx=512, **QUEUES, drafter=MTP), {}, free)
    _, drafts = write(r, begin(r), 40, 40)
    assert all(drafts)
    assert queued(r) == (0, 0)


@ON_TREES
def test_a_text_that_takes_other_tokens_waits_for_a_while(rig):
    """A step that nobody takes costs its time: after two, every 33rd is tried."""
    r = rig(n_ctx=512, **QUEUES)
    last = begin(r)
    for _ in range(120):
        r.engine.propose(last)
        r.engine.verify()
        best = r.engine.next(r.sampler)
        last = (best + 1) % r.n_vocab
    assert queued(r) == (0, 2 + (120 - 3) // 33)
    r.engine.commit()
    steps(r, last, 40)
    assert queued(r)[0] > 5


# ---- the cell that a state lies in ----


def built(r: Rig) -> int:
    """Return how many decodes found their graph."""
    return int(native.llama_perf_context(r.ctx).n_reused)


@ON_TREES
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_verify_behind_queued_steps_finds_its_graph(rig, run_of, n):
    """Graphs know the cell of a state. Steps leave it in one of two, so it is brought back."""
    r, run = large(rig), run_of("moe-mtp")
    last, done = begin(r), 1

    def verify_tree() -> None:
        nonlocal last, done
        r.engine.propose_tree(Tree((last, run.wrong(done), run.tokens[done]), (-1, 0, 0)))
        r.engine.verify()
        for _ in range(2):
            last, row = r.sample()
            assert last == run.tokens[done]
            assert np.array_equal(row, run.rows[done])
            done += 1

    for turn in range(4):
        before = built(r)
        verify_tree()
        assert built(r) - before == (1 if turn > 0 else 0)
        assert steps(r, last, n) == run.tokens[done : done + n]
        done += n
        last = run.tokens[done - 1]
    assert queued(r) == (4 * (n - 1), 3)


@ON_TREES
@pytest.mark.parametrize("n", [2, 3])
def test_others_may_decode_where_steps_left_the_state(rig, run_of, n):
    """llama_decode by somebody else takes the state from the cell that it lies in."""
    r, run = rig(**QUEUES), run_of("moe-mtp")
    last = begin(r)
    assert steps(r, last, n) == run.tokens[1 : n + 1]
    assert r.raw_decode([run.tokens[n]]) == 0
    assert np.array_equal(r.logits(), run.rows[n + 1])
