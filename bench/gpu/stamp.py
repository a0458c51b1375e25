"""Where a run comes from: its machine, and its commit if the tree travelled without its repository.

`tools/gpu.sh pack` writes the stamp, `build` keeps it beside what it installs. A digest of the sources
tells whether they are still those of the stamp. Must not know: what is measured.
Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import draftwood
from draftwood.bench.facts import SOURCES, commit, machine

from bench.gpu.work import BenchError

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = "draftwood-commit.json"
_SOURCES = (*SOURCES, "bench/gpu", "bench/cases", "bench/run.py", "tests/gpu", "tests/ops")
_KEYS = ("commit", "modified", "digest")
# a built or cached file is no source
_TEXT = {".py", ".toml", ".cpp", ".h", ".cu", ".cuh", ".c", ".txt", ".cmake", ".pth", ".patch", ".lock", ""}


def digest(root: Path = ROOT) -> str:
    """Return a hash of every source that decides what runs and how it is measured."""
    found = hashlib.sha256()
    for name in _SOURCES:
        paths = [root / name] if (root / name).is_file() else sorted((root / name).rglob("*"))
        for path in paths:
            inside = path.relative_to(root).parts
            hidden = any(part.startswith(".") for part in inside)  # caches of tools, which do not travel
            if path.is_file() and not hidden and "__pycache__" not in inside and path.suffix in _TEXT:
                content = path.read_bytes()
                found.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()


def make(root: Path = ROOT) -> dict[str, Any]:
    """Return the stamp of a tree that lies in its repository. Errors: BenchError elsewhere."""
    found = commit(root / "bench", "run.py", _SOURCES)
    if found["commit"] is None:
        raise BenchError(f"found no repository of {root}; expected the tree in its own")
    return {**found, "digest": digest(root)}


def known(package: Path, root: Path = ROOT) -> dict[str, Any]:
    """Return {"commit", "modified"} of what runs here: the installed draftwood and this tree's benchmark.

    An installed draftwood has a stamp beside it; its sources and those of this tree must be of one digest, or
    the row says that it is modified. Errors: BenchError for neither stamp nor repository.
    """
    stamp = package.parent / INSTALLED
    if not stamp.exists():
        made = make(root)  # an editable install: both are this tree
        return {"commit": made["commit"], "modified": made["modified"]}
    try:
        found = json.loads(stamp.read_text(encoding="utf-8"))
        if set(found) != set(_KEYS):
            raise ValueError(f"keys {sorted(found)}")
    except ValueError as error:
        raise BenchError(f"{stamp} is no stamp: {error}", hint="tools/gpu.sh pack, then build") from error
    return {"commit": found["commit"], "modified": found["modified"] or found["digest"] != digest(root)}


def origin() -> dict[str, Any]:
    """Return machine, build and commit of what runs here, for rows.

    Errors: BenchError for no commit, and for a CUDA backend that does not load: a CPU would be timed.
    """
    from draftwood.engine import _capi
    from draftwood.engine.engine import build_info

    if _capi.cuda.error:
        raise BenchError(f"CUDA's backend does not load: {_capi.cuda.error}", hint=_capi.cuda.fix)
    found = {**machine(build_info()), **known(Path(draftwood.__file__).parent)}
    return {**found, "card": next(iter(found["cards"]), None), "pin": found["build"]["pin_version"]}
