"""Floors that figures must reach, and whether they do. Must not know: how figures came about.

Test: tests/unit/test_bench_figures.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftwood.bench.intervals import paired
from draftwood.bench.report import Figure

RIVALS = ("off", "mtp", "dflash", "ngram")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a mode's speed has to be.

    floor: over plain decode's, in every category and at every temperature, the 95 % interval reaches `ratio`.
    best: in one of them at least, the median does.
    rivals: over that of the fastest there of plain decode and chains, the interval does everywhere.
    """

    kind: Literal["floor", "best", "rivals"]
    mode: str
    ratio: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a claim holds, and the figures that decide."""

    text: str
    holds: bool


def judge(claim: Claim, figures: Sequence[Figure]) -> Verdict:
    """Hold a claim against the figures of its mode, of which there is one at least."""
    if claim.kind == "rivals":
        return _judge_rivals(claim, figures)
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


def _judge_rivals(claim: Claim, figures: Sequence[Figure]) -> Verdict:
    """Pair each repeat with the same one of the rival, which is chosen by its median, in hindsight."""
    pairs = []
    for mine in (figure for figure in figures if figure.mode == claim.mode):
        there = [
            f for f in figures if (f.category, f.temp) == (mine.category, mine.temp) and f.mode in RIVALS
        ]
        rival = max(there, key=lambda figure: figure.ratio)
        over, _ = paired(mine.ratios, rival.ratios)  # speeds: plain decode's seconds of the repeat fall out
        spread = "" if over.low is None else f" [{over.low:.3f}, {over.high:.3f}]"
        words = f"{mine.category} at {mine.temp:g} {over.median:.3f}{spread} of {rival.mode}"
        pairs.append((over.high or 0.0, words))
    short = [words for high, words in pairs if high < claim.ratio]
    told = "; ".join(short) if short else "; ".join(words for _, words in pairs)
    text = (
        f"{claim.mode}: the interval reaches {claim.ratio:.2f}x of the fastest of plain decode and chains: "
    )
    return Verdict(text + told, not short)


def _words(figure: Figure) -> str:
    spread = "" if figure.low is None else f" [{figure.low:.3f}, {figure.high:.3f}]"
    return f"{figure.category} at {figure.temp:g} {figure.ratio:.3f}{spread}"
