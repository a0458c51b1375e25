"""Kernels of a plain step and of a round, by name: Nsight Compute over a few of them, after a warm-up.

ncu runs kernels one at a time with its own gaps between, so its sums show where device time goes and not how
long a step takes. Must not know: results of cases. Test: tests/unit/test_bench_run.py reads a table; the rest
needs a card.
"""

from __future__ import annotations

import csv
import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.files import Files
from bench.gpu.work import BenchError

PHASES = ("plain", "round")
ROUNDS = 3  # a plain step at 35B-A3B shapes is some 1,600 kernels
METRIC = "gpu__time_duration.sum"
LIMIT = 240.0
_MOST = 20_000  # kernels


def run(case: Case, phase: str, files: Files, log: Path, limit: float) -> dict[str, Any]:
    """Profile one phase of a case and return its table. Errors: BenchError where ncu fails."""
    command = [
        *("ncu", "--metrics", METRIC, "--cache-control", "none", "--clock-control", "none"),
        *("--graph-profiling", "node", "--profile-from-start", "no", "--launch-count", str(_MOST)),
        *("--csv", "--page", "raw", "--print-units", "base", "--target-processes", "all"),
        *(
            sys.executable,
            str(Path(__file__).resolve().parents[1] / "run.py"),
            "profiled",
            json.dumps(asdict(case)),
            phase,
        ),
        *("--model", str(files.model), *(["--drafter", str(files.drafter)] if files.drafter else [])),
    ]
    try:
        with log.open("w") as errors:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=limit, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"ncu failed: {error}", hint="it comes with CUDA's toolkit") from error
    kernels = table(done.stdout.splitlines())
    if done.returncode != 0 or not kernels:
        raise BenchError(
            f"ncu ended with status {done.returncode}: {done.stdout[-1500:]}\n{log.read_text()[-1500:]}"
        )
    total = sum(each["us"] for each in kernels)
    return {
        "rounds": ROUNDS,
        "us": total,
        "launches": sum(each["launches"] for each in kernels),
        "kernels": kernels,
    }


def table(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Sum ncu's CSV by kernel name: launches and microseconds, the longest first."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    sums: dict[str, list[float]] = {}
    for row in rows:
        text = (row.get(METRIC) or "").replace(",", "")
        if not re.fullmatch(r"[\d.]+", text):
            continue  # the line of units
        entry = sums.setdefault(short(row["Kernel Name"]), [0, 0.0])
        entry[0] += 1
        entry[1] += float(text) / 1000
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [{"kernel": name, "launches": int(n), "us": round(us, 3)} for name, (n, us) in ordered]


def short(name: str) -> str:
    """Return a kernel's name without its parameters; template arguments stay, they tell variants apart."""
    depth, end = 0, len(name)
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            end = i
            break
    return name[:end].removeprefix("void ").strip()


def profiled(case: Case, phase: str, model: str, drafter: str | None) -> None:
    """Run one phase of a case with the profiler on for ROUNDS rounds: what `run` starts under ncu."""
    from bench.gpu.ours import Ours, shared_weights

    driver = ctypes.CDLL("libcuda.so.1")
    ours = Ours(model, drafter)
    with shared_weights():
        ours.open(asdict(case))
        ours.profiled(phase, ROUNDS, driver.cuProfilerStart, driver.cuProfilerStop)
        ours.close()
