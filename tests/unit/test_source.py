"""The source pin: where the archive comes from, what is refused, and that a tree appears whole or not."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import source
from applier import PatchError
from pin import tomllib
from source import SourceError, ensure_source, find_sdist, load_lock, series_hash

from tests.patches.fake_sdist import (
    FILES,
    make_root,
    member,
    patch_text,
    write_archive,
    write_lock,
    write_patch,
)

BUILD = Path(source.__file__).resolve().parent
REPOSITORY = BUILD.parent
TARBALL = "fake_sdist-1.0.tar.gz"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository root of its own, with an empty cache."""
    monkeypatch.delenv("DRAFTWOOD_SDIST", raising=False)
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "dumb")  # no progress line on the terminal of whoever runs the tests
    return make_root(tmp_path)


def trees(root: Path) -> set[str]:
    return {
        path.name for path in (root / "build" / "src").iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)
    }


def run_cli(root: Path, code: str = "", **env: str) -> subprocess.Popen[str]:
    """Start `_build/source.py` of this root, after some lines of code, in a process of its own."""
    if not (root / "_build").exists():
        shutil.copytree(BUILD, root / "_build", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"import sys; sys.path.insert(0, {str(root / '_build')!r})"
    command = f"{path}; import source\n{code}\nsys.exit(source.main())"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", command], env=os.environ | env, text=True, **pipes)


# ---- the lock ----


def test_the_lock_of_this_repository() -> None:
    lock = load_lock(REPOSITORY)
    assert re.fullmatch("[0-9a-f]{64}", lock.sha256)
    assert re.fullmatch("[0-9a-f]{40}", lock.commit)
    assert lock.tarball == f"llama_cpp_python-{lock.version}.tar.gz"
    assert lock.size > 1_000_000


def test_the_lock_describes_the_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = "no pinned archive in DRAFTWOOD_SDIST, vendor/ or the cache"
    monkeypatch.setattr(source, "download_archive", lambda *_: pytest.skip(skip))
    lock = load_lock(REPOSITORY)
    archive = find_sdist(REPOSITORY, lock)
    assert archive.stat().st_size == lock.size
    with tarfile.open(archive) as tar:
        project = tar.extractfile(f"{lock.top}/pyproject.toml")
        assert project is not None
        assert tomllib.loads(project.read().decode())["build-system"]["build-backend"] == lock.backend


def test_the_pin_stands_in_one_place() -> None:
    lock = load_lock(REPOSITORY)
    files = [
        *BUILD.glob("*.py"),
        *REPOSITORY.glob("cmake/*"),
        *REPOSITORY.glob("CMake*"),
        *REPOSITORY.glob("*.toml"),
    ]
    assert len(files) > 4
    for path in files:
        text = path.read_text("utf-8")
        for pin in (lock.sha256, lock.commit[:9], lock.version):
            assert pin not in text, f"{path.name} repeats {pin} of vendor/llama.lock"


def test_a_lock_without_a_field(root: Path) -> None:
    lock = root / "vendor" / "llama.lock"
    lock.write_text(lock.read_text().replace("commit", "comit"))
    with pytest.raises(
        SourceError,
        match="holds name, version, sha256, size, backend, inner, comit, leave_out, expected name, ",
    ):
        load_lock(root)


# ---- the archive ----


def test_order_of_places(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = load_lock(root)
    monkeypatch.setattr(source, "download_archive", lambda *_: pytest.fail("a local copy is there"))
    elsewhere = tmp_path / "elsewhere.tar.gz"
    shutil.copy(root / "vendor" / TARBALL, elsewhere)
    (tmp_path / "cache").mkdir()
    shutil.copy(elsewhere, tmp_path / "cache" / TARBALL)
    monkeypatch.setenv("DRAFTWOOD_SDIST", str(elsewhere))
    assert find_sdist(root, lock) == elsewhere
    monkeypatch.delenv("DRAFTWOOD_SDIST")
    assert find_sdist(root, lock) == root / "vendor" / TARBALL
    (root / "vendor" / TARBALL).unlink()
    assert find_sdist(root, lock) == tmp_path / "cache" / TARBALL


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTWOOD_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert source.cache_dir() == Path("/xdg/draftwood")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert source.cache_dir() == Path.home() / ".cache" / "draftwood"


@pytest.mark.parametrize("damage", ["wrong", "truncated"])
def test_wrong_hash_says_all(root: Path, damage: str) -> None:
    path = root / "vendor" / TARBALL
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "truncated" else data[:-1] + b"x")
    with pytest.raises(SourceError) as error:
        ensure_source(root)
    text = str(error.value)
    lock = load_lock(root)
    for part in (str(path), f"{path.stat().st_size:,} bytes", source.sha256_of(path), lock.sha256):
        assert part in text
    assert f"expected sha256 {lock.sha256} ({lock.size:,} bytes)" in text
    assert "\n\nhint: delete that file and run again" in text
    assert trees(root) == set()


def test_environment_names_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_SDIST", "/nowhere/archive")
    with pytest.raises(
        SourceError, match="DRAFTWOOD_SDIST is `/nowhere/archive`, expected the archive fake_sdist"
    ):
        find_sdist(root, load_lock(root))


def test_download_by_pip(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    index.mkdir()
    shutil.move(root / "vendor" / TARBALL, index / TARBALL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert find_sdist(root, load_lock(root)) == tmp_path / "cache" / TARBALL
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [TARBALL]


def test_download_of_another_file_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    shutil.move(root / "vendor" / TARBALL, index / TARBALL)
    write_lock(root, "0" * 64)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(SourceError, match=f"pip could not download {re.escape(TARBALL)}") as error:
        find_sdist(root, load_lock(root))
    assert "0" * 64 in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_network_and_no_copy(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "vendor" / TARBALL).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(SourceError, match="pip could not download") as error:
        find_sdist(root, load_lock(root))
    assert f"hint: without a network, put {TARBALL} into `vendor/`" in str(error.value)


# ---- unpacking ----


def test_what_is_unpacked(root: Path) -> None:
    before = time.time() - 1
    tree = ensure_source(root)
    files = {str(path.relative_to(tree.path)) for path in tree.path.rglob("*") if path.is_file()}
    kept = {name for name in FILES if ".git" not in name and "docs" not in name}
    assert files == kept | {source.STAMP}
    assert all((tree.path / name).stat().st_mtime >= before for name in kept)
    assert os.access(tree.llama_cpp / "run.sh", os.X_OK)
    assert not os.access(tree.llama_cpp / "src" / "a.cpp", os.X_OK)
    assert tree.path == root / "build" / "src" / "current"
    assert tree.path.resolve().name == tree.hash == series_hash(root, tree.lock)


EVIL = [
    member("fake_sdist-1.0/../evil"),
    member("../evil"),
    member("/tmp/evil"),
    member("evil"),
    member("fake_sdist-1.0/a\\..\\evil"),
    member("fake_sdist-1.0/evil", kind=tarfile.SYMTYPE, link="/etc"),
    member("fake_sdist-1.0/evil", kind=tarfile.LNKTYPE, link="fake_sdist-1.0/PKG-INFO"),
    member("fake_sdist-1.0/evil", kind=tarfile.FIFOTYPE),
    member("fake_sdist-1.0/evil", kind=tarfile.CHRTYPE),
]


@pytest.mark.parametrize("evil", EVIL, ids=[f"{info.name}-{info.type.decode()}" for info, _ in EVIL])
def test_hostile_member_is_refused(root: Path, evil: tuple[tarfile.TarInfo, bytes]) -> None:
    members = [member("fake_sdist-1.0/PKG-INFO", b"x"), evil]
    write_lock(root, write_archive(root / "vendor" / TARBALL, members))
    before = set(root.rglob("*"))
    with pytest.raises(SourceError, match=r"the archive holds `.*evil`"):
        ensure_source(root)
    made = {path.relative_to(root) for path in set(root.rglob("*")) - before}
    assert made == {Path("build"), Path("build/src"), Path("build/src/.lock")}
    assert not (root.parent / "evil").exists()


def test_a_member_twice_is_refused(root: Path) -> None:
    twice = [member("fake_sdist-1.0/a", b"x"), member("fake_sdist-1.0/a", b"y")]
    write_lock(root, write_archive(root / "vendor" / TARBALL, twice))
    with pytest.raises(SourceError, match="cannot be unpacked"):
        ensure_source(root)


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
def test_damaged_archive_with_the_right_hash(root: Path, cut: float) -> None:
    """The hash guards against this; where the pin itself names a broken file, there is still no half tree."""
    path = root / "vendor" / TARBALL
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    write_lock(root, source.sha256_of(path))
    with pytest.raises(SourceError, match=r"cannot be unpacked: .*\n\nhint: delete it"):
        ensure_source(root)
    assert trees(root) == set()


# ---- patches and the folder ----


def test_patched_and_pristine(root: Path) -> None:
    write_patch(root, "a.patch", patch_text())
    pristine, patched = ensure_source(root, pristine=True), ensure_source(root)
    assert pristine.path == root / "build" / "src" / pristine.hash
    assert pristine.hash != patched.hash
    assert "hook_5();" not in (pristine.llama_cpp / "src" / "a.cpp").read_text()
    assert "hook_5();" in (patched.llama_cpp / "src" / "a.cpp").read_text()


def test_hash_follows_pin_and_patches(root: Path) -> None:
    lock = load_lock(root)
    seen = {series_hash(root, lock)}
    assert series_hash(root, lock, pristine=True) in seen
    write_patch(root, "a.patch", patch_text())
    write_patch(root, "b.patch", patch_text("b : other"))
    seen.add(series_hash(root, lock))
    (root / "patches" / "series").write_text("b.patch\na.patch\n")
    seen.add(series_hash(root, lock))
    write_patch(root, "a.patch", patch_text(Why="another"))
    seen.add(series_hash(root, lock))
    write_lock(root, "0" * 64)
    seen.add(series_hash(root, load_lock(root)))
    assert len(seen) == 5
    (root / "patches" / "series").write_text("# a comment\nb.patch\na.patch\n")
    assert series_hash(root, load_lock(root)) in seen


def test_patch_that_does_not_apply_leaves_nothing(root: Path) -> None:
    write_patch(root, "a.patch", patch_text().replace("line_6", "line_7"))
    with pytest.raises(
        PatchError, match=r"patch `a\.patch` does not apply: file `src/a\.cpp`, hunk 1, line 6"
    ):
        ensure_source(root)
    assert [path.name for path in (root / "build" / "src").iterdir()] == [".lock"]
    write_patch(root, "a.patch", patch_text())
    assert "hook_5();" in (ensure_source(root).llama_cpp / "src" / "a.cpp").read_text()


def test_second_call_needs_no_archive(root: Path) -> None:
    first = ensure_source(root)
    (root / "vendor" / TARBALL).unlink()
    before = first.path.resolve().stat().st_mtime_ns
    assert ensure_source(root) == first
    assert first.path.resolve().stat().st_mtime_ns == before


def test_killed_half_way(root: Path) -> None:
    write_patch(root, "a.patch", patch_text())
    kill = "import os, signal; source.apply_series = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    process = run_cli(root, kill)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert list((root / "build" / "src").glob(".part-*")), "the kill came too late to prove anything"
    assert trees(root) == set()
    assert "hook_5();" in (ensure_source(root).llama_cpp / "src" / "a.cpp").read_text()
    assert not list((root / "build" / "src").glob(".part-*"))


def test_four_processes_at_once(root: Path) -> None:
    write_patch(root, "a.patch", patch_text())
    # each says when it unpacks, slowly, so that all four would meet there without the lock
    slow = (
        "import time; real = source.unpack\n"
        "def unpack(*args):\n    print('unpacking', file=sys.stderr); time.sleep(0.5); real(*args)\n"
        "source.unpack = unpack"
    )
    processes = [run_cli(root, slow) for _ in range(4)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert {out.strip() for out, _ in said} == {str(root / "build" / "src" / "current")}
    assert sum("unpacking" in err for _, err in said) == 1


def test_files_keep_their_times_unless_they_change(root: Path) -> None:
    def times() -> tuple[int, int]:
        tree = ensure_source(root)
        a, b = (tree.llama_cpp / "src" / name for name in ("a.cpp", "b.h"))
        return a.stat().st_mtime_ns, b.stat().st_mtime_ns

    plain = times()
    write_patch(root, "a.patch", patch_text())
    patched = times()
    (root / "patches" / "series").write_text("")
    back = times()
    assert plain[0] < patched[0] < back[0], "a build must see the change there and the change back"
    assert plain[1] == patched[1] == back[1], "a build need not compile an unchanged file again"


def test_old_trees_go_but_for_the_newest(root: Path) -> None:
    pristine = ensure_source(root, pristine=True).hash
    hashes = []
    for i in range(4):
        write_patch(root, "a.patch", patch_text(Why=f"reason {i}"))
        hashes.append(ensure_source(root).hash)
    assert trees(root) == {pristine, *hashes[-2:]}
    write_patch(root, "a.patch", patch_text(Why="reason 2"))
    assert ensure_source(root).path.resolve().name == hashes[2]


def test_without_links(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("links are not possible here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    tree = ensure_source(root)
    assert tree.path == root / "build" / "src" / tree.hash
    assert (tree.llama_cpp / "src" / "a.cpp").is_file()


def test_current_that_became_a_folder(root: Path) -> None:
    current = ensure_source(root).path
    target = current.resolve()
    current.unlink()
    shutil.copytree(target, current)
    assert ensure_source(root).path.is_symlink()


# ---- the command ----


def test_command_prints_the_path_alone(root: Path) -> None:
    process = run_cli(root)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, f"{root}/build/src/current\n", "")


def test_command_says_what_is_wrong(root: Path) -> None:
    process = run_cli(root, DRAFTWOOD_SDIST="/nowhere")
    out, err = process.communicate()
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: DRAFTWOOD_SDIST is `/nowhere`")
    assert "Traceback" not in err
