"""atomic.py: a file has its old text or its new one, whoever else writes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftwood import atomic


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "a.json"
    atomic.replace(path, "é")
    atomic.replace(path, "ö")
    assert path.read_text(encoding="utf-8") == "ö"
    assert list(tmp_path.iterdir()) == [path]


def test_two_that_write_at_the_same_time(tmp_path, monkeypatch):
    """With one name for both parts, the first to end took the other's away."""
    path, rename = tmp_path / "a.json", Path.replace

    def late(part, target):
        monkeypatch.setattr(Path, "replace", rename)
        atomic.replace(path, "of the other")
        return rename(part, target)

    monkeypatch.setattr(Path, "replace", late)
    atomic.replace(path, "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        atomic.replace(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic.replace(tmp_path / "none" / "a.json", "text")
