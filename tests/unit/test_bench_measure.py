"""draftwood bench's clock on scripted models: the order, what is timed, what is compared, what is counted."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from types import SimpleNamespace

import draftwood.bench.measure as module
import pytest
from draftwood.bench.measure import COUNTERS, SEED, measure, order, passes, timed
from draftwood.bench.prompts import Prompt

MODES = ["off", "mtp", "auto"]


class Clock:
    """time.perf_counter of a world in which only Scripted models take time."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Scripted:
    """Counts up from the prompt's last token; a round is two tokens. A prompt takes 100 s, a token `cost`."""

    def __init__(self, name: str, clock: Clock, cost: float, log: list[str]) -> None:
        self.name, self.clock, self.cost, self.log = name, clock, cost, log
        self.seed, self.wrong_after = None, 10**9
        self.texts = 0
        self.reset_speculation_stats()

    def reset(self) -> None:
        self.fresh = True

    def set_seed(self, seed: int) -> None:
        self.seed = seed

    def reset_speculation_stats(self) -> None:
        self.speculation_stats = SimpleNamespace(**dict.fromkeys(COUNTERS, 0), drafted_by_depth=())

    def generate(self, prompt, **sampling):
        assert self.fresh, "generated on top of an older text"
        assert self.seed == SEED
        self.fresh, self.seed, self.sampling = False, None, sampling
        self.texts += 1
        self.log.append(self.name)
        self.clock.now += 100.0
        stats = self.speculation_stats
        try:
            for i in range(1000):
                if i > 0:
                    self.clock.now += self.cost
                    if i % 2 == 1:
                        stats.rounds, stats.drafted = stats.rounds + 1, stats.drafted + 3
                        stats.tree_rounds, stats.padding = stats.tree_rounds + 1, stats.padding + 2
                        stats.drafted_by_depth = (stats.rounds, stats.rounds)
                yield prompt[-1] + 1 + i + (self.texts > self.wrong_after)
        finally:
            self.clock.now += self.cost / 2  # the commit


def test_orders_alternate_and_rotate():
    assert order(MODES, 0) == MODES
    assert order(MODES, 1) == MODES[::-1]
    assert order(MODES, 2) == ["mtp", "auto", "off"]
    turns = [order(MODES, turn) for turn in range(2 * len(MODES))]
    for place in range(len(MODES)):
        assert Counter(turn[place] for turn in turns) == dict.fromkeys(MODES, 2)
    for before, after in permutations(MODES, 2):
        assert sum(turn.index(before) < turn.index(after) for turn in turns) == len(MODES)


def test_the_prompt_is_timed_apart_and_the_last_commit_too(clock):
    llm = Scripted("mtp", clock, 1.0, [])
    ids, prompt_seconds, seconds = timed(llm, [5], 11, {"temp": 0.0})
    assert ids == list(range(6, 17))
    assert (prompt_seconds, seconds) == (100.0, 10.5)


def run(clock: Clock, log: list[str], **wrong: int):
    llms = {mode: Scripted(mode, clock, cost, log) for mode, cost in zip(MODES, (4.0, 2.0, 1.0), strict=True)}
    for mode, after in wrong.items():
        llms[mode].wrong_after = after
    prompts = [Prompt("prose", [1, 2]), Prompt("prose", [50]), Prompt("code", [9, 9, 9])]
    steps: list[int] = []
    cells = measure(llms, prompts, [0.0, 0.8], tokens=21, repeats=4, step=lambda: steps.append(1))
    assert len(steps) == passes(len(prompts), len(MODES), 2, 4) == len(log)
    return llms, {(cell.category, cell.temp, cell.mode): cell for cell in cells}


def test_cells_hold_sums_over_a_categorys_prompts(clock):
    llms, cells = run(clock, [])
    assert len(cells) == 2 * 2 * len(MODES)
    assert cells["prose", 0.0, "off"].seconds == [2 * 82.0] * 4
    assert cells["prose", 0.8, "mtp"].seconds == [2 * 41.0] * 4
    assert cells["code", 0.0, "auto"].seconds == [20.5] * 4
    assert cells["prose", 0.0, "off"].tokens == 40
    assert cells["code", 0.0, "off"].tokens == 20
    assert cells["prose", 0.0, "off"].prompt_seconds == [200.0] * 4
    assert cells["prose", 0.0, "off"].prompt_tokens == 3
    assert llms["auto"].sampling["temp"] == 0.8


def test_counters_are_those_of_the_timed_passes(clock):
    _, cells = run(clock, [])
    assert cells["prose", 0.0, "mtp"].counters["rounds"] == 4 * 2 * 10
    assert cells["code", 0.8, "mtp"].counters["drafted"] == 4 * 30
    assert cells["code", 0.8, "mtp"].counters["paused_rounds"] == 0
    assert cells["code", 0.8, "mtp"].counters["tree_rounds"] == 4 * 10
    assert cells["code", 0.8, "mtp"].counters["padding"] == 4 * 20
    assert cells["code", 0.8, "mtp"].counters["drafts"] == 4 * 10
    assert cells["code", 0.8, "mtp"].counters["draft_lengths"] == 4 * 20


def test_rounds_come_from_a_pass_of_their_own(clock):
    _, cells = run(clock, [])
    texts = cells["prose", 0.0, "mtp"].texts
    assert [ids for ids, _ in texts] == [[1, 2, *range(3, 24)], [50, *range(51, 72)]]
    assert texts[0][1][0] == (2, 2)  # the first round starts at the token that the prompt gave


def test_modes_take_turns_on_each_prompt(clock):
    log: list[str] = []
    run(clock, log)
    turns = [tuple(log[i : i + len(MODES)]) for i in range(0, len(log), len(MODES))]
    assert all(sorted(turn) == sorted(MODES) for turn in turns)
    assert (
        turns[:3] == [("off", "mtp", "auto")] * 3
    )  # warm-up: plain decode's text is the one to compare with
    assert turns[3:6] == [tuple(order(MODES, turn)) for turn in (0, 1, 2)]
    assert len(set(turns)) == 6


@pytest.mark.parametrize("mode", MODES)
def test_each_text_is_compared_with_plain_decodes_first(clock, mode):
    n = 2 * 3 * 5  # texts of a mode
    _, cells = run(clock, [], **{mode: n - 1})
    wrong = {key for key, cell in cells.items() if cell.differing}
    assert wrong == {("code", 0.8, mode)}
    assert cells["code", 0.8, mode].differing == 1
    assert all(cell.differing == 0 for cell in run(clock, [])[1].values())
