"""Progress of a build: ninja's lines are counted, all others are passed on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "_build"
SCRIPT = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build_output
lines = ["-- configured", "[1/4] CXX a.o", "/llama.cpp/a.cpp: warning"]
lines += ["[2/4] CXX b.o", "/here/src/b.cpp: warning", "[3/4] CXX c.o"]
if len(sys.argv) > 2:
    lines += ["FAILED: c.o", "/llama.cpp/c.cpp: error", "ninja: build stopped"]
else:
    lines += ["[4/4] link", "-- installed", "[wheel] done"]
try:
    with build_output.watched("draftwood", Path("/here/src")):
        assert os.environ["NINJA_STATUS"] == "[%f/%t] "
        for line in lines:
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
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


def test_lines_of_ninja_become_progress() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "-- configured",
        "/here/src/b.cpp: warning",  # of ours; the one about llama.cpp is left out
        "-- installed",
        "[wheel] done",
        "printed by Python",
        "after None",
    ]
    # without a terminal a line at the start, then one a minute
    assert done.stderr.splitlines()[0].startswith("draftwood: 1 of 4 files, 0:0")
    assert len(done.stderr.splitlines()) == 1


def test_what_failed_is_passed_on() -> None:
    done = run("fails")
    assert done.returncode == 3, done.stderr
    for line in ("FAILED: c.o", "/llama.cpp/c.cpp: error", "ninja: build stopped", "printed by Python"):
        assert line in done.stdout.splitlines()


def test_a_status_of_the_user_is_put_back() -> None:
    assert run(NINJA_STATUS="mine").stdout.splitlines()[-1] == "after mine"
