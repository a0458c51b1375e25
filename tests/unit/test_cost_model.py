"""src/round/cost_model.*, acceptance.*: what speculation="auto" decides, by tables.

A row names its case. Decisions named after a machine are those of bench/LOG.md. The model runs without an
engine: bench/testing_api.py, draftwood-testing.h. Times: test_cost_curve.py.
"""

from __future__ import annotations

import ctypes
import random

import pytest
from draftwood.engine import _capi

from bench import testing_api
from bench.testing_api import SOURCE_DRAFTER, SOURCE_NGRAM, CostModel
from tests.unit.cost_curves import (
    ALWAYS,
    H100,
    H200,
    H200_DFLASH,
    NEVER,
    PADDED,
    PLAIN,
    STEPS,
    TWO_CORES,
    TWO_CORES_BUSY,
    TWO_CORES_Q8,
    accept,
    curve,
    linear,
)

# --- acceptance


@pytest.mark.parametrize(
    ("rates", "rounds", "n_tokens", "expected"),
    [
        pytest.param([0.5], 0, 1, 1.75, id="nothing is known: 3 of 4"),
        pytest.param([0.5], 0, 3, 1 + 0.75 + 0.75**2 + 0.75**3, id="nothing is known, three tokens"),
        pytest.param([NEVER], 1, 1, 1 + 1.5 / 3, id="refused once: 1.5 of 3"),
        pytest.param([ALWAYS], 1, 1, 1 + 2.5 / 3, id="accepted once: 2.5 of 3"),
        pytest.param([NEVER] * 4, 400, 4, 1 + 1.5 / 52 * (1 + 0.75 + 0.75**2 + 0.75**3), id="never"),
        pytest.param([ALWAYS] * 4, 400, 4, 4.9, id="always"),
        pytest.param([0.75, 0.5, 0.25], 400, 3, 1 + 0.75 + 0.375 + 0.09375, id="falling by depth"),
    ],
)
def test_expected_tokens(rates, rounds, n_tokens, expected):
    model = CostModel()
    accept(model, rates, rounds)
    assert model.expect(n_tokens)[1] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param((SOURCE_NGRAM, 4, 4), 0.95, id="all right: as behind a token that was right"),
        pytest.param((SOURCE_NGRAM, 4, 3), 0.5, id="one wrong: as a first token"),
        pytest.param((SOURCE_DRAFTER, 0, 0), 0.5, id="a plain step"),
        pytest.param((SOURCE_DRAFTER, 4, 4), 0.5, id="the drafter's draft"),
    ],
)
def test_ngrams_that_were_right_go_on_to_be(before, expected):
    """Every second draft is wrong at its first token, the others are right to their end."""
    model = CostModel()
    for accepted in [0, 4] * 100:
        model.add_acceptance(4, accepted, SOURCE_NGRAM)
        model.add_acceptance(0, 0)
    source, judged, accepted = before
    model.add_acceptance(judged, accepted, source)
    assert model.expect(1, SOURCE_NGRAM)[1] == pytest.approx(1 + expected, abs=0.06)


def test_a_draft_behind_a_right_one_counts_one_depth_further():
    model = CostModel()
    for _ in range(2):
        model.add_acceptance(1, 1, SOURCE_NGRAM)
    model.add_acceptance(0, 0)  # a plain step
    assert model.expect(1, SOURCE_NGRAM)[1] == pytest.approx(1 + 2.5 / 3), "one draft was a first token"


def test_a_prompt_ends_what_n_grams_were_right_about():
    model = CostModel()
    for accepted in [0, 4] * 100:
        model.add_acceptance(4, accepted, SOURCE_NGRAM)
        model.add_acceptance(0, 0)
    model.add_acceptance(4, 4, SOURCE_NGRAM)
    model.session_prompt(1)
    assert model.expect(1, SOURCE_NGRAM)[1] == pytest.approx(1.5, abs=0.06)


def test_older_rounds_weigh_less():
    """50 refusals after 200 acceptances: 36 % of the weight is left of these, 0.98 a round."""
    model = CostModel()
    accept(model, [ALWAYS])
    accept(model, [NEVER], 50)
    left = 0.98**50
    reached = (1 - 0.98**250) / 0.02
    accepted = left * (1 - 0.98**200) / 0.02
    assert model.expect(1)[1] == pytest.approx(1 + (accepted + 1.5) / (reached + 2.0))


def test_depths_behind_a_refused_token_are_not_judged():
    model = CostModel()
    for _ in range(100):
        model.add_acceptance(4, 1)
    _, one = model.expect(1)
    two, three = model.expect(2)[1], model.expect(3)[1]
    refused = 1.5 / (2 + (1 - 0.98**100) / 0.02)
    assert (two - one) / (one - 1) == pytest.approx(refused)  # depth 1: always refused
    assert (three - two) / (two - one) == pytest.approx(0.75)  # depth 2: never reached


def test_sources_have_records_of_their_own():
    model = CostModel()
    accept(model, [NEVER], source=SOURCE_NGRAM)
    assert model.expect(1, SOURCE_DRAFTER)[1] == 1.75
    assert model.expect(1, SOURCE_NGRAM)[1] < 1.05


# --- the choice


@pytest.mark.parametrize(
    ("costs", "rates", "longest", "expected"),
    [
        pytest.param(linear(0.0, draft=0.001), [0.5] * 8, 8, 8, id="drafts and rows cost nothing: all"),
        pytest.param(linear(0.0), [0.5] * 8, 8, 6, id="rows cost nothing: drafts do"),
        pytest.param(linear(0.0), [0.5] * 8, 3, 3, id="the context has room for 3"),
        pytest.param(linear(0.0), [0.5] * 8, 0, 0, id="the context has no room"),
        pytest.param(linear(1000.0), [0.9] * 8, 8, 0, id="a row costs a step: none"),
        pytest.param(linear(100.0), [NEVER] * 8, 8, 0, id="never accepted: none"),
        pytest.param(linear(100.0), [ALWAYS] * 8, 8, 8, id="always accepted: all"),
        pytest.param(linear(150.0), [0.9, 0.8, 0.1, 0.9], 8, 2, id="falling by depth: up to the fall"),
        pytest.param(linear(150.0), [0.5] * 8, 8, 2, id="dearer rows: shorter"),
        pytest.param(linear(40.0), [0.5] * 8, 8, 3, id="cheaper rows: longer"),
        pytest.param(STEPS, [0.7] * 8, 8, 3, id="steps: up to the first one"),
        pytest.param(STEPS, [0.99] * 8, 8, 7, id="steps: over the first one if it is accepted"),
        pytest.param(H200, [0.618034] * 2, 2, 2, id="H200 length2: 1.34x to 1.40x with 2 drafts"),
        pytest.param(H200, [0.834323] * 8, 8, 3, id="H200 length4-auto: 2 to 4 drafts, 1.63x"),
        pytest.param(H200, [NEVER] * 8, 8, 0, id="H200: never accepted"),
        pytest.param(H200_DFLASH, [0.844484] * 15, 15, 4, id="H200 length6, DFlash"),
        pytest.param(H100, [0.62] * 8, 8, 1, id="H100: a draft of 1 ms each, a fifth of a step"),
        pytest.param(TWO_CORES, [0.8] * 8, 8, 2, id="two cores, json at temperature 0"),
        pytest.param(TWO_CORES, [0.55] * 8, 8, 0, id="two cores at 0.8: 2 tokens do not pay"),
        pytest.param(TWO_CORES_Q8, [0.8] * 8, 8, 1, id="two cores, Q8_0: 4 rows take 3 steps"),
        pytest.param(TWO_CORES_Q8, [0.6] * 8, 8, 0, id="two cores, Q8_0, fewer accepted: none"),
        pytest.param(TWO_CORES_BUSY, [0.8] * 8, 8, 1, id="two cores with a load of 11: 2 rows still pay"),
    ],
)
def test_how_many_tokens_are_drafted(costs, rates, longest, expected):
    model = CostModel(curve=costs)
    accept(model, rates)
    assert model.choose(longest) == (SOURCE_DRAFTER, expected)


@pytest.mark.parametrize(
    ("micros", "expected"),
    [
        pytest.param(1000 * 1.75 / 1.03, (SOURCE_DRAFTER, 1), id="3 % faster than plain: drafted"),
        pytest.param(1000 * 1.75 / 1.01, PLAIN, id="1 % faster than plain: within the margin of 2 %"),
        pytest.param(1000 * 1.75, PLAIN, id="a tie: plain"),
    ],
)
def test_drafting_must_win_by_a_margin(micros, expected):
    """Before the first round a draft of one has 1.75 expected tokens."""
    assert CostModel(curve=curve({1: 0.5}, {1: 1000, 2: micros - 0.5})).choose(1) == expected


@pytest.mark.parametrize(
    ("drafter", "ngram", "draft_us", "expected"),
    [
        pytest.param(0.8, 0.8, 50.0, (SOURCE_NGRAM, 4), id="as often accepted: n-grams, which cost nothing"),
        pytest.param(0.8, 0.3, 50.0, (SOURCE_DRAFTER, 4), id="rarely accepted n-grams: the drafter"),
        pytest.param(0.8, 0.7, 300.0, (SOURCE_NGRAM, 3), id="a dear drafter: n-grams, though fewer tokens"),
        pytest.param(0.8, 0.8, None, (SOURCE_DRAFTER, 4), id="a tie: the drafter"),
    ],
)
def test_who_drafts(drafter, ngram, draft_us, expected):
    verify = {1: 1000, 64: 1000 + 63 * 150}
    drafts = {} if draft_us is None else {n: n * draft_us for n in range(1, 64)}
    model = CostModel(curve=curve(drafts, verify))
    accept(model, [drafter] * 4, source=SOURCE_DRAFTER)
    accept(model, [ngram] * 4, source=SOURCE_NGRAM)
    assert model.choose(4, 4) == expected


@pytest.mark.parametrize(
    ("costs", "longest", "expected"),
    [
        pytest.param(None, (5, 0), (SOURCE_DRAFTER, 5), id="no times: the drafter's longest measures"),
        pytest.param(curve({}, {1: 1000, 2: 1e9}), (5, 3), PLAIN, id="no draft times: verifies decide"),
    ],
)
def test_before_times_are_known(costs, longest, expected):
    assert CostModel(curve=costs).choose(*longest) == expected


# --- pauses, trials, recoveries


def rounds_of(model: CostModel, n: int, accepted: int, longest: int = 8) -> list[int]:
    """Run n rounds whose drafts are accepted up to `accepted` tokens; return the drafted tokens of each."""
    drafted = []
    for _ in range(n):
        _, tokens = model.choose(longest)
        if tokens > 0:
            model.add_acceptance(tokens, min(tokens, accepted))
        drafted.append(tokens)
    return drafted


@pytest.mark.parametrize(
    ("costs", "drafts_before"),
    [
        pytest.param(TWO_CORES, 0, id="two cores: three of four accepted would not pay"),
        pytest.param(TWO_CORES_Q8, 0, id="two cores, Q8_0: neither"),
        pytest.param(H200, 4, id="H200"),
        pytest.param(H100, 3, id="H100"),
        pytest.param(linear(100.0), 11, id="rows of 10 %"),
        pytest.param(linear(200.0), 5, id="rows of 20 %"),
    ],
)
def test_rounds_until_a_pause_if_nothing_is_accepted(costs, drafts_before):
    drafted = rounds_of(CostModel(curve=costs, shares_cores=False), drafts_before + 16, 0)
    assert all(n > 0 for n in drafted[:drafts_before])
    assert drafted[drafts_before : drafts_before + 16] == [0] * 16


@pytest.mark.parametrize(
    ("shares_cores", "row", "size", "expected"),
    [
        pytest.param(True, 1000.0, 2, [65, 194, 451, 964, 1989], id="CPU: up to 1024 rounds"),
        pytest.param(
            False, 300.0, 1, [57, 114, 179, 308, 565, 1078, 1591, 2104], id="GPU: 56 rounds pay for a trial"
        ),
        pytest.param(False, 1000.0, 1, [197, 394, 591, 788, 1045, 1558, 2071], id="GPU: 196 rounds do"),
    ],
)
def test_trials_of_a_pause(shares_cores, row, size, expected):
    """On a CPU two rounds of two tokens, on a GPU one of one token. Pauses double, unless time is short."""
    model = CostModel(curve=linear(row), shares_cores=shares_cores)
    accept(model, [NEVER])
    drafted = rounds_of(model, 2560, 0)
    trials = [i for i, n in enumerate(drafted) if n > 0]
    first = [i for i in trials if i - 1 not in trials]
    assert [i + 1 for i in first] == expected
    assert trials == [j for i in first for j in range(i, i + size)]
    assert {drafted[i] for i in trials} == {size}


def test_a_trial_on_a_gpu_goes_on_while_its_tokens_are_accepted():
    model = CostModel(curve=linear(1000.0), shares_cores=False)
    accept(model, [NEVER])
    assert rounds_of(model, 196, 0) == [0] * 196
    assert rounds_of(model, 3, 1) == [1] * 3
    assert rounds_of(model, 3, 0) == [1, 0, 0]


@pytest.mark.parametrize(
    ("first", "others", "draft", "expected"),
    [
        pytest.param(2000, 2000, 0, [196, 393, 590, 787], id="as the curve says"),
        pytest.param(
            3000, 3000, 0, [196, 453, 752], id="longer: the drafter catches up in the verify's time"
        ),
        pytest.param(2000, 2000, 1000, [196, 453, 751], id="longer, and the draft was waited for"),
        pytest.param(
            90_000, 2000, 0, [196, 513, 794], id="a graph was built in the first one: four plain steps"
        ),
    ],
)
def test_what_trials_took_is_in_the_next_pause(first, others, draft, expected):
    model = CostModel(curve=linear(1000.0), shares_cores=False)
    accept(model, [NEVER])
    trials = []
    for i in range(800):
        if not rounds_of(model, 1, 0)[0]:
            model.session_round(1, 1000)
            continue
        trials.append(i)
        if draft:
            model.session_draft(1, draft)
        model.session_round(2, others if len(trials) > 1 else first, drafted=True)
    assert trials == expected


@pytest.mark.parametrize("row", [300.0, 1000.0])
def test_a_pause_says_which_of_its_rounds_is_a_plain_step(row):
    """From its 17th round on, and trials are known before they come."""
    model = CostModel(curve=linear(row), shares_cores=False)
    accept(model, [NEVER])
    for i in range(900):
        comes = model.plain_step_comes()
        drafted = rounds_of(model, 1, 0)[0]
        assert comes == (i >= 16 and drafted == 0), i


def test_a_pause_begins_anew_behind_a_draft():
    model = CostModel(curve=linear(300.0), shares_cores=False)
    accept(model, [NEVER])
    assert rounds_of(model, 20, 0) == [0] * 20
    assert model.plain_step_comes()
    accept(model, [ALWAYS], 400)
    assert rounds_of(model, 1, 1)[0] > 0
    assert not model.plain_step_comes()


def test_n_grams_that_are_due_for_a_trial_and_find_nothing_are_no_surprise():
    model = CostModel(curve=linear(1000.0), shares_cores=False)
    accept(model, [NEVER])
    for _ in range(15):
        assert model.choose(0, 1)[1] == 0
    for _ in range(40):
        assert model.choose(0, 0)[1] == 0
        assert model.choose(0, 0)[1] == 0
    assert model.plain_step_comes()
    while model.choose(0, 1)[1] == 0:  # the trial comes as soon as they find something
        pass


def test_a_trial_ends_with_its_round():
    """Rounds that others chose, as those of several sequences, do not go on with it."""
    model = CostModel(curve=linear(1000.0), shares_cores=False)
    accept(model, [NEVER])
    assert rounds_of(model, 197, 0)[-1] == 1
    model.session_round(2, 2000, drafted=True)
    model.add_acceptance(1, 1)
    model.session_round(2, 2000, drafted=True)
    assert rounds_of(model, 1, 0) == [0]


def test_a_trial_beside_a_source_that_pays_costs_what_that_one_would_give():
    """N-grams are tried with one token where the drafter gives eight."""
    trials = []
    for rate in (NEVER, 0.95):
        model = CostModel(curve=linear(100.0), shares_cores=False)
        accept(model, [rate] * 8)
        accept(model, [NEVER] * 8, source=SOURCE_NGRAM)
        chosen = []
        for _ in range(200):
            source, tokens = model.choose(8, 8)
            model.add_acceptance(tokens, tokens if source == SOURCE_DRAFTER and rate else 0, source)
            chosen.append(source == SOURCE_NGRAM and tokens > 0)
        trials.append([i for i, tried in enumerate(chosen) if tried])
    assert trials[0][0] == 17  # behind the drafter's own
    assert trials[1][0] > 80


def test_what_is_known_weighs_little_in_a_trial_on_a_gpu():
    """Its rate stays until the trial says something else."""
    model = CostModel(curve=linear(500.0), shares_cores=False)
    accept(model, [0.25])
    _, before = model.expect(1)
    assert rounds_of(model, 48, 0) == [0] * 47 + [1]
    _, behind = model.expect(1)
    accepted = (before - 1) * (4 + 2) - 0.75 * 2  # of four rounds, beside the prior's two tokens
    assert behind - 1 == pytest.approx((0.98 * accepted + 0.75 * 2) / (0.98 * 4 + 1 + 2))


def test_a_trial_is_no_longer_than_the_room():
    assert max(rounds_of(CostModel(curve=linear(1000.0)), 80, 0, longest=1)) == 1


@pytest.mark.parametrize(
    ("shares_cores", "pause", "trial"), [(True, 64, [2, 2]), (False, 196, [1, 0])], ids=["CPU", "GPU"]
)
def test_rounds_without_room_do_not_count(shares_cores, pause, trial):
    """Not for the pause, and not for the trial."""
    model = CostModel(curve=linear(1000.0), shares_cores=shares_cores)
    accept(model, [NEVER])
    assert rounds_of(model, 10, 0) == [0] * 10
    assert rounds_of(model, 280, 0, longest=0) == [0] * 280
    assert rounds_of(model, pause - 10, 0) == [0] * (pause - 10)
    assert rounds_of(model, 5, 0, longest=0) == [0] * 5
    assert rounds_of(model, 2, 0) == trial


@pytest.mark.parametrize(
    ("costs", "refused", "waits", "trial"),
    [
        pytest.param(linear(100.0), 20, 7, 1, id="rows of 10 %, a short pause"),
        pytest.param(linear(100.0), 100, 25, 1, id="rows of 10 %, a long pause"),
        pytest.param(linear(250.0), 300, 204, 2, id="rows of 25 %"),
        pytest.param(linear(400.0), 500, 2, 6, id="rows of 40 %: a longer trial"),
    ],
)
def test_recoveries(costs, refused, waits, trial):
    """Drafts are refused, then all accepted: from the first trial on a GPU drafts."""
    model = CostModel(curve=costs, shares_cores=False)
    rounds_of(model, refused, 0)
    drafted = rounds_of(model, waits + 120, 8)
    assert drafted[:waits] == [0] * waits
    assert drafted[waits : waits + trial] == [1] * trial
    assert min(drafted[waits + trial :]) > 1


@pytest.mark.parametrize(
    ("costs", "refused", "waits"),
    [
        pytest.param(linear(100.0), 100, 104, id="rows of 10 %"),
        pytest.param(linear(250.0), 300, 154, id="rows of 25 %"),
    ],
)
def test_recoveries_on_a_cpu(costs, refused, waits):
    """The same; then two plain steps are timed behind 128 rounds."""
    model = CostModel(curve=costs)
    rounds_of(model, refused, 0)
    drafted = rounds_of(model, waits + 128, 8)
    assert drafted[:waits] == [0] * waits
    assert min(drafted[waits:]) > 0


def test_a_chosen_draft_ends_the_longer_pauses():
    """After a recovery the next pause is 16 rounds again."""
    model = CostModel(curve=linear(60.0), shares_cores=False)
    rounds_of(model, 200, 0)
    rounds_of(model, 600, 8)
    drafted = rounds_of(model, 400, 0)
    first = next(
        i for i in range(len(drafted)) if drafted[i : i + 2] == [0, 0]
    )  # not a trial of a plain step
    assert drafted[first : first + 18] == [0] * 16 + [1, 0]


def test_a_draft_now_and_then_shortens_the_pauses():
    """Each chosen round takes 64 rounds off on a CPU."""
    model = CostModel(curve=linear(1000.0))
    rounds_of(model, 453, 0)  # three trials: the next pause is 512 rounds
    model.set_curve(linear(100.0))
    for _ in range(16):
        model.add_acceptance(8, 8)
    assert rounds_of(model, 3, 8) == [8, 8, 8]
    model.set_curve(linear(1000.0))
    for _ in range(16):
        model.add_acceptance(1, 0)
    assert rounds_of(model, 400, 0).index(2) == 512 - 3 * 64


@pytest.mark.parametrize(("shares_cores", "plain"), [(True, [128, 129, 258, 259]), (False, [128, 257])])
def test_plain_steps_among_drafts(shares_cores, plain):
    """They say how fast a plain step is now: on a CPU the second one, behind no draft."""
    drafted = rounds_of(CostModel(curve=linear(100.0), shares_cores=shares_cores), 300, 8)
    assert [i for i, n in enumerate(drafted) if n == 0] == plain


def test_sources_are_tried_apart():
    """The drafter's trial comes first, the n-grams' own one a round later."""
    model = CostModel(curve=linear(1000.0))
    accept(model, [NEVER] * 4, source=SOURCE_NGRAM)
    chosen = [model.choose(4, 4) for _ in range(68)]
    assert chosen[:64] == [PLAIN] * 64
    assert chosen[64:] == [(SOURCE_DRAFTER, 2), (SOURCE_DRAFTER, 2), (SOURCE_NGRAM, 2), (SOURCE_NGRAM, 2)]


# --- trees


@pytest.mark.parametrize(
    ("costs", "n_tokens", "expected"),
    [
        pytest.param(linear(0.1), 3, True, id="rows cost nothing"),
        pytest.param(linear(900.0), 3, False, id="rows cost a step"),
        pytest.param(linear(0.1), 0, False, id="a plain step has no branches"),
        pytest.param(linear(0.1), 63, False, id="a draft of 63 fills the largest tree"),
        pytest.param(linear(0.1), 62, True, id="a draft of 62 leaves a row"),
        pytest.param(None, 3, False, id="times are not known"),
        pytest.param(linear(75.0), 3, True, id="3 drafts, 4 more rows of 7.5 %"),
        pytest.param(linear(150.0), 3, False, id="3 drafts, 4 more rows of 15 %"),
    ],
)
def test_whether_branches_pay(costs, n_tokens, expected):
    assert CostModel(curve=costs).pays_to_branch(n_tokens) is expected


@pytest.mark.parametrize(
    ("costs", "branches", "expected"),
    [
        pytest.param(linear(0.1), [0.2] * 12, 16, id="rows cost nothing: all"),
        pytest.param(linear(0.1), [], 4, id="no branches"),
        pytest.param(linear(900.0), [0.2] * 12, 4, id="rows cost a step: none"),
        pytest.param(linear(20.0), [0.2] * 4 + [0.01] * 8, 8, id="improbable ones stay out"),
        pytest.param(linear(20.0), [0.05] * 12, 4, id="less than the margin of 2 %: none"),
        pytest.param(linear(0.1), [0.2] * 5, 9, id="padding up to 12 rows is paid for"),
        pytest.param(linear(0.0), [0.0] * 12, 4, id="branches that are never right"),
        pytest.param(linear(0.1), [0.2] * 64, 64, id="at most 64 nodes"),
        pytest.param(linear(0.0), [0.03], 4, id="1 % faster: within the margin"),
        pytest.param(linear(0.0), [0.08], 5, id="3 % faster: over the margin"),
        pytest.param(PADDED, [0.2], 4, id="5 nodes take 8 rows"),
    ],
)
def test_tree_sizes(costs, branches, expected):
    assert CostModel(curve=costs).tree_size(3, branches) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param([0] * 100, 4, id="branches that were never accepted: none"),
        pytest.param([0] * 10, 4, id="10 rounds without one: less than half"),
        pytest.param([1, 0, 0, 0] * 25, 8, id="as often as expected: those beside four rows"),
        pytest.param([1] * 100, 16, id="four times as often"),
    ],
)
def test_tree_sizes_follow_what_branches_gave(found, expected):
    model = CostModel(curve=linear(60.0))
    for accepted in found:
        model.add_branches([0.15, 0.1], accepted)
    assert model.tree_size(3, [0.2] * 4 + [0.1] * 8) == expected


# --- all of it


@pytest.mark.parametrize("seed", range(20))
def test_choices_are_the_fastest_by_the_model_itself(seed):
    """Outside of trials the choice is the best of all expectations, but for the margin of plain steps."""
    draw = random.Random(seed)
    row, draft = draw.uniform(0, 400), draw.uniform(1, 200)
    model = CostModel(curve=linear(row, draft))
    accept(model, [draw.uniform(0.2, 1.0) for _ in range(8)])
    accept(model, [draw.uniform(0.2, 1.0) for _ in range(8)], source=SOURCE_NGRAM)

    def speed(source: int, n: int) -> float:
        micros, tokens = model.expect(n, source)
        return tokens / micros * (1.02 if n == 0 else 1.0)

    options = [(source, n) for source in (SOURCE_DRAFTER, SOURCE_NGRAM) for n in range(9)]
    source, n = model.choose(8, 8)
    assert speed(source, n) == max(speed(*option) for option in options)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("dw_cost_model_add_verify_time", [65, 1], "n_rows is 65; expected 1 to 64"),
        ("dw_cost_model_add_draft_time", [64, 1], "n_tokens is 64; expected 1 to 63"),
        ("dw_cost_model_add_draft_time", [0, 1], "n_tokens is 0; expected 1 to 63"),
        ("dw_cost_model_add_acceptance", [2, 1, 0], "source is 2; expected 0 to 1"),
        ("dw_cost_model_add_acceptance", [0, 1, 2], "n_accepted is 2; expected 0 to 1"),
    ],
)
def test_values_out_of_range(name, arguments, text):
    model = CostModel()
    assert getattr(_capi.lib, name)(model._handle, *arguments) == _capi.ERR_ARGUMENT
    assert _capi.lib.dw_last_error().decode() == text


@pytest.mark.parametrize("name", [name for name in testing_api.SIGNATURES if "cost_model" in name])
def test_null_models(name):
    result, types = testing_api.SIGNATURES[name]
    zeros = [None if type_ in (ctypes.c_void_p,) or hasattr(type_, "contents") else 0 for type_ in types]
    status = getattr(_capi.lib, name)(*zeros)
    assert result is None or status == _capi.ERR_ARGUMENT
