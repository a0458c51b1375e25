"""src/round/cost_curve.*: what "auto" makes of the times of rounds, by tables.

A row names its case. The model runs without an engine: bench/testing_api.py, draftwood-testing.h.
"""

from __future__ import annotations

import random

import pytest

from bench.testing_api import SOURCE_DRAFTER, SOURCE_NGRAM, CostModel
from tests.unit.cost_curves import PLAIN, TWO_CORES, accept, curve, linear

# --- the curve

EVEN = {1: 1000.0, 4: 1600.0, 8: 3200.0}


@pytest.mark.parametrize(
    ("known", "size", "expected"),
    [
        pytest.param({}, 3, 0.0, id="nothing is known"),
        pytest.param(EVEN, 4, 1600.0, id="a known size"),
        pytest.param(EVEN, 6, 2400.0, id="between two sizes: interpolated"),
        pytest.param(EVEN, 10, 4000.0, id="beyond the last: its slope goes on"),
        pytest.param({1: 1000.0, 4: 800.0}, 8, 800.0, id="beyond the last: a falling slope does not"),
        pytest.param({4: 1600.0}, 9, 1600.0, id="beyond the only size"),
        pytest.param({4: 1600.0}, 3, 1200.0, id="below the only size: through the origin"),
        pytest.param(dict.fromkeys(range(1, 65), 5.0), 64, 5.0, id="the largest size"),
    ],
)
def test_draft_times_between_known_sizes(known, size, expected):
    flat = {1: 1e6, 64: 1e6}
    model = CostModel(curve=curve({n: t for n, t in known.items() if n < 64}, flat), shares_cores=False)
    micros, _ = model.expect(min(size, 63))
    assert micros - 1e6 == pytest.approx(expected)


@pytest.mark.parametrize(("shares_cores", "expected"), [(True, 500), (False, 240)], ids=["CPU", "GPU"])
def test_a_longer_draft_is_never_cheaper_on_a_cpu(shares_cores, expected):
    """One of four tokens was timed while the machine was fast."""
    model = CostModel(curve=curve({1: 200, 2: 500, 4: 240}, {1: 1000, 64: 1000}), shares_cores=shares_cores)
    micros, _ = model.expect(4)
    assert micros - 1000 == pytest.approx(expected)


@pytest.mark.parametrize(("shares_cores", "expected"), [(True, True), (False, False)], ids=["CPU", "GPU"])
def test_drafts_that_take_much_longer_outdate_the_curve(shares_cores, expected):
    model = CostModel(curve=curve({1: 200, 4: 240}, {1: 1000, 8: 1700}), shares_cores=shares_cores)
    for _ in range(8):
        model.session_round(5, 1400, drafted=True)
        model.session_draft(4, 640)
    assert model.is_outdated() is expected


@pytest.mark.parametrize(
    ("verify", "n_tokens", "expected"),
    [
        pytest.param(EVEN, 3, 1600.0, id="rows are tokens and the root"),
        pytest.param({1: 1000.0, 4: 700.0}, 3, 1000.0, id="never less than a plain step"),
        pytest.param({1: 1000.0}, 7, 1000.0, id="only plain steps are known"),
    ],
)
def test_n_grams_cost_the_verify_only(verify, n_tokens, expected):
    micros, _ = CostModel(curve=curve({1: 500}, verify)).expect(n_tokens, SOURCE_NGRAM)
    assert micros == pytest.approx(expected)


# --- new times


BUSY = 1 / 0.6  # 1.67
QUIET = linear(100.0)  # a verify of 4 rows: 1,300


def verifies(model: CostModel, *ratios: float, rows: int = 4) -> None:
    """Add verifies that took so many times what QUIET says."""
    for ratio in ratios:
        model.add_verify(rows, ratio * (1000 + 100 * (rows - 1)))


@pytest.mark.parametrize(
    ("rows", "ratios", "shares_cores", "expected"),
    [
        pytest.param(4, [1.7] * 8, True, True, id="8 verifies over 1.67 times the curve"),
        pytest.param(4, [1.7] * 7, True, False, id="7 verifies"),
        pytest.param(4, [1.64] * 8, True, False, id="8 verifies of 1.64 times"),
        pytest.param(1, [1.7] * 8, True, True, id="8 plain steps"),
        pytest.param(4, [1.7] * 8, False, False, id="on a GPU"),
        pytest.param(4, [1.0] * 7 + [100.0], True, False, id="one round that was held up"),
        pytest.param(4, [1.0] + [1.7] * 7, True, False, id="the mean without the longest: 1.6 times"),
        pytest.param(4, [1.0] + [1.8] * 7, True, True, id="the mean without the longest: 1.69 times"),
        pytest.param(4, [1.7] * 8 + [1.0] * 4, True, False, id="the newest 8 count"),
        pytest.param(4, [1.0] * 9 + [1.7] * 8, True, True, id="older ones do not"),
        pytest.param(4, [1.0, 1.0, 1.0, 4.5] * 2, True, False, id="bursts of 4.5 times, two of 8: 1.5 times"),
        pytest.param(4, [1.0, 1.0, 4.5, 4.5] * 2, True, True, id="bursts of 4.5 times, four of 8: 2.5 times"),
    ],
)
def test_when_a_busy_machine_is_noticed(rows, ratios, shares_cores, expected):
    model = CostModel(curve=QUIET, shares_cores=shares_cores)
    verifies(model, *ratios, rows=rows)
    assert model.is_outdated() is expected


def test_plain_steps_and_verifies_are_counted_apart():
    model = CostModel(curve=QUIET)
    for rows in (1, 4) * 7:
        verifies(model, 1.7, rows=rows)
    assert not model.is_outdated()


def test_an_update_starts_a_new_count():
    model = CostModel(curve=QUIET)
    verifies(model, *[3.0] * 8)
    model.update()
    assert not model.is_outdated()
    verifies(model, *[9.0] * 7)
    assert not model.is_outdated()


KNOWN = curve({1: 100, 4: 400}, {1: 1000, 2: 1100, 4: 1300, 8: 1700})


@pytest.mark.parametrize(
    ("shares_cores", "times", "expected"),
    [
        pytest.param(
            True,
            {4: [1400]},
            {1: 1076.92, 2: 1184.62, 4: 1400, 8: 1830.77},
            id="a little slower: all, plain steps too",
        ),
        pytest.param(
            True,
            {4: [1200, 1600]},
            {1: 1076.92, 2: 1184.62, 4: 1420, 8: 1830.77},
            id="two times: their mean",
        ),
        pytest.param(
            True,
            {2: [1100] * 9, 4: [1560] * 3, 8: [1700] * 9},
            {1: 1000, 2: 1100, 4: 1378, 8: 1700},
            id="one size is slower than the others: three tenths",
        ),
        pytest.param(
            True,
            {2: [1100] * 9, 4: [130_000], 8: [1700] * 9},
            {1: 1000, 2: 1100, 4: 1430, 8: 1700},
            id="one round that was held up: a tenth",
        ),
        pytest.param(
            True,
            {4: [2600] * 8},
            {1: 1000, 2: 2200, 4: 2600, 8: 3400},
            id="busy: at once, other sizes alike",
        ),
        pytest.param(
            True,
            {4: [2600] * 7},
            {1: 1666.67, 2: 1833.33, 4: 2166.67, 8: 2833.33},
            id="seven slow rounds: 1.67 counts",
        ),
        pytest.param(
            False,
            {4: [2600] * 8},
            {1: 1000, 2: 1100, 4: 1950, 8: 1700},
            id="slower on a GPU: this size alone, by half at first",
        ),
        pytest.param(True, {1: [2000] * 8}, {1: 2000, 2: 2200, 4: 2600, 8: 3400}, id="busy plain steps: all"),
        pytest.param(
            False,
            {3: [1500]},
            {1: 1000, 2: 1100, 3: 1500, 4: 1300, 8: 1700},
            id="a new size on a GPU: its time",
        ),
        pytest.param(
            True,
            {3: [1250], 4: [1300] * 9},
            {1: 1000, 2: 1100, 3: 1250, 4: 1300, 8: 1700},
            id="a new size: its time",
        ),
        pytest.param(
            True,
            {3: [2400] * 8},
            {1: 1000, 2: 2200, 3: 2400, 4: 2600, 8: 3400},
            id="busy at a new size: twice what lies between its neighbours",
        ),
    ],
)
def test_new_verify_times(shares_cores, times, expected):
    model = CostModel(curve=KNOWN, shares_cores=shares_cores)
    for rows, all_times in times.items():
        for micros in all_times:
            model.add_verify(rows, micros)
    model.update()
    found = model.curve()
    assert {n: us for n, us in enumerate(found.verify_us) if us} == pytest.approx(expected, rel=1e-4)
    follows = found.verify_us[1] / KNOWN.verify_us[1] if shares_cores else 1.0
    assert found.draft_us == pytest.approx([us * follows for us in KNOWN.draft_us])


@pytest.mark.parametrize(
    ("micros", "rounds", "verifies", "drafts"),
    [
        pytest.param(500, 8, True, True, id="half: the card was busy at load"),
        pytest.param(500, 7, False, False, id="seven steps say nothing"),
        pytest.param(700, 8, False, False, id="0.7: it was not"),
        pytest.param(1500, 8, False, False, id="1.5: longer texts"),
        pytest.param(4000, 8, True, False, id="four times: experts are missing"),
    ],
)
def test_on_a_gpu_sizes_not_seen_since_loading_follow_plain_steps_once(micros, rounds, verifies, drafts):
    model = CostModel(curve=KNOWN, shares_cores=False)
    model.add_verify(3, 1200)  # without a mean until now
    model.add_draft(1, 100)
    for _ in range(rounds):
        model.add_verify(1, micros)
        model.update()
    found = model.curve()
    change = found.verify_us[1] / 1000
    assert found.verify_us[2] == pytest.approx(1100 * (change if verifies else 1.0))
    assert found.verify_us[8] == pytest.approx(max(1200, 1700 * (change if verifies else 1.0)))
    assert found.draft_us[4] == pytest.approx(400 * (change if drafts else 1.0))
    assert (found.verify_us[3], found.draft_us[1]) == (1200, 100)
    model.update()
    assert model.curve() == found


def test_on_a_gpu_the_first_rounds_since_loading_weigh_more():
    """Half, a third, a quarter, down to a twentieth; one time counts as twice the mean at most."""
    model = CostModel(curve=KNOWN, shares_cores=False)
    found = []
    for micros in (2600, 90_000, 1300):
        model.add_verify(4, micros)
        model.update()
        found.append(model.curve().verify_us[4])
    assert found == pytest.approx([1950, 2600, 2275])
    for _ in range(40):
        model.add_verify(4, 2275)
        model.update()
    before = model.curve().verify_us[4]
    model.add_verify(4, 1.2 * before)
    model.update()
    assert model.curve().verify_us[4] == pytest.approx(1.01 * before, rel=1e-3)


def test_a_draft_behind_a_pause_says_nothing_of_its_verify_on_a_gpu():
    """There it is not waited for, and the drafter catches up meanwhile."""
    model = CostModel(curve=KNOWN, shares_cores=False)
    counted = []
    for drafted in (False, True, True, False, False, True):
        before = model.curve().verify_us
        model.session_round(4 if drafted else 1, 1900 if drafted else 1500, drafted=drafted)
        model.update()
        counted.append(model.curve().verify_us != before)
    assert counted == [True, False, True, True, True, False]


def test_one_held_up_step_leaves_the_other_groups_alone():
    """It is taken over up to 1.67 times, and a quick step after it takes all of that back."""
    model = CostModel(curve=KNOWN)
    for micros in (10_000, 1000):
        model.add_verify(1, micros)
        model.update()
    found = model.curve()
    assert found.verify_us == pytest.approx(KNOWN.verify_us, rel=0.02)
    assert found.draft_us == pytest.approx(KNOWN.draft_us, rel=0.02)


def test_drafts_tell_how_fast_the_machine_is_where_verifies_cannot():
    """Verifies take twice as long: another program has one of their cores. Drafts take 1.2 times."""
    model = CostModel(curve=KNOWN)
    for _ in range(8):
        model.add_verify(4, 2600)
    for _ in range(3):
        model.add_draft(4, 480)
    model.update()
    assert model.curve().verify_us[1] == pytest.approx(1200)


def test_a_new_size_alone_tells_that_the_machine_is_faster():
    model = CostModel(curve=KNOWN)
    model.add_verify(3, 600)
    model.update()
    found = model.curve()
    assert [found.verify_us[n] for n in (1, 2, 3, 4, 8)] == pytest.approx([500, 550, 600, 650, 850])
    assert found.draft_us[4] == pytest.approx(200)


def test_sizes_come_back_together():
    """A machine that was slow for some sizes' rounds: none is left behind as dear once it is fast."""
    model = CostModel(curve=KNOWN)
    for rows, micros in ((2, 1100), (4, 1300), (8, 1700)) * 3:
        model.add_verify(rows, 3 * micros)
    assert model.is_outdated()
    model.update()
    for _ in range(20):
        model.add_verify(4, 1300)
    model.update()
    assert {n: us for n, us in enumerate(model.curve().verify_us) if us} == pytest.approx(
        {1: 1000, 2: 1100, 4: 1300, 8: 1700}
    )


@pytest.mark.parametrize(
    ("at_first", "then"),
    [
        pytest.param((500, 2), (200, 1), id="a burst ends within a request"),
        pytest.param((500, 1), (8, 2), id="a burst begins"),
        pytest.param((100, 1), (100, 3), id="half of a request"),
    ],
)
def test_one_size_at_two_speeds(at_first, then):
    """Of rounds of 4 rows alone: sizes that did not run keep their distance from them."""
    model = CostModel(curve=KNOWN)
    for rounds, slower in (at_first, then):
        for _ in range(rounds):
            model.add_verify(4, slower * 1300)
    model.update()
    found = model.curve().verify_us
    assert found[2] / found[4] == pytest.approx(1100 / 1300, rel=0.02)
    assert found[8] / found[4] == pytest.approx(1700 / 1300, rel=0.02)


def test_the_shape_outlasts_changes_of_speed():
    """Requests at speeds that wander between one and three times; each runs two sizes."""
    chance = random.Random(4)
    model = CostModel(curve=KNOWN)
    for _ in range(300):
        speed = chance.uniform(1.0, 3.0)
        for _ in range(15):
            for rows, micros in ((1, 1000), chance.choice(((2, 1100), (4, 1300), (8, 1700)))):
                model.add_verify(rows, int(speed * micros * chance.uniform(0.9, 1.1)))
        model.update()
    found = model.curve().verify_us
    for rows, micros in ((4, 1300), (8, 1700)):
        assert found[rows] / found[2] == pytest.approx(micros / 1100, rel=0.1)


def test_a_size_below_all_known_ones_says_nothing_of_the_load():
    """Drafts of 4 take half of what they took: the load has changed, whatever drafts of 2 take."""
    model = CostModel(curve=curve({4: 400, 8: 800}, {1: 1000}))
    model.add_draft(2, 300)
    model.add_draft(4, 200)
    model.update()
    assert [model.curve().draft_us[n] for n in (2, 4, 8)] == [300, 200, 400]


@pytest.mark.parametrize(
    ("shares_cores", "measured", "plain", "verify", "draft"),
    [
        pytest.param(False, False, 500, 1300, 400, id="GPU, half of the stored times: they stay"),
        pytest.param(True, False, 500, 650, 200, id="CPU, half of the stored times"),
        pytest.param(True, False, 900, 1170, 360, id="CPU, 0.9 of them: all share its cores"),
        pytest.param(True, True, 500, 650, 200, id="CPU, measured in this process: all follow"),
    ],
)
def test_groups_without_new_times(shares_cores, measured, plain, verify, draft):
    """One plain step runs. On a CPU all times follow it."""
    model = CostModel(curve=KNOWN, shares_cores=shares_cores)
    if measured:
        model.add_verify(4, 1300)
        model.add_draft(4, 400)
        model.update()
    model.add_verify(1, plain)
    model.update()
    found = model.curve()
    assert found.verify_us[4] == pytest.approx(verify)
    assert found.draft_us[4] == pytest.approx(draft)


@pytest.mark.parametrize(
    ("n_warmup", "times", "expected"),
    [
        pytest.param(2, [90_000, 70_000, 5059], 5059, id="GPU: kernels, capture, replay"),
        pytest.param(2, [90_000, 70_000], 0, id="GPU: two rounds say nothing"),
        pytest.param(1, [90_000, 5059], 5059, id="CPU: graphs built in the first round"),
        pytest.param(1, [90_000], 0, id="CPU: one round says nothing"),
    ],
)
def test_first_rounds_of_a_size_are_discarded(n_warmup, times, expected):
    model = CostModel(n_warmup=n_warmup, shares_cores=n_warmup == 1)
    for rows in (3, 6):  # each size has its own
        for micros in times:
            model.add_verify(rows, micros)
    model.update()
    assert [model.curve().verify_us[rows] for rows in (3, 6)] == [expected] * 2


def test_discarded_rounds_make_no_busy_machine():
    model = CostModel(n_warmup=2, curve=QUIET)
    for rows in range(2, 7):
        verifies(model, 5.0, 5.0, rows=rows)
    assert not model.is_outdated()


def test_times_at_load_are_minima():
    model = CostModel()
    for micros in (3000, 1000, 2000):
        model.add_verify(1, micros)
    model.update(at_load=True)
    assert model.curve().verify_us[1] == 1000


@pytest.mark.parametrize(("micros", "expected"), [(500, 500), (1400, 1300)])
def test_at_load_only_a_faster_time_replaces_one(micros, expected):
    model = CostModel(curve=KNOWN)
    model.add_verify(4, micros)
    model.update(at_load=True)
    assert model.curve().verify_us[4] == expected


def test_times_of_the_load_follow_a_faster_machine():
    """Another program may have had it then, as with a stored curve."""
    model = CostModel()
    for rows, micros in ((1, 1000), (4, 1300)):
        for _ in range(2):
            model.add_verify(rows, micros)
    model.update(at_load=True)
    model.add_verify(1, 500)
    model.update()
    assert model.curve().verify_us[4] == pytest.approx(650)


def test_times_enter_the_curve_once():
    model = CostModel(curve=KNOWN)
    for _ in range(2):
        model.add_verify(4, 1300)
        model.update()
    assert model.curve() == KNOWN


def test_a_stored_curve_is_not_measured_here():
    """Its verifies follow faster plain steps, though this process measured others before."""
    model = CostModel(curve=KNOWN)
    model.add_verify(4, 1300)
    model.update()
    model.set_curve(KNOWN)
    model.add_verify(1, 500)
    model.update()
    assert model.curve().verify_us[4] == pytest.approx(650)


def test_the_curve_stands_still_between_updates():
    model = CostModel(curve=KNOWN)
    for _ in range(50):
        model.add_verify(4, 9000)
        model.add_draft(4, 9000)
    assert model.curve() == KNOWN


def test_busy_verifies_end_drafting_at_once():
    """bench/LOG.md: a verify that waits for its second thread takes 4 to 5 times the mean."""
    model = CostModel(curve=TWO_CORES)
    accept(model, [0.8] * 8)
    assert model.choose(8) == (SOURCE_DRAFTER, 2)
    for _ in range(8):
        model.add_verify(3, 4.5 * 1270)
    assert model.is_outdated()
    model.update()
    assert model.choose(8) == PLAIN
