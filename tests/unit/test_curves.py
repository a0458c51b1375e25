"""Cost curves kept between runs: found again, and never in the way."""

import json
import os
import stat

import pytest
from draftwood.engine import _capi, curves
from draftwood.engine.engine import Curve

CURVE = Curve(*(tuple(start + n for n in range(_capi.CURVE_SIZE)) for start in (0.0, 10.0)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTWOOD_CURVES", str(tmp_path / "curves"))
    monkeypatch.setattr(curves, "_of_this_process", {})
    return tmp_path / "curves"


def another_process(monkeypatch):
    monkeypatch.setattr(curves, "_of_this_process", {})


def test_kept_for_the_next_process(folder, monkeypatch):
    assert curves.load("a") is None
    curves.store("a", CURVE)
    another_process(monkeypatch)
    assert curves.load("a") == CURVE
    assert curves.load("b") is None
    assert [path.name for path in folder.iterdir()] == ["a.json"], "no half-written files stay"


def test_keys_tell_apart():
    keys = {curves.key(model="a", threads=n) for n in (1, 2)} | {curves.key(model="b", threads=1)}
    assert len(keys) == 3
    assert curves.key(a=1, b=2) == curves.key(b=2, a=1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_without_permission(folder):
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    curves.store("a", CURVE)
    assert curves.load("a") == CURVE, "as long as the process lives"


def test_a_folder_that_is_a_file(folder):
    folder.write_text("in the way")
    curves.store("a", CURVE)
    assert curves.load("a") == CURVE, "as long as the process lives"
    assert folder.read_text() == "in the way"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        "{}",
        json.dumps({"draft_us": [1.0], "verify_us": [1.0]}),
        json.dumps({"draft_us": ["x"] * 65, "verify_us": [1.0] * 65}),
        json.dumps({"draft_us": [-1.0] * 65, "verify_us": [1.0] * 65}),
        json.dumps({"draft_us": [float("nan")] * 65, "verify_us": [1.0] * 65}),
        json.dumps({"draft_us": [1.0] * 65, "verify_us": [float("inf")] * 65}),
        json.dumps({"draft_us": 3, "verify_us": None}),
    ],
)
def test_damaged_files_are_measured_again(folder, text):
    folder.mkdir()
    (folder / "a.json").write_text(text)
    assert curves.load("a") is None


def test_where(monkeypatch, tmp_path):
    monkeypatch.delenv("DRAFTWOOD_CURVES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert curves.folder() == tmp_path / "draftwood" / "curves"


def test_the_library_takes_it_as_it_is():
    native = CURVE.to_native()
    assert (tuple(native.draft_us), tuple(native.verify_us)) == (CURVE.draft_us, CURVE.verify_us)
