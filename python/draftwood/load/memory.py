"""How much memory this process may still take: the machine's, or its cgroup's if that is less.

Must not know: models. Test: tests/unit/test_memory.py.
"""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path("/")


def available(root: Path = _ROOT) -> int | None:
    """Return bytes that are free, or hold pages of files that the kernel would give up; None if unknown.

    root: a folder with `proc` and `sys`, another one in tests.
    """
    found = [_of_machine(root), *_of_groups(root)]
    known = [n for n in found if n is not None]
    return min(known) if known else None


def _of_machine(root: Path) -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _of_groups(root: Path) -> list[int | None]:
    """Return what each memory cgroup of this process leaves, its own and those around it."""
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.strip("/")
            left += [_of_group(each) for each in (group, *group.parents) if each.is_relative_to(top)]
    return left


def _of_group(group: Path) -> int | None:
    limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
    used = re.search(r"^(?:anon|total_rss) (\d+)", _read(group / "memory.stat"), re.MULTILINE)
    if not limit.strip().isdigit() or used is None:
        return None  # no limit, or no such group here
    return max(0, int(limit) - int(used[1]))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
