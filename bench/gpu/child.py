"""A process of Python that does one thing and ends, and the logs that processes write.

Must not know: what it is started for. Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.work import BenchError

LAST = 3000  # characters of what a process said that an error shows


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-LAST:] if log.exists() else ""


def run(name: str, arguments: Sequence[str], log: Path, limit: float, *, neighbours: bool = False) -> str:
    """Run Python with these arguments and return what it printed; what it says of errors is in `log`.

    `neighbours`: it is a script that imports what lies beside it, which PYTHONSAFEPATH would forbid.
    Errors: BenchError with the end of what it said where it fails or takes longer than `limit` seconds.
    """
    unset = {"PYTHONSAFEPATH"} if neighbours else set()
    try:
        with log.open("w") as errors:
            done = subprocess.run(
                [sys.executable, *arguments],
                env={key: text for key, text in os.environ.items() if key not in unset},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=limit,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise _failure(f"{name} took longer than {limit:.0f} s", "", log) from error
    if done.returncode != 0:
        raise _failure(f"{name} ended with status {done.returncode}", done.stdout, log)
    return done.stdout


def _failure(what: str, printed: str, log: Path) -> BenchError:
    return BenchError(f"{what}\n{printed[-LAST:]}{tail(log)}".rstrip(), hint=f"its log is {log}")


def answer(name: str, printed: str) -> dict[str, Any]:
    """Return the JSON object on the last line of what a process printed. Errors: BenchError for another."""
    last = printed.rstrip().rpartition("\n")[2]
    try:
        found = json.loads(last)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BenchError(f"{name} printed {last[-LAST:]!r} last; expected a JSON object")
    return found
