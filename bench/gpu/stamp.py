"""Which commit a tree is of, for machines to which a tree travels without its repository.

`tools/gpu.sh pack` writes the stamp, `build` keeps it beside what it installs. A digest of the sources
tells whether they are still those of the stamp. Must not know: what is measured.
Test: tests/unit/test_bench_run.py.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from bench.gpu.work import BenchError

ROOT = Path(__file__).resolve().parents[2]
PACKED = ROOT / "build" / "gpu" / "commit.json"
INSTALLED = "draftwood-commit.json"
_SOURCES = (
    "src",
    "patches",
    "cmake",
    "vendor",
    "_build",
    "python",
    "bench/gpu",
    "bench/cases",
    "bench/run.py",
    "tests/gpu",
    "tests/ops",
)
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
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *_SOURCES)
        _git(root, "ls-files", "--error-unmatch", "bench/run.py")  # maybe in a repository, but not of it
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"found no repository of {root}: {error}; expected the tree in its own") from error
    return {"commit": commit, "modified": bool(changed), "digest": digest(root)}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


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
