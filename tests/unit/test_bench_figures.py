"""draftwood bench's figures: intervals of medians, ratios of pairs, claims, what makes them worthless."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import pytest
from draftwood.bench.claims import Claim, judge
from draftwood.bench.intervals import Ratio, interval, paired
from draftwood.bench.measure import Cell
from draftwood.bench.report import Figure, faults, figures, table
from draftwood.cli.bench import _WIDTH
from rich.console import Console

# ---- intervals (off_speed.py's too) ----


def test_known_ranks():
    """Ranks of the 95 % interval of a median as tables of the sign test give them."""
    for n, low, high in ((6, 1, 6), (9, 2, 8), (15, 4, 12), (20, 6, 15)):
        values = [float(i) for i in range(1, n + 1)]
        random.Random(n).shuffle(values)
        assert interval(values) == (low, high)


def test_it_holds_the_median():
    dice = random.Random(4)
    held = 0
    for _ in range(2000):
        low, high = interval([dice.expovariate(1.0) for _ in range(9)])
        held += low <= 0.6931 <= high
    assert held / 2000 >= 0.94


def test_too_few():
    with pytest.raises(ValueError, match="found 5 values; expected at least 6"):
        interval([1.0] * 5)


def test_a_ratio_is_that_of_pairs_not_of_medians():
    # the machine gets slower from pair to pair, both sides alike: each pair says 2.0
    plain = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    ratio, ratios = paired(plain, [seconds / 2 for seconds in plain])
    assert ratios == [2.0] * 6
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    few, _ = paired([1.0, 3.0, 1.0], [1.0, 1.0, 1.0])
    assert (few.median, few.low, few.high) == (1.0, None, None)
    assert few.figures() == (1.0, None, None)
    assert Ratio(1.23456, 1.0, 2.0).figures() == (1.235, 1.0, 2.0)


# ---- figures ----

IDS = list(range(100))


def cell(mode: str, seconds: list[float], **changes) -> Cell:
    values = {"tokens": 60, "texts": [(IDS, [(20, 1), (21, 3)])], **changes}
    made = Cell(
        "prose", 0.0, mode, seconds, prompt_seconds=[0.5 * each for each in seconds], prompt_tokens=90
    )
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_figures_of_two_cells():
    plain = cell("off", [1.0, 2.0, 3.0] * 3, texts=[(IDS, [(20, 1), (21, 1)])])
    mtp = cell("mtp", [0.5, 1.0, 2.0] * 3)
    mtp.counters.update(rounds=30, drafted=90, accepted=45, paused_rounds=2)
    mtp.counters.update(tree_rounds=20, padding=7, drafts=28, draft_lengths=70)
    off, drafting = figures([plain, mtp])
    assert (off.ratio, off.low, off.high, off.tokens_per_round, off.tokens_per_second) == (1, 1, 1, 1.0, 30.0)
    assert drafting.ratios == [2.0, 2.0, 1.5] * 3
    assert (drafting.ratio, drafting.low, drafting.high) == (2.0, 1.5, 2.0)
    assert (drafting.tokens_per_second, drafting.tokens_per_round, drafting.repeated) == (60.0, 2.0, 0.0)
    assert (drafting.rounds, drafting.drafted, drafting.accepted) == (30, 90, 45)
    assert (drafting.cold_rounds, drafting.paused_rounds, drafting.differing) == (0, 2, 0)
    assert (drafting.tree_rounds, drafting.padding, drafting.ngram_rounds) == (20, 7, 0)
    assert (drafting.draft_length, drafting.draft_nodes) == (2.5, 3.21)  # rounds without a draft left out
    assert (off.draft_length, off.draft_nodes) == (None, None)
    assert (drafting.prompt_tokens_per_second, drafting.prompt_ratio) == (180.0, 2.0)
    assert (drafting.prompt_low, drafting.prompt_high, off.prompt_ratio) == (1.5, 2.0, 1.0)


def test_an_engineless_mode_has_speeds_only():
    """Of stock kernels: no rounds, and its own rounding is no fault."""
    off, stock = figures([cell("off", [1.0] * 9), cell("stock", [2.0] * 9, texts=[(IDS, [])], differing=3)])
    assert (stock.ratio, stock.tokens_per_round, stock.rounds, stock.drafted) == (0.5, None, 0, 0)
    assert faults([off, stock]) == []


def test_a_text_of_loops_only_has_no_mean():
    (figure,) = figures([cell("off", [1.0], texts=[([7] * 100, [(60, 4)])])])
    assert (figure.tokens_per_round, figure.repeated) == (None, 1.0)


def figure(**changes) -> Figure:
    base = Figure(
        "prose", 0.0, "auto", 50.0, 1.0, 0.95, 1.05, [1.0], 2.5, 0.1, 10, 20, 10, 0, 1, 2, 5, 3, 2.25, 4.0, 0,
        900.0, 1.01, 0.99, 1.02,
    )  # fmt: skip
    return replace(base, **changes)


def test_the_table_shows_every_figure():
    shown = [
        figure(mode="off"),
        figure(category="code", ratio=1.256, low=1.2, high=1.3, tokens_per_round=None),
        figure(
            category="category",
            mode="dflash",
            tokens_per_second=1234.5,
            ratio=11.25,
            low=10.25,
            high=12.25,
            rounds=123456,
            drafted=1234567,
            accepted=1234567,
            paused_rounds=123456,
            tree_rounds=123456,
            ngram_rounds=123456,
            draft_length=63.0,
            draft_nodes=63.0,
        ),
        figure(category="json", mode="ngram", draft_length=None, draft_nodes=None, drafted=0, rounds=0),
    ]
    console = Console(width=_WIDTH, file=io.StringIO())
    console.print(table(shown, 0.0))
    text = console.file.getvalue()
    assert "temperature 0" in text
    assert "0.95-1.05" in text
    code = next(line for line in text.splitlines() if "code" in line)
    assert " ".join(code.split()) == (
        "code auto 50.0 1.26 1.20-1.30 900 1.01 0.99-1.02 - 10% 10 50% 2.2 4.0 50% 20% 10%"
    )
    json = next(line for line in text.splitlines() if "json" in line)
    assert json.split()[-7:] == ["0", *"------"]
    assert "…" not in text
    assert table(shown, 0.8).row_count == 0


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_ones(width):
    shown = figures([cell("off", [1.0] * 9), cell("auto", [0.5] * 9)])
    console = Console(width=width, file=io.StringIO())
    console.print(table(shown, 0.0, width))
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for name in ("mode", "tok/s", "ratio", "95 %", "tok/round"):
        assert name in text
    assert "too narrow for: rounds" in text
    assert len(table(shown, 0.0).columns) == 17


# ---- claims ----


def test_a_floor_holds_if_every_interval_reaches_it():
    found = [figure(), figure(category="code", ratio=0.9, low=0.85, high=0.97), figure(mode="mtp", high=0.5)]
    verdict = judge(Claim("floor", "auto", 0.97), found)
    assert verdict.holds
    assert verdict.text == (
        "auto: the interval reaches 0.97x in every category: "
        "the lowest interval is code at 0 0.900 [0.850, 0.970]"
    )
    verdict = judge(Claim("floor", "auto", 0.971), found)
    assert not verdict.holds
    assert (
        verdict.text == "auto: the interval reaches 0.97x in every category: code at 0 0.900 [0.850, 0.970]"
    )
    assert not judge(Claim("floor", "mtp", 0.97), found).holds


def test_a_floor_without_intervals_does_not_hold():
    assert not judge(Claim("floor", "auto", 0.5), [figure(low=None, high=None)]).holds


def test_rivals_are_the_fastest_chain_or_plain_decode_of_the_same_repeats():
    plain = figure(mode="off", ratio=1.0, ratios=[1.0] * 9)
    chain = figure(mode="mtp", ratio=1.5, ratios=[1.5, 3.0, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5])
    tree = figure(mode="tree", ratio=9.0, ratios=[9.0] * 9)  # no rival
    mine = figure(ratio=1.47, ratios=[1.47, 2.94, 1.47, 1.47, 1.47, 1.47, 1.47, 1.47, 1.47])
    verdict = judge(Claim("rivals", "auto", 0.97), [plain, chain, tree, mine])
    assert verdict.holds
    assert verdict.text.endswith("prose at 0 0.980 [0.980, 0.980] of mtp")
    assert not judge(Claim("rivals", "auto", 0.99), [plain, chain, tree, mine]).holds
    slow = figure(ratio=0.9, ratios=[0.9] * 9)
    verdict = judge(Claim("rivals", "auto", 0.99), [plain, slow])
    assert not verdict.holds
    assert verdict.text.endswith("0.900 [0.900, 0.900] of off")


def test_the_best_category_decides_by_its_median():
    found = [
        figure(ratio=1.149, high=1.2),
        figure(category="code", temp=0.8, ratio=1.1),
        figure(mode="mtp", ratio=2.0),
    ]
    assert not judge(Claim("best", "auto", 1.15), found).holds
    verdict = judge(Claim("best", "auto", 1.1), found)
    assert verdict.holds
    assert (
        verdict.text == "auto: the median of one category is at least 1.10x: prose at 0 1.149 [0.950, 1.200]"
    )


# ---- what makes figures worthless ----


def test_faults():
    fine = [figure(mode="off", drafted=0), figure(mode="mtp"), figure(mode="ngram", drafted=0)]
    assert faults(fine) == []
    assert faults([*fine, figure(mode="dflash", drafted=0)]) == [
        "dflash: found no token drafted; expected its drafter to run"
    ]
    assert faults([figure(mode="tree"), figure(mode="tree", tree_rounds=0)]) == []
    assert faults([figure(mode="tree", tree_rounds=0)]) == [
        "tree: found no draft that branched; expected trees"
    ]
    assert faults([figure(mode="off", drafted=3)]) == ["off: found 3 tokens drafted; expected none"]
    assert faults([figure(differing=2)]) == [
        "auto, prose at temperature 0: 2 texts differ from plain decode's; expected the same text"
    ]
