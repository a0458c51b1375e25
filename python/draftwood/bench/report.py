"""Figures out of measured cells, the JSON document, and the table. Must not know: models, the clock.

The document's layout is SCHEMA; it is also a row of a results file (results.py).
Tests: tests/unit/test_bench_figures.py, tests/unit/test_bench_results.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftwood.bench.intervals import paired
from draftwood.bench.measure import COUNTERS, Cell
from draftwood.bench.modes import BASELINE
from draftwood.bench.rounds import mean_tokens

if TYPE_CHECKING:
    from rich.table import Table

    from draftwood.bench.claims import Verdict

SCHEMA = 2
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
    differing: int
    """Texts that are not plain decode's."""


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """Return a figure for each cell, in their order."""
    plain = {(cell.category, cell.temp): cell.seconds for cell in cells if cell.mode == BASELINE}
    return [_figure(cell, plain[cell.category, cell.temp]) for cell in cells]


def _figure(cell: Cell, plain: Sequence[float]) -> Figure:
    ratio, ratios = paired(plain, cell.seconds)
    mean, repeated = mean_tokens(cell.texts)
    return Figure(
        category=cell.category,
        temp=cell.temp,
        mode=cell.mode,
        tokens_per_second=round(statistics.median(cell.tokens / seconds for seconds in cell.seconds), 2),
        ratio=round(ratio.median, 4),
        low=None if ratio.low is None else round(ratio.low, 4),
        high=None if ratio.high is None else round(ratio.high, 4),
        ratios=[round(value, 4) for value in ratios],
        tokens_per_round=None if repeated == 1.0 else mean,
        repeated=repeated,
        differing=cell.differing,
        **{name: cell.counters[name] for name in COUNTERS},
    )


def faults(found: Sequence[Figure], *, on_cpu: bool = True) -> list[str]:
    """Return what makes the figures worthless: other texts, or a path that did not run.

    Off the CPU near ties may fall either way, so texts that differ are counted there and are no fault.
    """
    lines = [
        f"{figure.mode}, {figure.category} at temperature {figure.temp:g}: {figure.differing} texts differ "
        "from plain decode's; expected the same text"
        for figure in found
        if figure.differing and on_cpu
    ]
    for mode in dict.fromkeys(figure.mode for figure in found):
        drafted = sum(figure.drafted for figure in found if figure.mode == mode)
        if mode == BASELINE and drafted > 0:
            lines.append(f"{mode}: found {drafted} tokens drafted; expected none")
        if mode in ("mtp", "dflash") and drafted == 0:
            lines.append(f"{mode}: found no token drafted; expected its drafter to run")
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


_COLUMNS = (
    "mode",
    "tok/s",
    "ratio",
    "95 %",
    "tok/round",
    "loops",
    "rounds",
    "drafted",
    "accepted",
    "paused",
)


def table(found: Sequence[Figure], temp: float) -> Table:
    """Return the figures of one temperature, a section for each category."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title=f"temperature {temp:g}", title_justify="left", padding=(0, 0))
    shown.add_column("category", no_wrap=True)
    for name in _COLUMNS:
        shown.add_column(name, no_wrap=True, justify="left" if name == "mode" else "right")
    here = [figure for figure in found if figure.temp == temp]
    for i, figure in enumerate(here):
        first = i == 0 or here[i - 1].category != figure.category
        last = i + 1 == len(here) or here[i + 1].category != figure.category
        shown.add_row(figure.category if first else "", *_cells(figure), end_section=last)
    return shown


def _cells(figure: Figure) -> tuple[str, ...]:
    spread = "-" if figure.low is None else f"{figure.low:.2f}-{figure.high:.2f}"
    length = "-" if figure.tokens_per_round is None else f"{figure.tokens_per_round:.2f}"
    share = f"{figure.accepted / figure.drafted:.0%}" if figure.drafted else "-"
    return (
        figure.mode,
        f"{figure.tokens_per_second:.1f}",
        f"{figure.ratio:.2f}",
        spread,
        length,
        f"{figure.repeated:.0%}",
        str(figure.rounds),
        str(figure.drafted),
        share,
        str(figure.paused_rounds),
    )
