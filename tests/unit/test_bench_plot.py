"""draftwood bench's plot: a bar for each mode and category, and words where matplotlib is missing."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise

import pytest
from click.testing import CliRunner
from draftwood.bench import plot
from draftwood.bench.report import Figure
from draftwood.cli import cli


def figure(category: str, temp: float, mode: str, ratio: float, spread: float | None = 0.05) -> Figure:
    low, high = (None, None) if spread is None else (ratio - spread, ratio + spread)
    return Figure(
        category, temp, mode, 50.0, ratio, low, high, [ratio], 2.5, 0.1, 10, 20, 10, 0, 0, 0, 0, 0,
        2.0, 2.0, 0, 900.0, 1.0, 0.9, 1.1,
    )  # fmt: skip


FIGURES = [
    figure(category, temp, mode, 0.9 + 0.1 * i + temp / 10)
    for category in ("prose", "code", "json")
    for temp in (0.0, 0.8)
    for i, mode in enumerate(("off", "mtp", "dflash", "ngram", "tree", "auto", "stock"))
]
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed (draftwood[bench])"
)


@needs_matplotlib
def test_it_is_a_png(tmp_path):
    path = tmp_path / "plot.of.any.name"
    plot.draw(path, FIGURES, "model, 2 threads")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


@needs_matplotlib
def test_bars_stand_at_the_ratios_with_their_intervals(monkeypatch, tmp_path):
    from matplotlib.figure import Figure as Canvas

    drawn = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *_, **__: drawn.append(self))
    plot.draw(tmp_path / "p.png", FIGURES, "title")
    assert len(drawn[0].axes) == 2  # one for each temperature
    axis = drawn[0].axes[1]
    bars = [some for some in axis.containers if hasattr(some, "patches")]
    # no bar for plain decode, which is the line at 1
    assert [[round(float(bar.get_height()), 3) for bar in some] for some in bars] == [
        [height] * 3 for height in (1.08, 1.18, 1.28, 1.38, 1.48, 1.58)
    ]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["prose", "code", "json"]
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axis.lines)
    whiskers = [list(ends[:, 1]) for ends in bars[0].errorbar.lines[2][0].get_segments()]
    assert whiskers == [[pytest.approx(1.03), pytest.approx(1.13)]] * 3


@needs_matplotlib
@pytest.mark.parametrize("first_is_faster", [True, False])
def test_every_whisker_and_label_is_in_the_picture_and_apart(monkeypatch, tmp_path, first_is_faster):
    from matplotlib.figure import Figure as Canvas

    drawn, save = [], Canvas.savefig
    monkeypatch.setattr(Canvas, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    few = [
        figure("prose", temp, mode, 2.8 if (temp == 0.0) == first_is_faster else 1.1, spread=0.7)
        for temp in (0.0, 0.8)
        for mode in ("mtp", "dflash", "ngram", "tree", "auto")
    ]
    plot.draw(tmp_path / "p.png", few, "a model of a very long name " * 8)
    canvas = drawn[0]
    for axis in canvas.axes:
        inside = axis.get_window_extent()
        labels = [text.get_window_extent() for text in axis.texts]
        assert len(labels) == 5
        for bars in axis.containers:
            (ends,) = getattr(bars, "errorbar", bars).lines[2][0].get_segments()
            low, high = axis.transData.transform(ends)
            assert inside.y0 < low[1] < high[1] < inside.y1
            assert not any(box.x0 < low[0] < box.x1 and box.y1 > low[1] for box in labels)
        assert all(inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1) for box in labels)
        assert not any(one.overlaps(two) for one, two in pairwise(labels))
    title = canvas._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= canvas.bbox.x1


@needs_matplotlib
def test_no_whiskers_without_intervals(tmp_path):
    few = [figure("prose", 0.0, mode, 1.0, spread=None) for mode in ("off", "ngram")]
    assert plot._whiskers(few) is None
    plot.draw(tmp_path / "p.png", few, "title")


def test_a_missing_matplotlib_is_said_in_words(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    result = CliRunner().invoke(cli, ["bench", "no-such-model.gguf", "--plot", str(tmp_path / "p.png")])
    told = "Error: found no matplotlib, with which --plot draws; expected it installed"
    assert result.stderr == f'{told}\n\nhint: pip install "draftwood[bench]"\n'
    assert result.exit_code == 1
