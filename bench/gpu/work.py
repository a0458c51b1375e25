"""What a run of bench/run.py has found so far, in one JSON file, and how long it may go on.

A command on a lent machine ends after ten minutes, so a stage stops before, and the next call goes on where
it was. Must not know: what is measured. Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from draftwood.errors import DraftwoodError

NAME = "bench.json"
SCHEMA = 2
_VARYING = ("date", "load_average")


class BenchError(DraftwoodError, RuntimeError):
    """A step that failed or ran out of time; the stage ends."""


class Clock:
    """Counts down from the minutes that a stage may take."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + minutes * 60

    @property
    def left(self) -> float:
        """Seconds left, 0.0 at least."""
        return max(0.0, self._end - time.monotonic())

    def limit(self, seconds: float) -> float:
        """Return a step's own time limit, or what is left where that is less.

        Errors: BenchError when nothing is left.
        """
        if self.left <= 0.0:
            raise BenchError("found no time left for this stage", hint="call it again: it goes on from here")
        return min(seconds, self.left)


class Work:
    """The folder of a run: models, logs, and `state`, which `save` writes at once and copies to `out`."""

    def __init__(self, folder: Path, out: Path | None = None) -> None:
        self.folder, self._out = folder, out
        for each in (folder, self.logs, *([out] if out else [])):
            each.mkdir(parents=True, exist_ok=True)
        self.origin: dict[str, Any] | None = None
        """Machine, build and commit of what is measured now."""
        path = folder / NAME
        self.state: dict[str, Any] = (
            read(path) if path.exists() else {"schema": SCHEMA, "run": uuid.uuid4().hex[:12], "cases": {}}
        )

    @property
    def logs(self) -> Path:
        """Folder of what the processes of a stage print."""
        return self.folder / "logs"

    def kept(self, asked: dict[str, Any], *path: str) -> dict[str, Any] | None:
        """Return what the state has at a path of names; None if it has nothing there.

        asked: the options that decide it, as JSON gives them back. Errors: BenchError if it was measured with
        others, on another machine, or of another commit or build.
        """
        found: dict[str, Any] = self.state
        for name in path:
            found = found.get(name, {})
        if not found:
            return None
        before, now = {**found["asked"], **found["origin"]}, {**asked, **(self.origin or {})}
        keys = [key for key in {**before, **now} if key not in _VARYING and before.get(key) != now.get(key)]
        if keys:
            told = "; ".join(f"{key} {before.get(key)}, not {now.get(key)}" for key in keys)
            raise BenchError(
                f"found {' '.join(path)} measured in {self.folder} with {told}; expected the same",
                hint=f"--work of another folder, or remove {self.folder / NAME}, which keeps the models",
            )
        return found

    def keep(self, asked: dict[str, Any], found: dict[str, Any], *path: str) -> dict[str, Any]:
        """Put what was found at a path of names, with its options and its origin; save and return it."""
        *above, last = path
        place = self.state
        for name in above:
            place = place.setdefault(name, {})
        place[last] = {"asked": asked, "origin": self.origin, **found}
        self.save()
        return place[last]

    def save(self) -> None:
        """Write the state, there and to `out`; a crash leaves the older one."""
        path = self.folder / NAME
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.state, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, path)
        if self._out:
            shutil.copy(path, self._out / NAME)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a file. Errors: BenchError for none and for anything else."""
    if not path.exists():
        raise BenchError(
            f"found no {path.name} in {path.parent}; expected what a run found",
            hint="name the folder that its --out or --work named",
        )
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if state["schema"] != SCHEMA:
            raise ValueError(f"schema {state['schema']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{path} is no state of bench/run.py: {error}", hint="remove it, or name another folder"
        ) from error
    return state
