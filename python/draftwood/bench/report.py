"""Figures out of measured cells, the JSON document, and the table. Must not know: models, the clock.

The document's layout is SCHEMA; it is also a row of a results file (results.py).
Tests: tests/unit/test_bench_figures.py, tests/unit/test_bench_results.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftwood.bench.intervals import FEWEST, paired
from draftwood.bench.measure import COUNTERS, Cell
from draftwood.bench.modes import BASELINE, STOCK
from draftwood.bench.rounds import mean_tokens

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.bench.claims import Verdict

SCHEMA = 4
"""Raised when a key of the document changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode on one category at one temperature."""

    category: str
    temp: float
    mode: str
    tokens_per_second: float
    """Median over repeats, prompts left out."""
    ratio: float
    """Its speed over plain decode's: the median of the repeats' ratios."""
    low: float | None
    """The 95 % interval of that median (intervals.py); None under 6 repeats."""
    high: float | None
    ratios: list[float]
    tokens_per_round: float | None
    """Rounds inside a repetition left out (rounds.py); None where all are."""
    repeated: float
    """The share of rounds that were left out."""
    rounds: int
    """This and the next are sums over the timed repeats."""
    drafted: int
    accepted: int
    cold_rounds: int
    paused_rounds: int
    ngram_rounds: int
    tree_rounds: int
    padding: int
    """Rows of verifies beyond the root and what was drafted."""
    draft_length: float | None
    """Mean longest path of a draft, tokens, rounds without a draft left out; None where there was none."""
    draft_nodes: float | None
    """Mean tokens of such a draft, all branches counted."""
    differing: int
    """Texts that are not plain decode's."""
    prompt_tokens_per_second: float
    """Median over repeats, of the prompts alone."""
    prompt_ratio: float
    """As ratio, low and high, of the prompts' speed over plain decode's."""
    prompt_low: float | None
    prompt_high: float | None


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """Return a figure for each cell, in their order."""
    plain = {(cell.category, cell.temp): cell for cell in cells if cell.mode == BASELINE}
    return [_figure(cell, plain[cell.category, cell.temp]) for cell in cells]


def _figure(cell: Cell, plain: Cell) -> Figure:
    ratio, ratios = paired(plain.seconds, cell.seconds)
    prompts, _ = paired(plain.prompt_seconds, cell.prompt_seconds)
    median, low, high = ratio.figures(4)
    prompt_median, prompt_low, prompt_high = prompts.figures(4)
    mean, repeated = mean_tokens(cell.texts)
    counted, drafts = cell.counters, cell.counters["drafts"]
    return Figure(
        category=cell.category,
        temp=cell.temp,
        mode=cell.mode,
        tokens_per_second=round(statistics.median(cell.tokens / seconds for seconds in cell.seconds), 2),
        ratio=median,
        low=low,
        high=high,
        ratios=[round(value, 4) for value in ratios],
        tokens_per_round=None if repeated == 1.0 else mean,
        repeated=repeated,
        differing=cell.differing,
        draft_length=round(counted["draft_lengths"] / drafts, 2) if drafts else None,
        draft_nodes=round(counted["drafted"] / drafts, 2) if drafts else None,
        prompt_tokens_per_second=round(
            statistics.median(cell.prompt_tokens / seconds for seconds in cell.prompt_seconds), 2
        ),
        prompt_ratio=prompt_median,
        prompt_low=prompt_low,
        prompt_high=prompt_high,
        **{name: counted[name] for name in COUNTERS},
    )


def faults(found: Sequence[Figure], *, on_cpu: bool = True) -> list[str]:
    """Return what makes the figures worthless: other texts, or a path that did not run.

    Off the CPU near ties may fall either way, so texts that differ are counted there and are no fault. Nor
    are those of stock kernels, which round by batch size.
    """
    lines = [
        f"{figure.mode}, {figure.category} at temperature {figure.temp:g}: {figure.differing} texts differ "
        "from plain decode's; expected the same text"
        for figure in found
        if figure.differing and on_cpu and figure.mode != STOCK
    ]
    for mode in dict.fromkeys(figure.mode for figure in found):
        drafted = sum(figure.drafted for figure in found if figure.mode == mode)
        if mode in (BASELINE, STOCK) and drafted > 0:
            lines.append(f"{mode}: found {drafted} tokens drafted; expected none")
        if mode in ("mtp", "dflash") and drafted == 0:
            lines.append(f"{mode}: found no token drafted; expected its drafter to run")
        if mode == "tree" and not any(figure.tree_rounds for figure in found if figure.mode == mode):
            lines.append(f"{mode}: found no draft that branched; expected trees")
    return lines


def document(
    facts: Mapping[str, Any],
    left_out: Mapping[str, str],
    found: Sequence[Figure],
    verdicts: Sequence[Verdict],
    wrong: Sequence[str],
) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON. `facts`: machine, build and settings."""
    return {
        "schema": SCHEMA,
        **facts,
        "left_out": dict(left_out),
        "figures": [asdict(figure) for figure in found],
        "claims": [asdict(verdict) for verdict in verdicts],
        "faults": list(wrong),
        "ok": not wrong and all(verdict.holds for verdict in verdicts),
    }


def notes(facts: Mapping[str, Any]) -> list[str]:
    """Return what the tables leave open: what a ratio is, why it has no interval, what pools of experts did.

    facts: of `document`; "expert_vram" is the size that was asked for, if any.
    """
    threads = facts["threads"]
    lines = [f"ratio: over plain decode, the median of pairs that took turns; CPU threads: {threads}"]
    if facts["repeats"] < FEWEST:
        lines.append(f"95 %: an interval needs {FEWEST} repeats")
    if size := facts.get("expert_vram"):
        pools = {mode: each for mode, each in facts.get("expert_pools", {}).items() if mode != "expert_vram"}
        hits = ", ".join(f"{mode} {each['hit_rate']:.0%}" for mode, each in pools.items())
        fits = f"no pool: all experts fit in {size}"
        lines.append(f"hits of the experts' pools: {hits}" if pools else fits)
    return lines


_COLUMNS = (
    "mode",
    "tok/s",
    "ratio",
    "95 %",
    "prompt",
    "p.ratio",
    "p.95 %",
    "tok/round",
    "loops",
    "rounds",
    "accepted",
    "length",
    "nodes",
    "trees",
    "ngram",
    "paused",
)


# what a narrow terminal goes without, in this order; the rest always stays
_SPARED = (
    *("rounds", "loops", "nodes", "length", "ngram", "trees", "p.95 %", "p.ratio", "prompt", "paused"),
    *("accepted", "tok/round"),
)


def table(found: Sequence[Figure], temp: float, width: int | None = None) -> Table:
    """Return the figures of one temperature, a section for each category.

    prompt is tokens a second, and p.ratio over plain decode's. accepted is a share of the tokens drafted;
    trees, ngram and paused are shares of the rounds. Columns are left out until the table fits into `width`,
    and the caption names them; None: all are shown.
    """
    from rich.console import Console

    console, left_out = Console(width=1000), 0
    shown = _table(found, temp, ())
    while width is not None and left_out < len(_SPARED) and console.measure(shown).maximum > width:
        left_out += 1
        shown = _table(found, temp, _SPARED[:left_out])
    return shown


def _table(found: Sequence[Figure], temp: float, left_out: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title=f"temperature {temp:g}", title_justify="left", padding=(0, 0))
    if left_out:
        shown.caption = f"too narrow for: {', '.join(left_out)} (--json has all)"
        shown.caption_justify = "left"
    shown.add_column("category", no_wrap=True)
    kept = [i for i, name in enumerate(_COLUMNS) if name not in left_out]
    for name in (_COLUMNS[i] for i in kept):
        shown.add_column(name, no_wrap=True, justify="left" if name == "mode" else "right")
    here = [figure for figure in found if figure.temp == temp]
    for i, figure in enumerate(here):
        first = i == 0 or here[i - 1].category != figure.category
        last = i + 1 == len(here) or here[i + 1].category != figure.category
        cells = _cells(figure)
        shown.add_row(figure.category if first else "", *(cells[k] for k in kept), end_section=last)
    return shown


def _cells(figure: Figure) -> tuple[str, ...]:
    def mean(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def share(part: int, whole: int) -> str:
        return f"{part / whole:.0%}" if whole else "-"

    def spread(low: float | None, high: float | None) -> str:
        return "-" if low is None else f"{low:.2f}-{high:.2f}"

    return (
        figure.mode,
        f"{figure.tokens_per_second:.1f}",
        f"{figure.ratio:.2f}",
        spread(figure.low, figure.high),
        f"{figure.prompt_tokens_per_second:.0f}",
        f"{figure.prompt_ratio:.2f}",
        spread(figure.prompt_low, figure.prompt_high),
        mean(figure.tokens_per_round, 2),
        f"{figure.repeated:.0%}" if figure.rounds else "-",
        str(figure.rounds),
        share(figure.accepted, figure.drafted),
        mean(figure.draft_length, 1),
        mean(figure.draft_nodes, 1),
        share(figure.tree_rounds, figure.rounds),
        share(figure.ngram_rounds, figure.rounds),
        share(figure.paused_rounds, figure.rounds),
    )
