"""Work on the patch queue: import it as commits, export them back, check the queue, show it.

    python tools/patches.py import    # build/patches: a git repository, pristine source, one commit a patch
    python tools/patches.py export    # those commits back to patches/, with the series and the README's table
    python tools/patches.py check     # rules, budget, applies at zero fuzz, re-export gives the same bytes
    python tools/patches.py stats     # the table; --readme writes it to patches/README.md

The rules stand in patch_queue.py. Trap: git inside a folder that lies in another repository acts on that one
(`git apply` does nothing there and reports success), so every git call here is told where to stop looking.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _paths import ROOT
from applier import Patch, PatchError, apply_patch, load_patch, read_series
from patch_queue import (
    Entry,
    budget_line,
    called_hooks,
    file_name,
    header_text,
    lint_budget,
    lint_hooks,
    lint_listing,
    lint_patch,
    load_entry,
    pin,
    readme_with,
    table,
)
from source import Lock, SourceError, ensure_source, load_lock

BASE = "pristine"  # tag: the source below the first patch
SAVED = "saved"  # tag: the last commit that patches/ is known to hold
# fmt: off
DIFF = (
    "diff-tree", "-p", "-U1", "--no-commit-id", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--no-color", "--diff-algorithm=myers", "--indent-heuristic", "--inter-hunk-context=0",
    "--src-prefix=a/", "--dst-prefix=b/",
)
GIT = (
    "git", "-c", "core.autocrlf=false", "-c", "core.quotePath=false",
    "-c", f"core.attributesFile={os.devnull}",
)
# fmt: on


# ---- git ----


def git(work: Path, *args: str, stdin: str | None = None, check: bool = True) -> str:
    """Run git on the repository at `work` and on no other, without the user's settings; returns its output.

    Raises PatchError with git's words where it fails and `check` is set, and where git is not installed.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    env["GIT_CEILING_DIRECTORIES"] = str(work.parent)
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "draftwood", f"GIT_{who}_EMAIL": "patches@invalid"}
    command = [*GIT, "-C", str(work), *args]
    try:
        # bytes, not text: universal newlines would hide a carriage return in a source line
        run = subprocess.run(command, env=env, input=(stdin or "").encode(), capture_output=True, check=False)
    except FileNotFoundError as error:
        raise PatchError("git is not installed; building needs none, working on patches does") from error
    if check and run.returncode != 0:
        words = (run.stderr + run.stdout).decode("utf-8", "replace").strip()
        raise PatchError(f"`git {' '.join(args)}` failed in {work}:\n{words}")
    return run.stdout.decode("utf-8", "surrogateescape")


def start_repository(work: Path) -> None:
    """Commit everything in `work` as the pristine source, in a repository of its own."""
    git(work, "init", "--quiet", "--initial-branch=patches")
    git(work, "config", "gc.auto", "0")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "--message=pristine source")
    git(work, "tag", BASE)
    git(work, "tag", SAVED)


def commit_patch(work: Path, patch: Patch) -> None:
    """Apply a patch strictly and commit it, its header as the message."""
    subject, _, rest = header_text(patch).partition("\n")
    apply_patch(patch, work)
    message = subject.removeprefix("Subject:").strip() + "\n\n" + rest
    git(work, "commit", "--quiet", "--all", "--cleanup=verbatim", "--file=-", stdin=message)
    git(work, "tag", "--force", SAVED)


def exported(work: Path, lock: Lock) -> dict[str, bytes]:
    """Return file name -> bytes for every commit above the pristine source, in order.

    The text depends on the commits and the pin alone: no hashes, no dates, one line of context.
    """
    queue: dict[str, bytes] = {}
    for commit in git(work, "rev-list", "--reverse", f"{BASE}..HEAD").split():
        subject, _, body = git(work, "log", "-1", "--format=%B", commit).strip("\n").partition("\n")
        name = file_name(subject)
        if name in queue:
            raise PatchError(f"two commits have the subject `{subject}`; squash them or reword one")
        checked = f"Checked-at: {pin(lock)}"
        body, n_found = re.subn(r"^Checked-at:.*$", checked, body.strip("\n"), flags=re.MULTILINE)
        body = body if n_found else f"{body}\n{checked}"
        diff = git(work, *DIFF, commit)
        diff = re.sub(r"^diff --git [^\n]*\n(?:index [^\n]*\n)?(?=--- a/)", "", diff, flags=re.MULTILINE)
        text = f"Subject: {subject}\n{body}\n---\n{diff}"
        queue[name] = text.encode("utf-8", "surrogateescape")
    return queue


# ---- commands ----


def import_queue(root: Path, work: Path, force: bool) -> str:
    """Make `work` a fresh repository with the pristine source and one commit a patch; returns what was done.

    Raises PatchError where `work` holds changes that are not in patches/ (unless forced), and where a patch
    does not apply; the patches before it are then in the repository, so that it can be mended there.
    """
    lock = load_lock(root)
    if (work / ".git").is_dir() and not force and (unsaved := unsaved_work(work)):
        raise PatchError(
            f"`{work}` holds {unsaved} that patches/ does not\n\n"
            "hint: `make patch-export` keeps it; `python tools/patches.py import --force` throws it away"
        )
    shutil.rmtree(work, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ensure_source(root, pristine=True).llama_cpp, work)
    start_repository(work)
    names = read_series(root / "patches")
    for name in names:
        commit_patch(work, load_patch(root / "patches", name))
    return f"{work}: the pristine source {pin(lock)} and {len(names)} patches, one commit each"


def unsaved_work(work: Path) -> str:
    """Say what in `work` would be lost by a fresh import; empty where nothing would."""
    if git(work, "status", "--porcelain").strip():
        return "uncommitted changes"
    return "" if git(work, "rev-parse", "HEAD") == git(work, "rev-parse", SAVED) else "commits"


def same_file(path: Path, data: bytes) -> bool:
    """Tell whether a file is there with exactly these bytes."""
    return path.is_file() and path.read_bytes() == data


def export_queue(root: Path, work: Path) -> str:
    """Write the commits of `work` to patches/, with series and table; returns what was done."""
    if not (work / ".git").is_dir():
        raise PatchError(f"`{work}` is not there; `make patch-import` makes it")
    if git(work, "status", "--porcelain").strip():
        raise PatchError(f"`{work}` holds uncommitted changes; commit them first")
    patches = root / "patches"
    queue = exported(work, load_lock(root))
    for name in read_series(patches):
        if name not in queue:
            (patches / name).unlink(missing_ok=True)
    for name, data in queue.items():
        (patches / name).write_bytes(data)
    series = patches / "series"
    series.write_text(series_text(series.read_text("utf-8"), list(queue)), "utf-8")
    write_readme(root)
    git(work, "tag", "--force", SAVED)
    return f"{patches}: {len(queue)} patches written"


def series_text(old: str, names: list[str]) -> str:
    """Return `series` for these names; comments stay at the head, or above the name that they stood above."""
    above: dict[str, list[str]] = {}
    comments: list[str] = []
    head: list[str] | None = None
    for line in old.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            if head is None:
                head, comments = comments, []
            above[line.split("#", 1)[0].strip()] = comments
            comments = []
        else:
            comments.append(line)
    lines = list(head if head is not None else comments)
    for name in names:
        lines += [*above.get(name, []), name]
    return "\n".join(lines) + "\n"


def write_readme(root: Path) -> None:
    """Refresh the table in patches/README.md."""
    readme = root / "patches" / "README.md"
    entries = [load_entry(root / "patches", name) for name in read_series(root / "patches")]
    readme.write_text(readme_with(readme.read_text("utf-8"), entries), "utf-8")


def check(root: Path) -> tuple[list[str], list[str]]:
    """Check the whole queue; returns (problems, remarks), no problem meaning that it is in order."""
    patches, lock = root / "patches", load_lock(root)
    problems = list(lint_listing(patches))
    if problems:
        return problems, []
    entries: list[Entry] = []
    remarks: list[str] = []
    pristine = ensure_source(root, pristine=True).llama_cpp
    files: dict[str, bytes] = {}
    for name in read_series(patches):
        try:
            entry = load_entry(patches, name)
            for path in entry.files:
                if not (pristine / path).is_file():
                    raise PatchError(f"patch `{name}` changes `{path}`, which the pin does not hold")
                files.setdefault(path, (pristine / path).read_bytes())
            problems += lint_patch(entry, files, lock)
        except PatchError as error:
            # what comes after may build on it: its findings would only be noise
            return [*problems, str(error)], remarks
        entries.append(entry)
    problems += lint_budget(entries)
    problems += lint_hooks(entries, root / "src" / "hooks" / "hooks.h")
    if not any(called_hooks(entry.patch) for entry in entries):
        remarks.append("no patch calls a hook, so hook names were not checked")
    problems += check_round_trip(patches, pristine, entries, lock)
    readme = (patches / "README.md").read_text("utf-8")
    if readme_with(readme, entries) != readme:
        problems.append("the table in patches/README.md is stale (python tools/patches.py stats --readme)")
    remarks.append(budget_line(entries))
    return problems, remarks


def check_round_trip(patches: Path, pristine: Path, entries: list[Entry], lock: Lock) -> list[str]:
    """Import into a throw-away repository that holds only the touched files, export, compare the bytes."""
    if not entries:
        return []
    with tempfile.TemporaryDirectory(prefix="draftwood-patches-") as folder:
        work = Path(folder) / "work"
        for path in sorted({path for entry in entries for path in entry.files}):
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(pristine / path, work / path)
        start_repository(work)
        for entry in entries:
            commit_patch(work, entry.patch)
        queue = exported(work, lock)
    problems = []
    for entry in entries:
        data = queue.get(entry.patch.name)
        if data is not None and not same_file(patches / entry.patch.name, data):
            line = first_difference(data, (patches / entry.patch.name).read_bytes())
            problems.append(f"`{entry.patch.name}`: re-export differs {line} (make patch-export)")
    return problems


def first_difference(want: bytes, have: bytes) -> str:
    """Say where two texts part: line number, expected, found."""
    pairs = list(zip(want.split(b"\n"), have.split(b"\n"), strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return f"in length: expected {len(want)} bytes, found {len(have)}"
    return f"at line {at + 1}: expected `{pairs[at][0].decode()}`, found `{pairs[at][1].decode()}`"


def run(args: argparse.Namespace, root: Path) -> int:
    """Run one command; returns the exit status."""
    work = root / "build" / "patches"
    if args.command == "import":
        print(import_queue(root, work, args.force))
    elif args.command == "export":
        print(export_queue(root, work))
    elif args.command == "check":
        problems, remarks = check(root)
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        print("\n".join([*remarks, f"patch queue: {len(problems) or 'no'} problems"]))
        return 1 if problems else 0
    elif args.readme:
        write_readme(root)
    else:
        print(table([load_entry(root / "patches", name) for name in read_series(root / "patches")]))
    return 0


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import", help="make build/patches, one commit a patch")
    importing.add_argument("--force", action="store_true", help="throw away what build/patches holds")
    commands.add_parser("export", help="write the commits of build/patches to patches/")
    commands.add_parser("check", help="check the queue")
    stats = commands.add_parser("stats", help="print the table of patches")
    stats.add_argument("--readme", action="store_true", help="write it to patches/README.md")
    try:
        return run(parser.parse_args(argv), root)
    except (PatchError, SourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
