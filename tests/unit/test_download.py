"""The download by pip: no build backend, an outer pip's hook around it, progress, pip's words in errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import download
import pytest
from download import download_archive, first_and_last, how_far
from pin import Lock, SourceError, load_lock

from tests.patches.fake_sdist import make_root, member, write_archive

BUILD = Path(download.__file__).resolve().parent
BLOCK = 50_000
BLOCKS = 20


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """A pin whose archive pip finds in a folder, and no terminal for progress."""
    root = make_root(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(root / "vendor"))
    return load_lock(root)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# ---- inside an outer pip ----

HOOKS = {
    "pip": {
        "_PYPROJECT_HOOKS_BUILD_BACKEND": "backend",
        "_PYPROJECT_HOOKS_BACKEND_PATH_JSON": json.dumps([str(BUILD)]),
    },
    "older pip": {"PEP517_BUILD_BACKEND": "backend", "PEP517_BACKEND_PATH": str(BUILD)},
    "path without JSON": {"_PYPROJECT_HOOKS_BACKEND_PATH": str(BUILD)},
    "build constraints": {"PIP_BUILD_CONSTRAINT": "/nowhere/constraints.txt"},
    "checked requirements": {"PIP_CHECK_BUILD_DEPENDENCIES": "1"},
    "constraints": {"PIP_CONSTRAINT": "/nowhere/constraints.txt"},
    "requirements": {"PIP_REQUIREMENT": "/nowhere/requirements.txt"},
}


@pytest.mark.parametrize("hook", HOOKS)
def test_inside_a_hook(lock: Lock, cache: Path, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    for name, value in HOOKS[hook].items():
        monkeypatch.setenv(name, value)
    assert download_archive(cache, lock) == cache / lock.tarball
    assert names(cache) == [lock.tarball]


def test_environment_of_the_nested_pip(
    lock: Lock, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen.json"
    fake_pip(tmp_path, monkeypatch, f"json.dump(dict(os.environ), open({str(seen)!r}, 'w'))")
    for hook in HOOKS.values():
        for name, value in hook.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"/one{os.pathsep}/two")
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    with pytest.raises(SourceError):
        download_archive(cache, lock)
    given = json.loads(seen.read_text())
    assert set(given) & {name for hook in HOOKS.values() for name in hook} == set()
    assert given["PIP_INDEX_URL"] == "https://example.org/simple"
    ours, *others = given["PYTHONPATH"].split(os.pathsep)
    assert others == ["/one", "/two"]
    assert Path(ours).is_relative_to(cache)
    assert Path(given["TMPDIR"]).is_relative_to(cache)


@pytest.mark.parametrize("backend", ["one", "one.two", "one.two.three", "scikit_build_core.build"])
def test_no_backend_is_needed(lock: Lock, cache: Path, tmp_path: Path, backend: str) -> None:
    project = f'[build-system]\nrequires = ["absent-requirement"]\nbuild-backend = "{backend}"\n'
    members = [
        member(f"{lock.top}/pyproject.toml", project.encode()),
        member(f"{lock.top}/setup.py", b"raise SystemExit('built')"),
    ]
    sha256 = write_archive(tmp_path / "root" / "vendor" / lock.tarball, members)
    assert download_archive(cache, replace(lock, sha256=sha256, backend=backend)).is_file()


def test_a_version_whose_hash_is_not_known(lock: Lock, cache: Path) -> None:
    unknown = replace(lock, sha256="", size=0)
    assert download_archive(cache, unknown, hashed=False) == cache / lock.tarball


# ---- errors ----


def fake_pip(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a script stand in for the Python that runs pip."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys\n{code}\nsys.exit(3)\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_first_and_last_words(
    lock: Lock, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "print(f'word {i}', end='\\n\\n', file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    fake_pip(tmp_path, monkeypatch, f"for i in range(1, 31): {word}")
    with pytest.raises(SourceError) as error:
        download_archive(cache, lock)
    words = [f"word {i}" for i in (1, 2, 3, 4, 5, 6)] + ["..."] + [f"word {i}" for i in range(25, 31)]
    assert str(error.value) == (
        f"pip could not download {lock.tarball} (exit 3):\n"
        + "".join(f"  {word}\n" for word in words)
        + f"\nhint: without a network, put {lock.tarball} into `vendor/` or name it in DRAFTWOOD_SDIST"
    )
    assert names(cache) == []


def test_few_words_are_all_shown() -> None:
    assert first_and_last("a\n\n  b \n") == ["a", "  b"]
    assert first_and_last("\n".join("abcdefghijkl")) == list("abcdefghijkl")
    assert first_and_last("") == ["(pip said nothing)"]


def test_no_index_answers(lock: Lock, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    closed.server_close()
    use_index(monkeypatch, closed)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceError) as error:
        download_archive(cache, lock)
    text = str(error.value)
    assert "Connection refused" in text
    assert f"No matching distribution found for {lock.name}==1.0" in text
    assert (
        f"\n\nhint: without a network, put {lock.tarball} into `vendor/` or name it in DRAFTWOOD_SDIST"
        in text
    )


def test_a_cache_that_cannot_be_made(lock: Lock, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SourceError, match=r"cannot be downloaded to `.*file/cache`: .*\n\nhint: .*DRAFTWOOD_CACHE"
    ):
        download_archive(tmp_path / "file" / "cache", lock)


def test_what_a_killed_run_left(lock: Lock, cache: Path) -> None:
    for name in (".download-old", ".download-new"):
        (cache / name / "tmp").mkdir(parents=True)
    os.utime(cache / ".download-old", (0, 0))
    download_archive(cache, lock)
    assert sorted(names(cache)) == [".download-new", lock.tarball]


# ---- a slow index ----


class Slow(BaseHTTPRequestHandler):
    """A simple index of one archive, which comes in blocks; the attributes of `server` are the test's."""

    def do_GET(self) -> None:
        """Answer with the page or the archive."""
        server = self.server
        page = f"<a href='/files/{server.archive.name}'>{server.archive.name}</a>".encode()
        wanted = self.path.startswith("/files/")
        data = server.archive.read_bytes() if wanted else page
        self.send_response(200)
        self.send_header("Content-Type", "application/gzip" if wanted else "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # an interrupted pip hangs up
            for start in range(0, len(data), BLOCK):
                self.wfile.write(data[start : start + BLOCK])
                if wanted:
                    server.asked.set()
                    server.pace()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def use_index(monkeypatch: pytest.MonkeyPatch, server: ThreadingHTTPServer) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def slow(
    lock: Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ThreadingHTTPServer, Lock]]:
    """An index that gives an archive of a megabyte in a second, and the lock of that archive."""
    project = f'[build-system]\nrequires = []\nbuild-backend = "{lock.backend}"\n'.encode()
    members = [
        member(f"{lock.top}/pyproject.toml", project),
        member(f"{lock.top}/data", os.urandom(BLOCK * BLOCKS)),
    ]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.archive, server.asked, server.end = tmp_path / lock.tarball, threading.Event(), threading.Event()
    server.step = 0.05
    server.pace = lambda: server.end.wait(server.step)  # between two blocks
    sha256 = write_archive(server.archive, members)
    use_index(monkeypatch, server)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server, replace(lock, sha256=sha256, size=server.archive.stat().st_size)
    finally:
        server.end.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_progress(
    slow: tuple[ThreadingHTTPServer, Lock], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, lock = slow
    lines: list[str] = []

    def seen() -> None:
        """Let a busy machine, too, look twice behind each block."""
        n, end = len(lines) + 2, time.monotonic() + 30
        server.end.wait(server.step)
        while len(lines) < n and time.monotonic() < end and not server.end.is_set():
            time.sleep(0.01)

    server.pace = seen
    monkeypatch.setattr(download.Status, "line", lambda _, text: lines.append(text))
    monkeypatch.setattr(download, "POLL_SECONDS", 0.02)
    download_archive(cache, lock)
    assert lines[0] == f"draftwood: downloading {lock.tarball} to {cache}"
    start, total = f"draftwood: {lock.tarball}: ", rf" of {lock.size / 1e6:.1f} MB, \d+:\d\d"
    assert all(line.startswith(start) and re.search(total, line) for line in lines[1:])
    sizes = [float(line.removeprefix(start).split(" of ")[0]) for line in lines[1:]]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 4
    assert sizes[-1] == round(lock.size / 1e6, 1)


def test_a_log_has_one_line_for_a_short_download(
    slow: tuple[ThreadingHTTPServer, Lock], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session of its own there is no terminal."""
    _, lock = slow
    process = start(lock, cache)
    assert process.communicate()[0] == f"draftwood: downloading {lock.tarball} to {cache}\n"
    assert process.returncode == 0


def test_what_is_said(lock: Lock) -> None:
    real = replace(lock, size=80_000_000)
    text = f"draftwood: {lock.tarball}: "
    assert how_far(real, 0, 3) == f"{text}0.0 of 80.0 MB, 0:03"
    assert how_far(real, 20_000_000, 10) == f"{text}20.0 of 80.0 MB, 0:10, 0:30 left"
    assert how_far(real, 80_000_000, 70) == f"{text}80.0 of 80.0 MB, 1:10, checking it"
    assert how_far(replace(lock, size=0), 20_000_000, 10) == f"{text}20.0 MB, 0:10"


def start(lock: Lock, cache: Path) -> subprocess.Popen[str]:
    """Start a download in a process, session and group of its own; its stderr is captured."""
    fields = ", ".join(f"{name}={getattr(lock, name)!r}" for name in Lock.__slots__)
    code = (
        f"import sys; sys.path.insert(0, {str(BUILD)!r})\nfrom pathlib import Path\n"
        "from download import download_archive\nfrom pin import Lock\n"
        f"download_archive(Path({str(cache)!r}), Lock({fields}))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)


@pytest.mark.parametrize("to_all", [True, False], ids=["as Ctrl-C", "the backend alone"])
def test_interrupted(slow: tuple[ThreadingHTTPServer, Lock], cache: Path, to_all: bool) -> None:
    server, lock = slow
    server.step = 60  # it ends because pip is ended, not because pip is done
    process = start(lock, cache)
    assert server.asked.wait(120)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=120)[0]
    assert names(cache) == []
    deadline = time.monotonic() + 60
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(process.pid), "a nested pip is left"


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_folder_that_pip_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is looked up while pip works: what goes away in between is no error."""

    def gone(*_: object) -> Iterator[Path]:
        yield tmp_path / "gone"
        raise FileNotFoundError(tmp_path / "pip-unpack")

    monkeypatch.setattr(Path, "glob", gone)
    assert download._largest(tmp_path) == 0
