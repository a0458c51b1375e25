"""src/round/draft_aftermath.h: what a draft costs the round behind it, and which drafts count. By tables.

Through draftwood-testing.h: bench/testing_api.py.
"""

from __future__ import annotations

import pytest

from bench.testing_api import CostModel
from tests.unit.cost_curves import curve

KNOWN = curve({1: 100, 4: 400}, {1: 1000, 2: 1100, 4: 1300, 8: 1700})


def drafts_and_steps(model: CostModel, n: int, behind: float, pace: float = 1.0) -> None:
    """Add n times: a round with a draft, a plain step behind it, two more. Times of KNOWN by `pace`."""
    for _ in range(n):
        model.session_draft(4, pace * 400)
        model.session_round(5, pace * 1400, drafted=True, n_tokens=3)
        model.session_round(1, pace * behind * 1000)
        model.session_round(1, pace * 1000)
        model.session_round(1, pace * 1000)


@pytest.mark.parametrize(
    ("shares_cores", "behind", "pace", "expected"),
    [
        pytest.param(True, 1.1, 1.0, 100, id="10 % longer: a tenth of a step"),
        pytest.param(True, 1.0, 1.0, 0, id="as long as others: nothing"),
        pytest.param(True, 0.9, 1.0, 0, id="shorter: nothing"),
        pytest.param(True, 3.0, 1.0, 200, id="held up: a fifth at most"),
        pytest.param(True, 1.0, 1.3, 0, id="the whole machine is slower: nothing"),
        pytest.param(True, 1.1, 1.3, 130, id="10 % longer on a slower machine"),
        pytest.param(False, 1.1, 1.0, 0, id="a GPU has no such caches"),
    ],
)
def test_what_a_draft_costs_the_round_behind_it(shares_cores, behind, pace, expected):
    model = CostModel(curve=KNOWN, shares_cores=shares_cores)
    drafts_and_steps(model, 200, behind, pace)
    assert model.cost_behind_draft() == pytest.approx(expected, rel=0.02, abs=5)


def test_a_draft_is_charged_with_it():
    """Where drafts are behind other rounds, it is in what they take more."""
    model = CostModel(curve=KNOWN)
    drafts_and_steps(model, 200, 1.1)
    model.update()
    assert model.cost_of_return() == pytest.approx(100, rel=0.02)
    assert model.curve().verify_us[1] == pytest.approx(1000, rel=0.02)


def test_so_is_a_draft_behind_a_draft():
    """The first of a row, while the cost is still known."""
    model = CostModel(curve=curve({1: 100}, {1: 1000, 64: 1400}))
    drafts_and_steps(model, 200, 1.1)
    model.update()
    model.session_round(5, 1400, drafted=True, n_tokens=3)
    model.session_draft(8, 400)
    model.update()
    assert model.curve().draft_us[8] == pytest.approx(400 + 100, rel=0.06)


def test_where_the_drafter_drafts_again_its_own_times_have_it():
    model = CostModel(curve=KNOWN)
    drafts_and_steps(model, 200, 1.1)
    for _ in range(200):
        model.session_draft(4, 400)
        model.session_round(5, 1700, drafted=True, n_tokens=3)
    assert model.cost_behind_draft() < 1


@pytest.mark.parametrize(
    ("rounds", "prompt", "counts"),
    [
        pytest.param(64, 0, True, id="64 tokens since the last draft"),
        pytest.param(65, 0, False, id="65 tokens: it catches up"),
        pytest.param(0, 63, True, id="a prompt of 63 and 1"),
        pytest.param(0, 64, False, id="a prompt of 64 and 1"),
        pytest.param(0, 1 << 30, False, id="a long prompt"),
    ],
)
def test_which_drafts_times_count(rounds, prompt, counts):
    model = CostModel()
    model.session_round(5, 1400, drafted=True)
    for _ in range(rounds):
        model.session_round(1, 1000)
    if prompt:
        model.session_prompt(prompt)
        model.session_prompt(1)
    model.session_draft(1, 100)
    model.update()
    assert (model.curve().draft_us[1] > 0) is counts


@pytest.mark.parametrize(("shares_cores", "counts"), [(True, False), (False, True)])
def test_a_plain_step_behind_a_draft(shares_cores, counts):
    """On a CPU it says nothing of those of a pause."""
    model = CostModel(shares_cores=shares_cores)
    model.session_round(5, 1400, drafted=True)
    model.session_round(1, 1000)
    model.update()
    assert (model.curve().verify_us[1] > 0) is counts


def test_the_first_plain_step_is_behind_no_draft():
    model = CostModel()
    model.session_round(1, 1000)
    model.update()
    assert model.curve().verify_us[1] == 1000


def returns(model: CostModel, n: int, us: int) -> None:
    """Add n times: a plain step, a draft behind it, another one behind that."""
    for _ in range(n):
        model.session_round(1, 1000)
        model.session_draft(4, us)
        model.session_round(5, 1400, drafted=True, n_tokens=3)
        model.session_draft(4, 400)
        model.session_round(5, 1400, drafted=True, n_tokens=3)


@pytest.mark.parametrize(
    ("shares_cores", "us", "expected"),
    [
        pytest.param(True, 650, 250, id="longer by 250"),
        pytest.param(True, 400, 0, id="as long"),
        pytest.param(True, 300, 0, id="shorter"),
        pytest.param(True, 90000, 1200, id="held up: three drafts at most"),
        pytest.param(False, 650, 0, id="a GPU has no such caches"),
    ],
)
def test_what_a_draft_behind_other_rounds_takes_more(shares_cores, us, expected):
    model = CostModel(curve=KNOWN, shares_cores=shares_cores)
    returns(model, 100, us)
    assert model.cost_of_return() == 0, "the next draft is behind a draft"
    model.session_round(1, 1000)
    assert model.cost_of_return() == pytest.approx(expected, rel=0.02, abs=1)


def test_it_is_not_in_the_curve():
    model = CostModel(curve=KNOWN)
    returns(model, 100, 650)
    model.update()
    assert model.curve().draft_us[4] == pytest.approx(400, rel=0.01)


def test_it_is_in_the_choice():
    """A draft of four pays behind a draft and not behind a plain step."""
    model = CostModel(curve=curve({1: 100, 4: 400}, {1: 1000, 2: 1300, 4: 1900, 8: 3100}))
    for _ in range(100):
        model.add_acceptance(4, 2)
    assert model.choose(4)[1] > 0
    returns(model, 100, 1600)
    assert model.choose(4)[1] > 0
    model.session_round(1, 1000)
    assert model.choose(4)[1] == 0


@pytest.mark.parametrize(
    ("shares_cores", "prompt", "drafts"),
    [(True, 0, True), (True, 65, False), (False, 65, True)],
    ids=["none", "on a CPU", "on a GPU"],
)
def test_a_drafter_that_would_read_a_prompt_first_must_win_by_more(shares_cores, prompt, drafts):
    """A draft that is better than a plain step by 5 %."""
    model = CostModel(curve=curve({1: 100}, {1: 1000, 2: 1000}), shares_cores=shares_cores)
    for _ in range(1000):
        model.add_acceptance(1, 0)
    for _ in range(7):
        model.add_acceptance(1, 1)
    micros, tokens = model.expect(1)
    assert 1.03 < tokens / micros * 1000 < 1.07
    if prompt:
        model.session_prompt(prompt)
    assert (model.choose(1)[1] > 0) is drafts


@pytest.mark.parametrize(
    ("us", "trials"),
    [
        pytest.param(100, [64, 65, 193, 194], id="catching up costs little"),
        pytest.param(3000, [64, 65], id="2 % of the rounds up to the next trial: there is none"),
    ],
)
def test_trials_end_where_catching_up_took_much_time(us, trials):
    """A prompt, 64 plain steps, a trial of two rounds, 127 plain steps more."""
    model = CostModel(curve=curve({1: 100, 4: 400}, {1: 1000, 2: 3000, 4: 6000, 8: 12000}))
    model.session_prompt(100)
    found = []
    for i in range(200):
        _, n_tokens = model.choose(4)
        if n_tokens > 0:
            found.append(i)
            model.session_draft(n_tokens, us)
        model.session_round(1 + n_tokens, 1000, drafted=n_tokens > 0)
    assert found == trials


def better_by(ratio: float) -> CostModel:
    """Return a model whose draft of one token is better than a plain step by this ratio."""
    model = CostModel(curve=curve({1: 100}, {1: 1000, 2: round(1000 * 1.75 / ratio) - 100}))
    micros, tokens = model.expect(1)
    assert tokens / micros * 1000 == pytest.approx(ratio, rel=0.001)
    return model


@pytest.mark.parametrize(("ratio", "drafts"), [(1.09, 0), (1.11, 1)])
def test_behind_a_prompt_the_margin_is_ten_percent_over_a_plain_step(ratio, drafts):
    model = better_by(ratio)
    assert model.choose(1)[1] == 1
    model.session_prompt(100)
    assert model.choose(1)[1] == drafts


@pytest.mark.parametrize(("ratio", "drafts"), [(1.31, 0), (1.34, 1)])
def test_a_dear_drafter_must_win_by_a_third(ratio, drafts):
    """One that read a prompt for a single round. Its draft took 60 ms longer, of 100 rounds of 1 ms."""
    model = better_by(ratio)
    for _ in range(100):
        model.session_round(1, 1000)
    model.session_draft(1, 60000)
    model.session_round(2, 1000, drafted=True)
    model.session_prompt(100)
    assert model.choose(1)[1] == drafts


@pytest.mark.parametrize(("rounds", "drafts"), [(14, 0), (15, 1)])
def test_sixteen_rounds_of_drafts_earn_a_prompt(rounds, drafts):
    model = better_by(1.2)
    model.session_prompt(100)
    for i in range(1 + rounds):
        model.session_draft(1, 100 if i else 2000)
        model.session_round(2, 1000, drafted=True)
    model.session_prompt(100)
    assert model.choose(1)[1] == drafts


def test_what_catching_up_cost_is_forgotten_where_rounds_are_not_timed():
    """With many engines on one context no round has a time of its own."""
    model = better_by(1.2)
    model.session_prompt(100)
    model.session_draft(1, 2000)
    model.session_round(2, 0, drafted=True)
    model.session_prompt(100)
    assert model.choose(1)[1] == 0
    for _ in range(600):
        model.session_round(1, 0)
    model.session_prompt(100)
    assert model.choose(1)[1] == 1
