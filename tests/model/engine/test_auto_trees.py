"""DW_LENGTH_AUTO and trees: the cost curve decides whether a draft branches, acceptance how wide it is.

Drafts are the planted model's own MTP block's, accepted two times of three. Contract: src/round/cost_model.h.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draftwood.engine import _capi
from draftwood.engine.engine import Curve, Engine
from draftwood.stats import SpeculationStats

from bench.testing_api import next_scheduled
from tests.model.engine.calls import MTP
from tests.model.rig import Rig

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

SIZES = range(_capi.CURVE_SIZE)


def curve(row: float) -> Curve:
    """Return a curve: a plain step 1,000 units, each further row `row`, a draft next to nothing.

    A unit is long, or the true times would replace it within the request (cost_model::is_outdated).
    """
    verify = tuple(0.0 if n == 0 else 1000.0 + row * (n - 1) for n in SIZES)
    draft = tuple(0.0 if n == 0 else 10.0 + n for n in SIZES)
    return Curve(*(tuple(1000.0 * time for time in times) for times in (draft, verify)))


def decode(make: Callable[..., Rig], row: float, tokens: int = 60, tree_budget: int = 16) -> SpeculationStats:
    """Generate with a curve that says so; return the counters. Text must be plain decode's."""
    r = make("planted-moe", drafter=MTP, engine=False, n_ctx=256)
    settings = {**r.settings, "draft_tokens": 6, "tree_budget": tree_budget}
    r.engine = Engine(r.ctx, r.params, **settings, length=_capi.LENGTH_AUTO, curve=curve(row))
    text = [r.start()]
    while len(text) < tokens:
        r.engine.propose(text[-1])
        r.engine.verify()
        while r.engine.row() is not None:
            text.append(r.engine.next(r.sampler))
    r.engine.commit()
    stats = r.engine.stats()
    r.detach()
    r.settings = {**r.settings, "drafter": MTP}
    r.attach()
    assert r.reference(len(text)).tokens == text
    return stats


def test_a_plain_step_right_behind_a_draft_says_nothing(rig):
    """The drafter has the caches then. A second plain step is as in a pause, and counts."""
    r = rig("planted-moe", drafter=MTP, engine=False)
    nothing = Curve(*((0.0,) * _capi.CURVE_SIZE,) * 2)
    r.engine = Engine(
        r.ctx, r.params, **{**r.settings, "drafter": MTP}, length=_capi.LENGTH_AUTO, curve=nothing
    )
    token = r.start()

    def step(drafted):
        nonlocal token
        if drafted:
            assert r.engine.propose(token, 1) == 1
        else:
            r.engine.propose_given(token, [])
        r.engine.verify()
        token = r.engine.next(r.sampler)
        r.engine.commit()

    for _ in range(5):
        step(True)
        step(False)
    assert r.engine.curve().verify_us[1] == 0.0
    step(False)
    step(False)
    assert r.engine.curve().verify_us[1] > 0.0


def test_rows_that_cost_nothing_are_filled_with_branches(rig):
    stats = decode(rig, row=0.1)
    assert stats.tree_rounds > stats.rounds / 2
    assert stats.drafted / stats.rounds > 10


def test_rows_that_cost_a_step_are_not_taken(rig):
    stats = decode(rig, row=990.0)
    assert stats.tree_rounds == 0
    assert stats.drafted / stats.rounds < 2


def test_dearer_rows_make_narrower_trees(rig):
    nodes = [decode(rig, row).drafted / decode(rig, row).rounds for row in (1.0, 60.0, 400.0)]
    assert nodes[0] > nodes[1] > nodes[2]


def test_chains_keep_to_the_budget(rig):
    """Rows are cheap, but not as cheap as a branch would have to be; n-grams may draft too."""
    stats = decode(rig, row=20.0, tree_budget=3)
    assert stats.drafted > 0
    assert max(depth for depth, drafted in enumerate(stats.drafted_by_depth, 1) if drafted) <= 2


def test_branches_do_not_shorten_the_path_that_was_chosen(rig):
    """A drafter that is sure of nothing finds a root's branches more probable than a path's third token."""
    r = rig("moe-mtp", drafter=MTP, engine=False)
    settings = {**r.settings, "draft_tokens": 6, "tree_budget": 16}
    r.engine = Engine(r.ctx, r.params, **settings, length=_capi.LENGTH_AUTO, curve=curve(0.1))
    token = r.start()
    for _ in range(3):  # before refusals count
        r.engine.propose(token)
        tree = r.engine.tree()
        assert max(tree.depths) == 6
        assert len(tree.tokens) > 7, "branches beside it"
        r.engine.verify()
        token = r.engine.next(r.sampler)


def test_a_trial_has_no_branches(rig):
    """It is to say whether a token of the drafter is accepted, for little time."""
    r = rig("moe-mtp", drafter=MTP, engine=False, n_ctx=512)
    settings = {**r.settings, "draft_tokens": 6, "tree_budget": 16}
    dear = curve(1000.0)  # up to three rows; more of them cost nothing
    dear = Curve(dear.draft_us, tuple(min(us, dear.verify_us[3]) for us in dear.verify_us))
    r.engine = Engine(r.ctx, r.params, **settings, length=_capi.LENGTH_AUTO, curve=dear)
    token, shapes = r.start(), []
    while len(shapes) < 200:
        r.engine.propose(token)
        shapes.append(r.engine.tree().parents)
        r.engine.verify()
        while r.engine.row() is not None:
            token = next_scheduled(r.engine, r.sampler, accept=False)
    trials = [shape for shape in shapes[40:] if len(shape) > 1]
    assert trials
    assert set(trials) == {(-1, 0, 1)}


def test_an_unsure_path_ends_where_draft_p_min_says(rig):
    r = rig("moe-mtp", drafter=MTP, engine=False)
    settings = {**r.settings, "draft_tokens": 6, "tree_budget": 16}
    nodes = []
    for p_min in (0.0, 0.99):
        own = {**settings, "draft_p_min": p_min}
        r.engine = Engine(r.ctx, r.params, **own, length=_capi.LENGTH_AUTO, curve=curve(0.1))
        r.engine.propose(r.start())
        nodes.append(len(r.engine.tree().tokens))
        r.detach()
    assert nodes[0] > 7
    assert nodes[1] == 1
