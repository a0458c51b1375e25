"""The repository's own patch queue: in order, within budget, and really in the tree that gets built."""

from __future__ import annotations

from pathlib import Path

import pytest
from applier import load_patch, read_series
from patch_queue import MAX_ADDED, MAX_PATCHES, load_entry
from source import Source, ensure_source

from patches import check

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
NAMES = read_series(PATCHES)


@pytest.fixture(scope="module")
def pristine() -> Source:
    return ensure_source(ROOT, pristine=True)


@pytest.fixture(scope="module")
def patched() -> Source:
    return ensure_source(ROOT)


def test_check_finds_nothing() -> None:
    problems, _ = check(ROOT)
    assert problems == []


def test_budget() -> None:
    entries = [load_entry(PATCHES, name) for name in NAMES]
    assert 0 < len(entries) <= MAX_PATCHES
    assert sum(entry.added for entry in entries) <= MAX_ADDED
    assert sum(entry.added_server for entry in entries) <= MAX_ADDED


@pytest.mark.parametrize("name", NAMES)
def test_the_patch_is_really_in_the_tree(name: str, pristine: Source, patched: Source) -> None:
    """Not the applier's word but the files': a patch tool can report success and change nothing."""
    for file in load_patch(PATCHES, name).files:
        before = (pristine.llama_cpp / file.path).read_bytes()
        after = (patched.llama_cpp / file.path).read_bytes()
        assert before != after
        for hunk in file.hunks:
            for line in set(hunk.added):
                assert after.count(line) > before.count(line), f"{file.path} lacks {line!r}"


def test_nothing_else_differs(pristine: Source, patched: Source) -> None:
    touched = {file.path for name in NAMES for file in load_patch(PATCHES, name).files}
    different = {
        str(path.relative_to(patched.llama_cpp))
        for path in patched.llama_cpp.rglob("*")
        if path.is_file()
        and path.read_bytes() != (pristine.llama_cpp / path.relative_to(patched.llama_cpp)).read_bytes()
    }
    assert different == touched


def test_no_repository_is_left_in_the_tree(patched: Source) -> None:
    """llama.cpp's build reads its version from the git repository that it finds."""
    assert not list(patched.path.glob("**/.git*"))
