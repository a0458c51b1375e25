"""Where and with what a run was made: machine, build, commit. Must not know: figures.

Test: tests/unit/test_bench_results.py.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import draftwood

SOURCES = ("src", "patches", "cmake", "vendor", "_build", "python", "CMakeLists.txt", "pyproject.toml")
"""What decides how draftwood is built and what it does, from the top of its repository."""


def machine(build: dict[str, Any]) -> dict[str, Any]:
    """Return what a reader needs to judge a figure; `build` is engine.build_info(). No paths, no names."""
    from draftwood.load.cores import usable_cores
    from draftwood.load.devices import devices  # loads the library, which the commit does not need

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "draftwood": draftwood.__version__,
        **commit(Path(draftwood.__file__).parent),
        "build": build,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "cards": [each["description"] for each in devices() if "GPU" in each["type"]],
        "driver": driver(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def driver() -> str | None:
    """Return the version of NVIDIA's driver; None where its tool is not there."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def commit(folder: Path, file: str = "__init__.py", sources: Sequence[str] = SOURCES) -> dict[str, Any]:
    """Return the commit whose tree holds `file` of `folder`, and whether `sources` differ from it.

    Both are None if no repository tracks the file.
    """
    if _git(folder, "ls-files", "--error-unmatch", file) is None:
        return {"commit": None, "modified": None}  # maybe in a repository, but not of it
    changed = _git(folder, "status", "--porcelain", "--", *(f":(top){name}" for name in sources))
    return {"commit": _git(folder, "rev-parse", "HEAD"), "modified": changed != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    """Return the processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
