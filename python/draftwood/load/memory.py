"""How much memory this process may still take: the machine's, or its cgroup's if that is less.

Must not know: models. Test: tests/unit/test_memory.py.
"""

from __future__ import annotations

import re
from pathlib import Path

from draftwood.load import cgroups


def available(root: Path = cgroups.ROOT) -> int | None:
    """Return bytes that are free, or hold pages of files that the kernel would give up; None if unknown.

    root: a folder with `proc` and `sys`, another one in tests.
    """
    known = _of_groups(root)
    if (free := _of_machine(root).get("MemAvailable")) is not None:
        known.append(free)
    return min(known, default=None)


def with_swap(root: Path = cgroups.ROOT) -> tuple[int, int] | None:
    """Return as many bytes and those of free swap, and all that the machine has; None if unknown.

    What a cgroup may swap is not counted.
    """
    has = _of_machine(root)
    try:
        left, whole = has["MemAvailable"] + has["SwapFree"], has["MemTotal"] + has["SwapTotal"]
    except KeyError:
        return None
    return min([left, *_of_groups(root)]), whole


def _of_machine(root: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+):\s+(\d+) kB", cgroups.read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(number) * 1024 for name, number in lines}


def _of_groups(root: Path) -> list[int]:
    """Return what each memory cgroup of this process leaves, its own and those around it."""
    left = (_of_group(each) for each in cgroups.folders("memory", root))
    return [n for n in left if n is not None]


def _of_group(group: Path) -> int | None:
    limit = cgroups.read(group / "memory.max") or cgroups.read(group / "memory.limit_in_bytes")
    if not limit.isdigit():
        return None  # no limit, or no such group here
    used = re.search(r"^(?:anon|total_rss) (\d+)", cgroups.read(group / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - (int(used[1]) if used else 0))
