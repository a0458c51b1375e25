"""The ratios as a picture: a bar for each mode in each category, whiskers for the interval, a line at 1.

Needs matplotlib (`pip install "draftwood[bench]"`). Must not know: how figures came about.
Test: tests/unit/test_bench_plot.py.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood.bench.modes import BASELINE, MODES, STOCK
from draftwood.bench.report import Figure
from draftwood.errors import OptionError

# Okabe and Ito's palette, which colour-blind readers can tell apart; a mode keeps its colour in every plot
_PALETTE = ("#999999", "#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#009E73", "#56B4E9")
_COLOURS = dict(zip((*MODES, STOCK), _PALETTE, strict=True))
_GROUP = 0.8  # of the distance between two categories
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}  # over the bar's colour
_WIDE = 20  # bars of a panel beside which their labels fit; those of more stand upright


def check_available(option: str) -> None:
    """Refuse a plot that could not be drawn, before anything is measured. Errors: OptionError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            f"found no matplotlib, with which {option} draws; expected it installed",
            hint='pip install "draftwood[bench]"',
        )


def draw(path: Path, found: Sequence[Figure], title: str) -> None:
    """Write the plot as a PNG."""
    from matplotlib.figure import Figure as Canvas  # no pyplot: no window system, no state

    temps = list(dict.fromkeys(figure.temp for figure in found))
    canvas: Any = Canvas(figsize=(8.0, 0.8 + 3.0 * len(temps)), layout="constrained")
    canvas.suptitle("\n".join(textwrap.fill(line, 76) for line in title.split("\n")), fontsize=10)
    axes = canvas.subplots(len(temps), 1, sharey=True, squeeze=False)[:, 0]
    for axis, temp in zip(axes, temps, strict=True):
        _panel(axis, [figure for figure in found if figure.temp == temp and figure.mode != BASELINE])
        axis.set_title(f"temperature {temp:g}", fontsize=10, loc="left")
    # the panels share their scale, so it is set once, for all bars and whiskers
    axes[0].set_ylim(0.0, 1.06 * max(_top(figure) for figure in found))
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    canvas.savefig(path, format="png", dpi=130)


def _panel(axis: Any, found: Sequence[Figure]) -> None:
    categories = list(dict.fromkeys(figure.category for figure in found))
    modes = list(dict.fromkeys(figure.mode for figure in found))
    width = _GROUP / len(modes)
    for i, mode in enumerate(modes):
        mine = [figure for figure in found if figure.mode == mode]
        places = [categories.index(figure.category) - _GROUP / 2 + (i + 0.5) * width for figure in mine]
        heights = [figure.ratio for figure in mine]
        axis.bar(places, heights, width * 0.92, label=mode, color=_COLOURS[mode], yerr=_whiskers(mine),
                 error_kw={"elinewidth": 1.2, "capsize": 3})  # fmt: skip
        for place, height in zip(places, heights, strict=True):  # at the foot: no whisker comes there
            axis.annotate(f"{height:.2f}", (place, 0.0), (0, 3), textcoords="offset points", ha="center",
                          fontsize=8, rotation=0 if len(found) <= _WIDE else 90, bbox=_LABEL)  # fmt: skip
    axis.axhline(1.0, color="black", linewidth=1.0, linestyle="--", label="off")
    axis.set_xticks(range(len(categories)), [textwrap.fill(each, 14) for each in categories])
    axis.set_ylabel("speed over plain decode")
    axis.spines[["top", "right"]].set_visible(False)


def _top(figure: Figure) -> float:
    return max(1.0, figure.ratio, figure.high or 0.0)


def _whiskers(found: Sequence[Figure]) -> list[list[float]] | None:
    below, above = [], []
    for figure in found:
        if figure.low is None or figure.high is None:
            return None
        below.append(figure.ratio - figure.low)
        above.append(figure.high - figure.ratio)
    return [below, above]
