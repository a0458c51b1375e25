"""Floors that figures must reach, and whether they do. Must not know: how figures came about.

Test: tests/unit/test_bench_figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftwood.bench.report import Figure


@dataclass(frozen=True, slots=True)
class Claim:
    """What a mode's speed over plain decode has to be.

    floor: in every category and at every temperature, the 95 % interval reaches `ratio`.
    best: in one of them at least, the median does.
    """

    kind: Literal["floor", "best"]
    mode: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds, and the figures that decide."""

    text: str
    holds: bool


def judge(claim: Claim, figures: Sequence[Figure]) -> Verdict:
    """Hold a claim against the figures of its mode, of which there is one at least."""
    mine = [figure for figure in figures if figure.mode == claim.mode]
    best = max(mine, key=lambda figure: figure.ratio)
    if claim.kind == "best":
        text = f"{claim.mode}: the median of one category is at least {claim.ratio:.2f}x: {_words(best)}"
        return Verdict(text, best.ratio >= claim.ratio)
    short = [figure for figure in mine if figure.high is None or figure.high < claim.ratio]
    worst = min(short or mine, key=lambda figure: figure.ratio if figure.high is None else figure.high)
    told = "; ".join(map(_words, short)) if short else f"the lowest interval is {_words(worst)}"
    return Verdict(
        f"{claim.mode}: the interval reaches {claim.ratio:.2f}x in every category: {told}", not short
    )


def _words(figure: Figure) -> str:
    spread = "" if figure.low is None else f" [{figure.low:.3f}, {figure.high:.3f}]"
    return f"{figure.category} at {figure.temp:g} {figure.ratio:.3f}{spread}"
