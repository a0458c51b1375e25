"""Working on patches: import, edit, export, move the pin; no work is lost, no other repository touched."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import bump
import pytest
from applier import PatchError
from source import ensure_source, load_lock, sha256_of

from patches import check, export_queue, git, import_queue, main, write_readme
from tests.patches.fake_sdist import (
    BACKEND,
    COMMIT,
    CPP,
    HOOK_5,
    make_root,
    member,
    patch_text,
    write_archive,
    write_patch,
    write_sdist,
)

NAME = "a-hook-after-line-5.patch"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with one good patch, inside a git repository of somebody else."""
    monkeypatch.delenv("DRAFTWOOD_SDIST", raising=False)
    monkeypatch.setenv("DRAFTWOOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "dumb")  # no progress line on the terminal of whoever runs the tests
    git(tmp_path, "init", "--quiet")
    root = make_root(tmp_path)
    write_patch(root, NAME, patch_text())
    write_readme(root)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message=the outer repository")
    return root


@pytest.fixture
def work(root: Path) -> Path:
    return root / "build" / "patches"


def queue_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "patches").iterdir())}


def commit_edit(work: Path, old: str, new: str, message: str) -> None:
    path = work / "src" / "a.cpp"
    path.write_text(path.read_text().replace(old, new))
    git(work, "commit", "--quiet", "--all", "--file=-", stdin=message)


def message(subject: str) -> str:
    """Write a commit message that keeps the rules."""
    title, rest = patch_text(subject, diff="").split("\n", 1)
    return title.removeprefix("Subject: ") + "\n\n" + rest.removesuffix("---\n")


# ---- import and export ----


def test_import_export_changes_nothing(root: Path, work: Path) -> None:
    before = queue_bytes(root)
    assert main(["import"], root) == 0
    assert "hook_5();" in (work / "src" / "a.cpp").read_text()
    assert git(work, "log", "--format=%s").splitlines() == ["a : hook after line 5", "pristine source"]
    assert main(["export"], root) == 0
    assert queue_bytes(root) == before
    assert main(["check"], root) == 0


def test_the_outer_repository_is_left_alone(root: Path, work: Path) -> None:
    """In a folder of another repository git takes that one for its own, and `git apply` does nothing."""
    outer = root.parent
    (outer / "hook.diff").write_text("diff --git a/src/a.cpp b/src/a.cpp\n" + HOOK_5)
    tree = ensure_source(root, pristine=True).llama_cpp
    (outer / ".gitignore").write_text("root/build/\nhook.diff\n.gitignore\n")
    git_apply = ["git", "apply", str(outer / "hook.diff")]
    assert subprocess.run(git_apply, cwd=tree, check=False).returncode == 0
    assert "hook_5();" not in (tree / "src" / "a.cpp").read_text(), "this git has no such trap any more"
    import_queue(root, work, force=False)
    export_queue(root, work)
    assert "hook_5();" in (work / "src" / "a.cpp").read_text()
    assert git(outer, "log", "--format=%s").split("\n")[0] == "the outer repository"
    assert git(outer, "status", "--porcelain") == ""
    assert git(outer, "tag") == ""


def test_git_never_takes_the_outer_repository(root: Path, work: Path) -> None:
    work.mkdir(parents=True)
    with pytest.raises(PatchError, match="not a git repository"):
        git(work, "status")


def test_new_patch_and_new_order(root: Path, work: Path) -> None:
    import_queue(root, work, force=False)
    commit_edit(work, "int line_8;\n", "int line_8;\nhook_8();\n", message("a : hook after line 8"))
    export_queue(root, work)
    assert (root / "patches" / "series").read_text() == f"# hooks\n{NAME}\na-hook-after-line-8.patch\n"
    assert check(root)[0] == []
    assert b"@@ -9,2 +9,3 @@ int line_7;\n" in (root / "patches" / "a-hook-after-line-8.patch").read_bytes()
    assert "hook_8();" in (ensure_source(root).llama_cpp / "src" / "a.cpp").read_text()


def test_reworded_patch_is_renamed(root: Path, work: Path) -> None:
    import_queue(root, work, force=False)
    git(work, "commit", "--quiet", "--amend", "--file=-", stdin=message("a : another name"))
    export_queue(root, work)
    assert sorted(queue_bytes(root)) == ["README.md", "a-another-name.patch", "series"]
    assert check(root)[0] == []


def test_export_writes_the_pin(root: Path, work: Path) -> None:
    write_patch(root, NAME, patch_text(Checked_at="fedcba987"))
    import_queue(root, work, force=False)
    export_queue(root, work)
    assert f"Checked-at: {COMMIT[:9]}\n" in (root / "patches" / NAME).read_text()


def test_export_adds_the_pin(root: Path, work: Path) -> None:
    """A new commit's author does not know the pin's name, so a missing `Checked-at` is written."""
    import_queue(root, work, force=False)
    unpinned = message("a : hook after line 8").replace(f"Checked-at: {COMMIT[:9]}\n", "")
    commit_edit(work, "int line_8;\n", "int line_8;\nhook_8();\n", unpinned)
    export_queue(root, work)
    header = (root / "patches" / "a-hook-after-line-8.patch").read_text().split("---\n")[0]
    assert header.count("Checked-at:") == 1
    assert header.endswith(f"Checked-at: {COMMIT[:9]}\n")
    assert check(root)[0] == []


def test_two_commits_of_one_name(root: Path, work: Path) -> None:
    import_queue(root, work, force=False)
    commit_edit(work, "int line_8;\n", "int line_8;\nhook_8();\n", message("a : hook, after line 5"))
    with pytest.raises(PatchError, match="two commits have the subject"):
        export_queue(root, work)


def test_work_is_not_thrown_away(root: Path, work: Path) -> None:
    import_queue(root, work, force=False)
    (work / "src" / "a.cpp").write_text("edited\n")
    with pytest.raises(PatchError, match="holds uncommitted changes that patches/ does not"):
        import_queue(root, work, force=False)
    with pytest.raises(PatchError, match="holds uncommitted changes; commit them first"):
        export_queue(root, work)
    git(work, "commit", "--quiet", "--all", "--message=work")
    with pytest.raises(PatchError, match="holds commits that patches/ does not"):
        import_queue(root, work, force=False)
    import_queue(root, work, force=True)
    assert "hook_5();" in (work / "src" / "a.cpp").read_text()
    import_queue(root, work, force=False)


def test_import_stops_at_a_bad_patch(root: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_patch(root, "bad.patch", patch_text("a : bad"))
    assert main(["import"], root) == 1
    assert "patch `bad.patch` does not apply: file `src/a.cpp`, hunk 1, line 6" in capsys.readouterr().err
    assert git(work, "log", "-1", "--format=%s").strip() == "a : hook after line 5"


def test_export_without_import(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export"], root) == 1
    assert "is not there; `make patch-import` makes it" in capsys.readouterr().err


def test_without_git(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["import"], root) == 1
    assert "git is not installed; building needs none" in capsys.readouterr().err
    assert "hook_5();" in (ensure_source(root).llama_cpp / "src" / "a.cpp").read_text()


def test_git_settings_do_not_show(root: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = root.parent / "gitconfig"
    config.write_text(
        "[diff]\n noprefix = true\n context = 9\n algorithm = patience\n[core]\n autocrlf = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(root.parent / ".git"))
    before = queue_bytes(root)
    import_queue(root, work, force=False)
    export_queue(root, work)
    assert queue_bytes(root) == before


# ---- bump ----


def new_version(root: Path, text: str) -> None:
    """Put version 1.1, with this src/a.cpp, where a download would have put it."""
    write_sdist(root.parent / "cache", "1.1", a=text)


def test_bump_to_the_pin_is_a_check(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (root / "vendor" / "llama.lock").read_bytes()
    assert bump.main(["1.0", "--write"], root) == 0
    said = capsys.readouterr().out
    assert f"clean    {NAME}" in said
    assert "nothing to move: this is the pin" in said
    assert (root / "vendor" / "llama.lock").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        (CPP + "int line_11;\n", "clean", ""),
        ("// new head\n" + CPP, "moved", "The expected lines stand at line 6; an offset is never guessed."),
        (
            CPP.replace("line_5;\n", "line_5;\nhook_5();\n"),
            "taken",
            "the new source already holds this change",
        ),
        (CPP.replace("line_5", "other_5").replace("line_6", "other_6"), "conflict", "+int other_5;"),
    ],
)
def test_bump_reports(
    root: Path, text: str, kind: str, detail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = queue_bytes(root), (root / "vendor" / "llama.lock").read_bytes()
    new_version(root, text)
    assert bump.main(["1.1"], root) == (1 if kind == "conflict" else 0)
    said = capsys.readouterr().out
    assert "version  1.1  (was 1.0)" in said
    assert f"{kind:8} {NAME}" in said
    assert detail in said
    assert (queue_bytes(root), (root / "vendor" / "llama.lock").read_bytes()) == before


def test_bump_of_a_file_that_is_gone(root: Path) -> None:
    tree = root.parent / "empty"
    tree.mkdir()
    (verdict,) = bump.try_queue(root, tree)
    assert verdict.kind == "conflict"
    assert "`src/a.cpp` is gone" in verdict.detail


def test_bump_moves_lock_and_queue(root: Path) -> None:
    new_version(root, "// new head\n" + CPP)
    assert bump.main(["1.1", "--write"], root) == 0
    lock, archive = load_lock(root), root.parent / "cache" / "fake_sdist-1.1.tar.gz"
    assert (lock.version, lock.sha256, lock.size) == ("1.1", sha256_of(archive), archive.stat().st_size)
    assert (root / "vendor" / "llama.lock").read_text().startswith("# the pin\n")
    assert "@@ -6,2 +6,3 @@" in (root / "patches" / NAME).read_text()
    assert check(root)[0] == []
    assert (ensure_source(root).llama_cpp / "src" / "a.cpp").read_text().startswith("// new head\n")


def test_bump_downloads_the_version(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive, sha256 = write_sdist(root.parent / "index", "1.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(archive.parent))
    assert bump.main(["1.1"], root) == 0
    said = capsys.readouterr().out
    assert f"sha256   {sha256}  (was " in said
    assert f"size     {archive.stat().st_size}" in said
    assert (root.parent / "cache" / archive.name).read_bytes() == archive.read_bytes()


@pytest.mark.parametrize(
    ("project", "found"),
    [
        ('[build-system]\nbuild-backend = "other.build"\n', "other.build"),
        ("[build-system]\nrequires = []\nbuild-backend='other'\n", "other"),
        ("[project]\n", BACKEND),
    ],
)
def test_bump_finds_the_backend(root: Path, project: str, found: str) -> None:
    lock = load_lock(root)
    archive = root.parent / "a.tar.gz"
    write_archive(archive, [member(f"{lock.top}/pyproject.toml", project.encode())])
    new = replace(lock, backend=bump.backend_in(archive, lock))
    assert new.backend == found
    path = root / "vendor" / "llama.lock"
    path.write_text(bump.lock_text(path.read_text(), new))
    assert load_lock(root) == new


def test_bump_with_a_conflict_waits_for_a_person(
    root: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_version(root, CPP.replace("line_6", "other_6"))
    before = queue_bytes(root)
    assert bump.main(["1.1", "--write"], root) == 1
    assert "a conflict waits in" in capsys.readouterr().out
    assert queue_bytes(root) == before
    (work / "src" / "a.cpp").write_text(
        CPP.replace("line_5;\nint line_6;", "line_5;\nhook_5();\nint other_6;")
    )
    git(work, "add", "--all")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    assert main(["export"], root) == 0
    assert check(root)[0] == []


def test_bump_keeps_unsaved_work(root: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_queue(root, work, force=False)
    commit_edit(work, "int line_8;\n", "int line_8;\nhook_8();\n", message("a : hook after line 8"))
    new_version(root, "// new head\n" + CPP)
    assert bump.main(["1.1", "--write"], root) == 1
    assert "holds commits that patches/ does not" in capsys.readouterr().err
    assert load_lock(root).version == "1.0"


def test_bump_needs_the_commit(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_archive(tmp_path / "cache" / "fake_sdist-1.1.tar.gz", [member("fake_sdist-1.1/PKG-INFO", b"x")])
    assert bump.main(["1.1"], root) == 1
    assert "does not tell its llama.cpp commit: expected 40 hex digits" in capsys.readouterr().err


def test_bump_to_a_version_that_is_not_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    shutil.rmtree(root.parent / "cache", ignore_errors=True)
    assert bump.main(["9.9"], root) == 1
    assert "pip could not download fake_sdist-9.9.tar.gz" in capsys.readouterr().err
