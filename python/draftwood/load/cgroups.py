"""The cgroups of this process, as folders of files.

Must not know: what is limited. Tests: tests/unit/test_cores.py, tests/unit/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""Where `proc` and `sys` are; another folder in tests."""


def folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders that may have limits of a controller, such as "cpu": its own, and those around it.

    A line of cgroup version 2 names no controllers. In a container a folder need not be there.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / controllers
        inner = top / path.strip("/")
        yield from (each for each in (inner, *inner.parents) if each.is_relative_to(top))


def read(path: Path) -> str:
    """Return a file's text without space around it; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
