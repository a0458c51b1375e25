"""Runs tests/gpu in parts, with CUDA graphs and without and under compute-sanitizer: a log, and a row each.

A part starts only if the time it takes on an H200 is left, and `timeout` ends it when none is, so that a
command on a lent machine keeps what was found. Tests write their row themselves (tests/gpu/recorder.py); a
process that died without one gets one here. Must not know: what tests check.
Test: tests/unit/test_gpu_rows.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftwood.bench import results

from bench.gpu import stamp
from bench.gpu.work import BenchError, Clock

ROWS, LOG = "tests.json", "tests.log"
SCHEMA = 1
SANITIZER = "compute-sanitizer"
SMALLEST = "smallest"  # -k: each op once
WORKERS = 4  # processes whose small models share a card
_TOGETHER, _ALONE = "gpu and not alone", "gpu and alone"
_NO_GRAPHS, _NO_PINNED = "GGML_CUDA_DISABLE_GRAPHS", "GGML_CUDA_NO_PINNED"
_TREE_OPS = "tests/gpu/test_tree_ops_cuda.py"
_OPS = (_TREE_OPS, "tests/gpu/test_layer_parts_cuda.py", "tests/gpu/test_expert_pool_cuda.py")
_NOT_EXACT = "not test_exact_cuda"
_GRACE = 20  # seconds for the row, once it was interrupted
# ggml asks by calls that may fail, and ends the process where one must not; memcheck is for memory
_OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
_SUMMARY = re.compile(rb"^=+ (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


@dataclass(frozen=True, slots=True)
class Part:
    """One run of pytest. `needs`: seconds on an H200, rounded up."""

    needs: float
    tests: tuple[str, ...] = ("tests/gpu",)
    only: str = ""
    marks: str = "gpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    most: float = 120
    """Seconds of a test. Behind them it shows its stack; a worker then ends."""
    tool: str = ""
    """Of compute-sanitizer; "" for none."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a row of this part says of how it ran."""
        return settings(self.environment, self.tests, self.only, self.marks, self.workers)

    def command(self, limit: float) -> list[str]:
        """Return what to start; it is interrupted after `limit` seconds."""
        guard = ["timeout", "--signal=INT", f"--kill-after={_GRACE}", f"{limit:.0f}"]
        shown = ["-s"] if self.workers == 1 else ["-n", str(self.workers), "--capture=sys"]
        chosen = ["-m", self.marks, *self.tests, *(["-k", self.only] if self.only else [])]
        ends = ["-o", f"faulthandler_timeout={self.most:.0f}"]
        if self.tool:
            ends += ["--timeout", f"{limit:.0f}"]  # every test takes longer
        elif self.workers > 1:  # no signal ends a call that hangs; a worker that ends costs one test
            ends += ["--timeout", f"{self.most + 5:.0f}", "--timeout-method", "thread"]
        # pytest-benchmark, where a machine has it, warns beside workers: an error here
        without = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
        pytest = [sys.executable, "-m", "pytest", *shown, *without, *ends, *chosen]
        if not self.tool:
            return [*guard, *pytest]
        watch = [SANITIZER, "--tool", self.tool, *_OPTIONS[self.tool], "--error-exitcode", "1"]
        return [*guard, *watch, *pytest]


# `off` and `alone-off`: not measured with workers yet
PARTS = {
    "on": Part(255, only=_NOT_EXACT, marks=_TOGETHER, workers=WORKERS),
    "alone": Part(25, marks=_ALONE),
    "alone-off": Part(25, marks=_ALONE, environment={_NO_GRAPHS: "1"}),
    "off": Part(255, only=_NOT_EXACT, marks=_TOGETHER, environment={_NO_GRAPHS: "1"}, workers=WORKERS),
    "exact": Part(300, ("tests/gpu/test_exact_cuda.py",)),
    "pool": Part(90, ("tests/gpu/test_expert_pool_cuda.py",)),
    "pageable": Part(
        175, ("tests/gpu/test_same_text.py",), only="mtp or dflash", environment={_NO_PINNED: "1"}
    ),
    "memcheck": Part(60, _OPS, SMALLEST, tool="memcheck"),
    "racecheck": Part(60, _OPS, SMALLEST, tool="racecheck"),
    "memcheck-trees": Part(200, (_TREE_OPS,), tool="memcheck"),
}
USUAL = ("on", "alone", "off", "alone-off", "exact", "pageable")


def run(names: Sequence[str], folder: Path, clock: Clock, say: Callable[[str], None]) -> list[str]:
    """Run these parts, appending to LOG and ROWS in `folder`; return those for which no time was left.

    Errors: BenchError for the first part that fails, whose row is written, and without compute-sanitizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(PARTS[name].tool for name in names) and not shutil.which(SANITIZER):
        raise BenchError(
            f"found no {SANITIZER} on PATH; expected CUDA's", hint="add the folder of nvcc to PATH"
        )
    for i, name in enumerate(names):
        part = PARTS[name]
        if clock.left < part.needs + _GRACE:
            return list(names[i:])
        say(f"-- {name}: {' '.join(part.tests)} {part.only}".rstrip())
        row = _run(name, part, folder, clock.left - _GRACE, say)
        results.append(folder / ROWS, row)
        tool = row["sanitizer"]
        if row["exit"] != 0 or (tool and tool["findings"] != 0):
            raise BenchError(
                f"{name} ended with status {row['exit']}{f', {tool}' if tool else ''}; expected 0",
                hint=f"what it said is in {folder / LOG}; its row is kept",
            )
    return []


def _run(name: str, part: Part, folder: Path, limit: float, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as there:
        rows = Path(there) / ROWS
        kept = {key: text for key, text in os.environ.items() if key not in (_NO_GRAPHS, _NO_PINNED)}
        # without a buffer, what was printed is in the log whatever ends the process
        surroundings = {**kept, **part.environment, "DRAFTWOOD_GPU_ROWS": str(rows), "PYTHONUNBUFFERED": "1"}
        if part.workers > 1:
            surroundings["OMP_WAIT_POLICY"] = "passive"  # they have more threads than there are cores
        status, summaries = _watch(part.command(limit), surroundings, folder / LOG, say)
        found = results.read(rows)
    row = found[-1] if found else {**origin(), **nothing(part.settings)}
    sanitizer = {"tool": part.tool, "findings": sum(summaries) if summaries else None} if part.tool else None
    return {**row, "part": name, "exit": status, "sanitizer": sanitizer}


def _watch(
    command: Sequence[str], surroundings: Mapping[str, str], log: Path, say: Callable[[str], None]
) -> tuple[int, list[int]]:
    """Run a command, showing and keeping what it prints; return its status and what sanitizers counted."""
    counted = []
    with (
        log.open("ab") as kept,
        subprocess.Popen(
            command, cwd=stamp.ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        kept.write(f"$ {' '.join(command[4:])}\n".encode())
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            kept.flush()
            say(line.decode(errors="replace").rstrip("\n"))
            if summary := _SUMMARY.match(line):
                counted.append(int(summary[1] or summary[2]))
    return process.returncode, counted


def origin() -> dict[str, Any]:
    """Return what every row says: of which run, commit and card. Errors: BenchError for no commit."""
    return {"schema": SCHEMA, "run": uuid.uuid4().hex[:12], **stamp.origin(), "unit": "tests"}


def settings(
    surroundings: Mapping[str, str], tests: Sequence[str], only: str, marks: str, workers: int
) -> dict[str, Any]:
    """Return what decides which tests run and how; ggml looks whether its variables are there at all."""
    return {
        "graphs": _NO_GRAPHS not in surroundings,
        "pinned": _NO_PINNED not in surroundings,
        "tests": list(tests),
        "only": only,
        "marks": marks,
        "workers": workers,
    }


def nothing(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a row that tests fill in, for a run of which none ended."""
    counts = dict.fromkeys(("passed", "failed", "errors", "skipped", "deselected"), 0)
    return {
        "settings": chosen, "outcomes": counts, "failures": [], "skips": {}, "seconds": None,
        "watched": False, "tokens": 0, "mismatches": 0, "excused": 0, "largest_excused_share": None,
        "margins": None, "widest": None, "op_error": None, "texts": {}, "figures": {},
    }  # fmt: skip
