"""The pin: what `vendor/llama.lock` says of the one archive of the source; whether a file is that archive.

Must not know where archives come from, nor what is done with them. Entry points: `load_lock`, `checked`.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class SourceError(RuntimeError):
    """A source that cannot be had or trusted; the text says what was found, what was expected and the fix."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The pin of `vendor/llama.lock`: paths are relative to the archive's top folder, `size` is in bytes."""

    name: str
    version: str
    sha256: str
    size: int
    backend: str
    inner: str
    commit: str
    leave_out: tuple[str, ...]

    @property
    def top(self) -> str:
        """The one folder that the archive holds."""
        return f"{self.name}-{self.version}"

    @property
    def tarball(self) -> str:
        """The archive's file name."""
        return f"{self.top}.tar.gz"


def load_lock(root: Path) -> Lock:
    """Read `vendor/llama.lock`; raises SourceError for a missing or unknown field. Test: test_source.py."""
    path = root / "vendor" / "llama.lock"
    with path.open("rb") as file:
        table = tomllib.load(file)
    try:
        return Lock(**{**table, "leave_out": tuple(table["leave_out"])})
    except (KeyError, TypeError) as error:
        fields = ", ".join(Lock.__slots__)
        raise SourceError(f"`{path}` holds {', '.join(table)}, expected {fields}") from error


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checked(path: Path, lock: Lock) -> Path:
    """Return `path` if its sha256 is the pinned one; raises SourceError otherwise."""
    found = sha256_of(path)
    if found != lock.sha256:
        raise SourceError(
            f"`{path}` is not the pinned archive {lock.tarball}\n"
            f"  found    sha256 {found} ({path.stat().st_size:,} bytes)\n"
            f"  expected sha256 {lock.sha256} ({lock.size:,} bytes)\n\n"
            "hint: delete that file and run again, it is then downloaded afresh"
        )
    return path
