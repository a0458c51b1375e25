"""The loaded library says what it was built from, a CMake preset's too (tests/run_asan.py runs this)."""

from __future__ import annotations

from pathlib import Path

import source
from draftwood.engine.engine import build_info

ROOT = Path(__file__).resolve().parents[2]


def test_pin_and_series_are_those_of_this_checkout():
    lock, build = source.load_lock(ROOT), build_info()
    assert (build["pin_version"], build["pin_commit"]) == (lock.version, lock.commit)
    assert build["series_hash"] == source.series_hash(ROOT, lock), "`make dev` builds what is checked out"
