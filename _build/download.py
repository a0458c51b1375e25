"""Download the pinned archive with pip, so that the user's index, proxy, certificates and keyring hold.

pip cannot just fetch a source distribution: it asks the archive's build backend for the metadata, to compare
name and version. A stand-in answers that, so nothing else is downloaded, installed or built (`_stand_in`).
Must not know what is in the archive. Entry point: `download_archive`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pin import Lock, SourceError, checked
from progress import Status, times

POLL_SECONDS = 0.5
WORDS = 6  # first and last lines of pip in an error
STALE_SECONDS = 24 * 3600

# Variables, or their first letters, that the nested pip must not see.
_NOT_FOR_PIP = (
    # An outer pip runs our backend with these; the inner one would seek the archive's backend in our folder.
    "_PYPROJECT_HOOKS_",
    "PEP517_",
    # They speak of the requirements of builds, which are neither installed nor needed here. pip refuses the
    # first together with --no-build-isolation, and the second would miss the archive's backend.
    "PIP_BUILD_CONSTRAINT",
    # They speak of other packages, or of another version of this one.
    "PIP_CONSTRAINT",
    "PIP_REQUIREMENT",
    "PIP_CHECK_BUILD_DEPENDENCIES",
)

_BACKEND = '''\
"""Stands in for the archive's build backend: says its name and version to pip, and can build nothing."""

import os


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = "{top}.dist-info"
    os.mkdir(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w", encoding="utf-8") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return folder
'''


def download_archive(cache: Path, lock: Lock, *, hashed: bool = True) -> Path:
    """Download the archive of `lock` to the folder `cache`; returns its path there.

    Args: `hashed=False` takes what the index has (for a version whose hash is not known yet).
    Interrupted or failed, it leaves neither a process nor a file. Raises SourceError with pip's words and the
    fix. Test: tests/unit/test_download.py.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache)
        part = tempfile.TemporaryDirectory(dir=cache, prefix=".download-")
    except OSError as error:
        raise SourceError(
            f"{lock.tarball} cannot be downloaded to `{cache}`: {error.strerror}\n\n"
            "hint: name another folder in DRAFTWOOD_CACHE, or the archive itself in DRAFTWOOD_SDIST"
        ) from error
    with part as folder:
        path = _pip_download(lock, Path(folder), hashed)
        # A rename inside the cache: an interrupted download never looks like a finished one.
        os.replace(checked(path, lock) if hashed else path, cache / lock.tarball)
    return cache / lock.tarball


def _remove_stale(cache: Path) -> None:
    """Remove what a killed run left; a folder of today may be in use."""
    for folder in cache.glob(".download-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def _pip_download(lock: Lock, folder: Path, hashed: bool) -> Path:
    """Download to `folder`, which holds pip's own files as well; returns the archive's path there."""
    log = folder / "log"
    (folder / "tmp").mkdir()
    environment = _environment(_stand_in(lock, folder / "backend"), folder / "tmp")
    with log.open("wb") as out:
        # Without stdin: pip would wait for a name or password whose prompt nobody can see.
        process = subprocess.Popen(
            _command(lock, folder, hashed),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            _watch(process, lock, folder)
        finally:
            process.kill()
            process.wait()
    path = folder / lock.tarball
    if process.returncode != 0 or not path.is_file():
        raise SourceError(
            f"pip could not download {lock.tarball} (exit {process.returncode}):\n"
            + "".join(f"  {line}\n" for line in first_and_last(log.read_text("utf-8", "replace")))
            + f"\nhint: without a network, put {lock.tarball} into `vendor/` or name it in DRAFTWOOD_SDIST"
        )
    return path


def _command(lock: Lock, folder: Path, hashed: bool) -> list[str]:
    requirements = folder / "requirements.txt"
    proof = f" --hash=sha256:{lock.sha256}" if hashed else ""
    requirements.write_text(f"{lock.name}=={lock.version}{proof}\n", "utf-8")
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", f"--no-binary={lock.name}"),
        *("--no-build-isolation", "--disable-pip-version-check", "--no-color", "--progress-bar=off"),
        *(["--require-hashes"] if hashed else []),
        *(f"--requirement={requirements}", f"--dest={folder}"),
    ]


def _stand_in(lock: Lock, folder: Path) -> Path:
    """Write a module of the name of the archive's backend under `folder`; returns `folder`.

    The real backend would first have to be installed, in an isolated environment, from the user's index.
    """
    *packages, module = lock.backend.split(".")
    place = folder.joinpath(*packages)
    place.mkdir(parents=True)
    for depth in range(len(packages)):
        (folder.joinpath(*packages[: depth + 1]) / "__init__.py").touch()
    text = _BACKEND.format(top=lock.top, name=lock.name, version=lock.version)
    (place / f"{module}.py").write_text(text, "utf-8")
    return folder


def _environment(backend: Path, temporary: Path) -> dict[str, str]:
    """Return the environment of the nested pip: the stand-in comes first, large files go where we look."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_PIP)}
    # The old PYTHONPATH stays behind ours: in an outer pip's isolated environment it leads to pip itself.
    paths = [str(backend), environ.get("PYTHONPATH", "")]
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TMPDIR": str(temporary)}


def _watch(process: subprocess.Popen[bytes], lock: Lock, folder: Path) -> None:
    """Wait for pip and say how far it is, by the size of the file that it writes."""
    began, size = time.monotonic(), 0
    with Status() as status:
        status.line(f"draftwood: downloading {lock.tarball} to {folder.parent}")
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                return
            size = max(size, _largest(folder / "tmp"))  # pip removes the file before it ends
            status.line(how_far(lock, size, time.monotonic() - began))


def _largest(temporary: Path) -> int:
    """Return the bytes of the largest file in pip's folders: the archive, as far as it is there."""
    largest = 0
    with suppress(OSError):  # a folder was removed meanwhile; glob says so in some Pythons
        for path in temporary.glob("*/*"):
            with suppress(OSError):  # a file
                largest = max(largest, path.stat().st_size)
    return largest


def how_far(lock: Lock, size: int, elapsed: float) -> str:
    """Return the line for `size` bytes after `elapsed` seconds; 0 as the lock's size is an unknown total."""
    total = f" of {lock.size / 1e6:.1f}" if lock.size else ""
    share = size / lock.size if lock.size else 0.0
    last = ", checking it" if share >= 1 else ""
    return f"draftwood: {lock.tarball}: {size / 1e6:.1f}{total} MB, {times(elapsed, share)}{last}"


def first_and_last(text: str) -> list[str]:
    """Return the first and last lines that are not blank, `...` for those between."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) > 2 * WORDS:
        lines[WORDS:-WORDS] = ["..."]
    return lines or ["(pip said nothing)"]
