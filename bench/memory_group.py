"""A memory cgroup for a child process: what a machine with less memory is like. Needs Linux and root.

Must not know: what is measured in it. Test: tests/model/test_expert_readahead.py.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


class NoGroupError(RuntimeError):
    """This machine lets nobody make a memory cgroup here; the text says why."""


@contextlib.contextmanager
def limited(n_bytes: int) -> Iterator[Path]:
    """Make a cgroup whose processes have so many bytes, page cache included. Errors: NoGroupError."""
    group = _made(n_bytes)
    try:
        yield group
    finally:
        group.rmdir()


def _made(n_bytes: int) -> Path:
    old = (_V1 / "memory.limit_in_bytes").exists()
    group = (_V1 if old else _V2) / f"draftwood-{os.getpid()}"
    try:
        if not old:
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(n_bytes))
    except OSError as error:
        if group.exists():
            group.rmdir()
        raise NoGroupError(f"no memory cgroup can be made in {group.parent}: {error.strerror}") from error
    return group


def inside(group: Path, command: Sequence[str | Path]) -> list[str]:
    """Return the command that runs this one in a group."""
    words = " ".join(shlex.quote(os.fspath(word)) for word in command)
    return ["sh", "-c", f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && exec {words}"]


def forget(path: Path) -> None:
    """Write a file's pages to the disk and drop them from memory, where no process has them mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
