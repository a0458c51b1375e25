"""Files that say which experts were used most."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from draftwood.errors import OptionError
from draftwood.load import heat

from tests.unit.model_of_experts import INFO


def heat_file(path, **changes):
    path.write_text(json.dumps({"schema": 1, "n_experts": 256, "heat": {"3": [5] * 256}} | changes))
    return str(path)


def test_where_no_heat_file_can_be_written(tmp_path, monkeypatch):
    heat.check_path(None)
    heat.check_path("heat.json")
    heat.check_path(heat_file(tmp_path / "heat.json"))
    with pytest.raises(OptionError, match=r"is in .*none, which is no folder; expected a file in"):
        heat.check_path(str(tmp_path / "none" / "heat.json"))
    with pytest.raises(OptionError, match="is a folder; expected a file in"):
        heat.check_path(str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(OptionError, match="which cannot be written; expected"):
        heat.check_path(str(tmp_path / "heat.json"))


@pytest.mark.parametrize("path", [7, object(), ["a"], "", "a\0b"])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(OptionError, match=r"expert_heat is .*; expected a path"):
        heat.path_of(path)


def test_heat_is_read(tmp_path):
    assert heat.read(heat_file(tmp_path / "heat.json"), INFO) == {3: [5] * 256}


def test_a_file_to_come_is_no_heat(tmp_path):
    assert heat.read(str(tmp_path / "none.json"), INFO) == {}
    assert heat.read(None, INFO) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"heat": {"40": [5] * 256}}, {"heat": {"-1": [5] * 256}}, {"heat": {"3": [5] * 255}},
        {"heat": {"3": [-1] * 256}}, {"heat": {"3": [1 << 32] * 256}}, {"heat": {"x": [5] * 256}},
        {"heat": 7},
        {"heat": {"3": 7}}, {"heat": {"3": ["a"] * 256}},
    ],
)  # fmt: skip
def test_heat_of_another_model_warns(tmp_path, changes):
    with pytest.warns(UserWarning, match="is no heat file of a model with 40 layers of 256 experts"):
        assert heat.read(heat_file(tmp_path / "heat.json", **changes), INFO) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_what_is_no_heat_file_warns(tmp_path, text):
    path = tmp_path / "heat.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match="is no heat file"):
        assert heat.read(str(path), INFO) == {}


class Pool:
    """What `write` asks a pool."""

    def __init__(self, heat):
        self._heat = heat

    def layer(self, number):
        if number not in self._heat:
            raise OptionError(f"layer {number} has no experts in this pool")
        return SimpleNamespace(heat=tuple(self._heat[number]))


def test_what_was_learnt_is_written(tmp_path):
    path = tmp_path / "heat.json"
    heat.write(str(path), Pool({3: [5] * 256}), INFO)
    assert heat.read(str(path), INFO) == {3: [5] * 256}
    heat.write(str(path), Pool({3: [6] * 256}), INFO)
    assert heat.read(str(path), INFO) == {3: [6] * 256}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("learnt", [{}, {3: [0] * 256}])
def test_nothing_learnt_leaves_the_file(tmp_path, learnt):
    path = heat_file(tmp_path / "heat.json")
    heat.write(path, Pool(learnt), INFO)
    assert heat.read(path, INFO) == {3: [5] * 256}


def test_another_file_is_never_overwritten(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and much more")
    heat.write(str(path), Pool({3: [5] * 256}), INFO)
    assert path.read_bytes() == b"GGUF and much more"


def test_a_file_that_cannot_be_written_warns(tmp_path):
    with pytest.warns(UserWarning, match="could not be written"):
        heat.write(str(tmp_path / "none" / "heat.json"), Pool({3: [5] * 256}), INFO)


def test_a_folder_that_may_not_be_looked_into_warns(tmp_path, monkeypatch):
    path, look = tmp_path / "heat.json", os.stat

    def refuse(found, *args, **kwargs):
        if str(found).startswith(str(path)):
            raise PermissionError(13, "Permission denied")
        return look(found, *args, **kwargs)

    def refuse_to_open(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(Path, "open", refuse_to_open)
    with pytest.warns(UserWarning, match=r"could not be written \(Permission denied\)"):
        heat.write(str(path), Pool({3: [5] * 256}), INFO)
