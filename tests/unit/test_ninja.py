"""Progress of a build: ninja's lines are counted, all others are passed on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parents[2] / "_build"
SCRIPT = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import ninja
try:
    with ninja.watched("draftwood"):
        assert os.environ["NINJA_STATUS"] == "[%f/%t] "
        for line in ("[1/4] CXX a.o", "a.cpp: warning", "[2/4] CXX b.o", "[4/4] link", "[wheel] done"):
            subprocess.run(["echo", line], check=True)
        print("printed by Python")
        if len(sys.argv) > 2:
            raise SystemExit(3)
finally:
    print("after", os.environ.get("NINJA_STATUS"))
"""


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TERM": "dumb", **env}
    command = [sys.executable, "-c", SCRIPT, BUILD, *args]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("fails", [False, True])
def test_lines_of_ninja_become_progress_and_others_stay(fails: bool) -> None:
    done = run(*(["fails"] if fails else []))
    assert done.returncode == (3 if fails else 0), done.stderr
    assert done.stdout.splitlines() == ["a.cpp: warning", "[wheel] done", "printed by Python", "after None"]
    # without a terminal a line at the start, then one a minute
    assert done.stderr.splitlines()[0].startswith("draftwood: 1 of 4 files, 0:0")
    assert len(done.stderr.splitlines()) == 1


def test_a_status_of_the_user_is_put_back() -> None:
    assert run(NINJA_STATUS="mine").stdout.splitlines()[-1] == "after mine"
