"""Provide the pinned llama-cpp-python source: find the archive, check it, unpack it, apply the patches.

Every state of pin and patches has its own folder, `build/src/<hash>/`, which appears by one rename, so no
half-patched tree is ever seen. `build/src/current` points at the one in force: compilers and ccache see a
path that does not change with the patches.
Must not know how the tree is built. Entry point: `ensure_source`; `python _build/source.py` prints its path.
"""

from __future__ import annotations

import fcntl
import filecmp
import gzip
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from applier import PatchError, apply_series, read_series
from download import download_archive
from pin import Lock, SourceError, checked, load_lock, sha256_of

__all__ = [  # the pin's names too, for those who need both
    "STAMP",
    "Lock",
    "PatchError",
    "Source",
    "SourceError",
    "cache_dir",
    "checked",
    "ensure_source",
    "find_sdist",
    "load_lock",
    "main",
    "series_hash",
    "sha256_of",
    "unpack",
]

STAMP = ".draftwood-source.json"


@dataclass(frozen=True, slots=True)
class Source:
    """An unpacked tree: `path` is what CMake is given, `hash` names its pin and patches."""

    path: Path
    hash: str
    lock: Lock

    @property
    def llama_cpp(self) -> Path:
        """The llama.cpp tree."""
        return self.path / self.lock.inner


def series_hash(root: Path, lock: Lock, *, pristine: bool = False) -> str:
    """Hash the archive's hash, what is left out, and the patches in order, to 16 hex digits.

    `pristine` hashes an empty series. Comments in `series` do not count. Test: tests/unit/test_source.py.
    """
    digest = hashlib.sha256()
    patches = root / "patches"
    parts = [lock.sha256.encode(), lock.inner.encode(), *(name.encode() for name in lock.leave_out)]
    for name in [] if pristine else read_series(patches):
        data = (patches / name).read_bytes() if (patches / name).is_file() else b""
        parts += [name.encode(), data]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


# ---- the archive ----


def cache_dir() -> Path:
    """Return the folder that keeps downloads: DRAFTWOOD_CACHE, else draftwood/ in the user's cache folder."""
    if named := os.environ.get("DRAFTWOOD_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwood"


def find_sdist(root: Path, lock: Lock) -> Path:
    """Return the archive, its sha256 checked: DRAFTWOOD_SDIST, `vendor/`, the cache, or a download.

    Raises SourceError for a wrong hash (file, found, expected, fix), a DRAFTWOOD_SDIST that is not there, and
    a failed download. Test: tests/unit/test_source.py.
    """
    if named := os.environ.get("DRAFTWOOD_SDIST"):
        path = Path(named).expanduser()
        if not path.is_file():
            raise SourceError(
                f"DRAFTWOOD_SDIST is `{named}`, expected the archive {lock.tarball}, found no file there\n\n"
                "hint: correct the variable, or unset it to let the archive be found or downloaded"
            )
        return checked(path, lock)
    for folder in (root / "vendor", cache_dir()):
        if (folder / lock.tarball).is_file():
            return checked(folder / lock.tarball, lock)
    return download_archive(cache_dir(), lock)


# ---- the tree ----


def unpack(archive: Path, lock: Lock, target: Path) -> None:
    """Write the regular files of the archive under `target`, without its top folder and what is left out.

    Files get the present time, not the archive's, so that a build sees a change. Raises SourceError for a
    link, a device, a path that leaves the folder, or a damaged archive. Test: tests/unit/test_source.py.
    """
    made: set[Path] = set()
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                name = _inside(member, lock)
                content = None if name is None else tar.extractfile(member)
                if name is None or content is None:
                    continue
                path = target / name
                if path.parent not in made:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    made.add(path.parent)
                with path.open("xb") as file:
                    shutil.copyfileobj(content, file)
                if member.mode & 0o100:
                    path.chmod(0o755)
            while stream.read(1 << 20):
                pass  # to the end, where gzip compares length and checksum
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, FileExistsError) as error:
        hint = "hint: delete it and run again"
        raise SourceError(f"`{archive}` cannot be unpacked: {error}\n\n{hint}") from error


def _inside(member: tarfile.TarInfo, lock: Lock) -> str | None:
    """Return the path below the archive's top folder, or None for a folder and for what is left out."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or path.parts[:1] != (lock.top,):
        raise SourceError(f"the archive holds `{member.name}`, expected paths below `{lock.top}/` only")
    if not (member.isfile() or member.isdir()):
        raise SourceError(f"the archive holds `{member.name}`, which is neither a file nor a folder")
    rest = path.parts[1:]
    dropped = any(part.startswith(".git") for part in rest) or any(
        rest[: len(PurePosixPath(out).parts)] == PurePosixPath(out).parts for out in lock.leave_out
    )
    return None if member.isdir() or dropped else "/".join(rest)


def ensure_source(root: Path, *, pristine: bool = False) -> Source:
    """Return the pinned source with the series applied, unpacked under `root/build/src` where it is not.

    Args: `pristine` leaves the patches out and `build/src/current` alone (for comparison builds).
    Safe to interrupt and to call from several processes at once. Raises SourceError or PatchError.
    Test: tests/unit/test_source.py.
    """
    root = root.resolve()
    lock = load_lock(root)
    digest = series_hash(root, lock, pristine=pristine)
    store = root / "build" / "src"
    store.mkdir(parents=True, exist_ok=True)
    tree = store / digest
    with _exclusive(store / ".lock"):
        if not (tree / STAMP).is_file():
            _make_tree(root, lock, tree, pristine)
        if pristine:
            return Source(tree, digest, lock)
        path = _make_current(store, tree)
        _prune(store, keep={digest, series_hash(root, lock, pristine=True)})
    return Source(path, digest, lock)


def _make_tree(root: Path, lock: Lock, tree: Path, pristine: bool) -> None:
    archive = find_sdist(root, lock)
    for left_over in tree.parent.glob(".part-*"):
        shutil.rmtree(left_over)  # of an interrupted run: we hold the lock, so nobody uses it
    part = tree.parent / f".part-{tree.name}"
    try:
        unpack(archive, lock, part)
        names = [] if pristine else apply_series(root / "patches", part / lock.inner)
        stamp = {"hash": tree.name, "version": lock.version, "commit": lock.commit, "patches": names}
        (part / STAMP).write_text(json.dumps(stamp, indent=1) + "\n", "utf-8")
        if tree.exists():  # without a stamp: not made by us
            shutil.rmtree(tree)
        part.rename(tree)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _make_current(store: Path, tree: Path) -> Path:
    """Point `current` at `tree` and return it; return `tree` itself where links are not possible."""
    current = store / "current"
    if current.is_symlink() and os.readlink(current) == tree.name:
        return current
    if current.is_symlink() and current.exists():
        _settle_times(current.resolve(), tree)
    elif current.is_dir():  # a copy that followed the link
        shutil.rmtree(current)
    os.utime(tree / STAMP)
    fresh = store / ".current"
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(tree.name, target_is_directory=True)
    except OSError:
        return tree
    os.replace(fresh, current)
    return current


def _settle_times(old: Path, new: Path) -> None:
    """Give files the times that editing in place would give: the unchanged keep theirs, the changed get now.

    Without this, a change of one patch would rebuild everything, and going back to older patches nothing.
    """
    now = time.time_ns()  # finer than the clock that stamps written files: later than all of `old`
    for path in new.rglob("*"):
        if not path.is_file():
            continue
        before = old / path.relative_to(new)
        if before.is_file() and filecmp.cmp(before, path, shallow=False):
            stat = before.stat()
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        else:
            os.utime(path, ns=(now, now))


def _prune(store: Path, keep: set[str]) -> None:
    """Remove old trees, except those to keep and the newest of the others."""
    old = [path for path in store.iterdir() if re.fullmatch(r"[0-9a-f]{16}", path.name)]
    old = [path for path in old if path.name not in keep and (path / STAMP).is_file()]
    old.sort(key=lambda path: (path / STAMP).stat().st_mtime)
    for path in old[:-1]:
        shutil.rmtree(path)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system frees it when the process ends, however it ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Print the path of the source tree, for the Makefile and for CMake."""
    root = Path(__file__).resolve().parent.parent
    try:
        print(ensure_source(root, pristine="--pristine" in sys.argv[1:]).path)
    except (SourceError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
