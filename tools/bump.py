"""Try the patch queue on another version of llama-cpp-python, and move the pin there.

    python tools/bump.py 0.3.37            # download, try every patch, report; changes nothing
    python tools/bump.py 0.3.37 --write    # also moves vendor/llama.lock, and the queue in build/patches

Each patch is tried twice: by the strict applier, as a build would, and by git's 3-way merge, which tells a
patch that only moved from one that needs a person. A clean merge is no proof: read it, build, run the tests.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from _paths import ROOT
from applier import Patch, PatchError, apply_file, load_patch, read_series
from download import download_archive
from source import (
    Lock,
    SourceError,
    cache_dir,
    ensure_source,
    find_sdist,
    load_lock,
    sha256_of,
    unpack,
)

from patches import BASE, commit_patch, export_queue, git, import_queue, start_repository

MOVED = ("version", "sha256", "size", "backend", "commit")  # what differs between two versions' locks
MAX_CONFLICT_LINES = 40  # of a conflict's text in the report


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one patch: clean, moved, taken or conflict, and why."""

    name: str
    kind: str
    detail: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kind:8} {self.name}", *(f"         {line}" for line in self.detail.splitlines())]
        return "\n".join(lines)


# ---- the new version ----


def fetch(root: Path, old: Lock, version: str) -> Path:
    """Return the archive of `version` from the places of `find_sdist`, else let pip download it.

    Its hash is not known yet: pip has compared it with the index's, and the new lock records it for all.
    """
    if version == old.version:
        return find_sdist(root, old)
    new = replace(old, version=version, sha256="", size=0)
    for folder in (root / "vendor", cache_dir()):
        if (folder / new.tarball).is_file():
            return folder / new.tarball
    return download_archive(cache_dir(), new, hashed=False)


def text_in(archive: Path, name: str) -> str:
    """Return the text of one member of the archive, empty where it is not there."""
    with tarfile.open(archive) as tar:
        try:
            file = tar.extractfile(name)
        except KeyError:
            return ""
        return file.read().decode() if file else ""


def commit_in(archive: Path, lock: Lock) -> str:
    """Read the llama.cpp commit from the submodule's HEAD in the archive, or raise SourceError."""
    name = f"{lock.top}/.git/modules/{lock.inner}/HEAD"
    head = text_in(archive, name).strip() or "nothing"
    if not re.fullmatch(r"[0-9a-f]{40}", head):
        raise SourceError(
            f"{archive.name} does not tell its llama.cpp commit: expected 40 hex digits in "
            f"`{name}`, found {head}\n\nhint: pass it with `--commit`"
        )
    return head


def backend_in(archive: Path, lock: Lock) -> str:
    """Read the build backend from the archive's pyproject.toml; that of `lock` where it names none."""
    text = text_in(archive, f"{lock.top}/pyproject.toml")
    found = re.search(r"""^build-backend *= *["']([^"']+)["']""", text, re.MULTILINE)
    return found[1] if found else lock.backend


def lock_text(text: str, new: Lock) -> str:
    """Return the text of the lock with the new values of MOVED, all else as it was."""
    for name in MOVED:
        value = getattr(new, name)
        value = value if isinstance(value, int) else f'"{value}"'
        text = re.sub(rf"^{name} = .*", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


# ---- the queue on it ----


def rebase_base(work: Path, tree: Path) -> list[str]:
    """In a repository that `import` made, put `tree` in place of the source; returns the patch commits.

    HEAD is then the new pristine source, a child of the old one, so that cherry-pick merges three ways.
    """
    commits = git(work, "rev-list", "--reverse", f"{BASE}..HEAD").split()
    git(work, "checkout", "--quiet", "-B", "patches", BASE)
    for path in work.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(tree, work, dirs_exist_ok=True)
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "--allow-empty", "--message=pristine source")
    git(work, "tag", "--force", BASE)
    return commits


def misfit(patch: Patch, work: Path) -> str:
    """Return the strict applier's complaint, without its hint; empty where the patch applies."""
    try:
        for file in patch.files:
            if not (work / file.path).is_file():
                return f"`{file.path}` is gone"
            apply_file(patch.name, file, (work / file.path).read_bytes())
    except PatchError as error:
        return str(error).split("\n\nhint:")[0]
    return ""


def try_patch(work: Path, patch: Patch, commit: str) -> Verdict:
    """Cherry-pick one patch onto HEAD; on a conflict HEAD stays as it was."""
    complaint = misfit(patch, work)
    git(work, "cherry-pick", commit, check=False)
    unmerged = git(work, "diff", "--name-only", "--diff-filter=U").split()
    if not unmerged and git(work, "log", "-1", "--format=%s") == git(
        work, "log", "-1", "--format=%s", commit
    ):
        return Verdict(patch.name, "moved" if complaint else "clean", complaint)
    text = "\n".join(git(work, "diff").splitlines()[:MAX_CONFLICT_LINES])
    git(work, "cherry-pick", "--abort", check=False)
    git(work, "reset", "--quiet", "--hard")
    if not unmerged:
        return Verdict(patch.name, "taken", "the new source already holds this change: drop the patch")
    return Verdict(
        patch.name, "conflict", f"{complaint}\n3-way merge conflicts in {', '.join(unmerged)}:\n{text}"
    )


def try_queue(root: Path, tree: Path) -> list[Verdict]:
    """Try every patch, in order, on the llama.cpp at `tree`; one that conflicts is left out for the rest."""
    patches = [load_patch(root / "patches", name) for name in read_series(root / "patches")]
    with tempfile.TemporaryDirectory(prefix="draftwood-bump-") as folder:
        work = Path(folder) / "work"
        new = Path(folder) / "new"
        pristine = ensure_source(root, pristine=True).llama_cpp
        for path in sorted({file.path for patch in patches for file in patch.files}):
            for source, target in ((pristine / path, work / path), (tree / path, new / path)):
                target.parent.mkdir(parents=True, exist_ok=True)
                if source.is_file():
                    shutil.copyfile(source, target)
        (work / "README").write_text("the files that the queue touches\n", "utf-8")
        start_repository(work)
        for patch in patches:
            commit_patch(work, patch)
        commits = rebase_base(work, new)
        return [try_patch(work, patch, commit) for patch, commit in zip(patches, commits, strict=True)]


def move(root: Path, new: Lock, tree: Path, verdicts: list[Verdict]) -> str:
    """Move build/patches and the lock to the new version, and export the queue where nothing conflicts."""
    work = root / "build" / "patches"
    import_queue(root, work, force=False)
    commits = rebase_base(work, tree)
    lock = root / "vendor" / "llama.lock"
    lock.write_text(lock_text(lock.read_text("utf-8"), new), "utf-8")
    picks = [commit for commit, verdict in zip(commits, verdicts, strict=True) if verdict.kind != "taken"]
    if picks:
        git(work, "cherry-pick", *picks, check=False)
    if any((work / ".git" / name).exists() for name in ("CHERRY_PICK_HEAD", "sequencer")):
        return (
            f"`{lock}` is moved; a conflict waits in `{work}`\n\n"
            f"hint: resolve it there, `git cherry-pick --continue`, then `make patch-export patch-check`"
        )
    export_queue(root, work)
    return (
        f"`{lock}` and patches/ are moved; read the diff, re-check every `Drop-when`, build and run the tests"
    )


def bump(root: Path, version: str, write: bool, commit: str | None) -> int:
    """Report on one version and, if asked, move there; returns 1 where a patch conflicts."""
    old = load_lock(root)
    archive = fetch(root, old, version)
    new = replace(old, version=version, sha256=sha256_of(archive), size=archive.stat().st_size)
    new = replace(new, commit=commit or commit_in(archive, new), backend=backend_in(archive, new))
    for name in MOVED:
        before, after = getattr(old, name), getattr(new, name)
        print(f"{name:8} {after}" + ("" if before == after else f"  (was {before})"))
    (root / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root / "build", prefix=".bump-") as folder:
        unpack(archive, new, Path(folder))
        tree = Path(folder) / new.inner
        verdicts = try_queue(root, tree)
        for verdict in verdicts:
            print(verdict)
        if write and new == old:
            print("nothing to move: this is the pin")
        elif write:
            print(move(root, new, tree, verdicts))
    return 1 if any(verdict.kind == "conflict" for verdict in verdicts) else 0


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("version", help="a version of llama-cpp-python")
    parser.add_argument("--write", action="store_true", help="move the lock and the queue")
    parser.add_argument("--commit", help="the llama.cpp commit, where the archive does not tell")
    args = parser.parse_args(argv)
    try:
        return bump(root, args.version, args.write, args.commit)
    except (PatchError, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
