"""Apply a series of unified diffs, strictly: every line must stand exactly where the patch says.

Pure Python, because whoever runs `pip install` may have neither git nor patch. One line of context can match
in a second place, so there is no fuzz and no offset; and only existing text files can be changed.
Knows nothing of the pin, of git or of where the tree came from. Entry point: `apply_series`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

REFRESH = "\n\nhint: `make patch-import`, mend the commit in build/patches, then `make patch-export`"
_ONLY = "a patch may only change lines of existing text files"

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = {
    b"new file mode": "adds a file",
    b"deleted file mode": "deletes a file",
    b"old mode": "changes a file mode",
    b"new mode": "changes a file mode",
    b"similarity index": "renames or copies a file",
    b"rename from": "renames a file",
    b"copy from": "copies a file",
    b"GIT binary patch": "changes a binary file",
    b"Binary files": "changes a binary file",
}


class PatchError(RuntimeError):
    """A patch that cannot be read, or that does not fit its tree; the text says where and what to do."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change: `lines` are (mark, text), mark one of b" -+", text with its newline; `start` is from 1."""

    number: int
    start: int
    new_start: int
    lines: tuple[tuple[bytes, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        """The lines that must stand in the old file."""
        return [text for mark, text in self.lines if mark != b"+"]

    @property
    def new(self) -> list[bytes]:
        """The lines that take their place."""
        return [text for mark, text in self.lines if mark != b"-"]

    @property
    def added(self) -> list[bytes]:
        """The lines marked +."""
        return [text for mark, text in self.lines if mark == b"+"]

    @property
    def removed(self) -> list[bytes]:
        """The lines marked -."""
        return [text for mark, text in self.lines if mark == b"-"]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """All changes of one file; `path` is relative to the tree, with forward slashes."""

    path: str
    hunks: tuple[Hunk, ...]


@dataclass(frozen=True, slots=True)
class Patch:
    """A parsed patch file; `header` is the text above the first diff."""

    name: str
    header: str
    files: tuple[FilePatch, ...]


def split_lines(data: bytes) -> list[bytes]:
    """Split bytes after each newline and nowhere else, so that joining gives the same bytes."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def read_series(patches: Path) -> list[str]:
    """List the patch names in `patches/series` in order, without comments.

    Raises PatchError where the file is missing. Test: tests/unit/test_applier.py.
    """
    series = patches / "series"
    if not series.is_file():
        raise PatchError(f"`{series}` is missing, expected the patch names, one a line (it may be empty)")
    lines = (line.split("#", 1)[0].strip() for line in series.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def load_patch(patches: Path, name: str) -> Patch:
    """Read and parse one patch of the queue; raises PatchError where it is missing or cannot be read."""
    path = patches / name
    if not path.is_file():
        raise PatchError(f"patch `{name}` is listed in `series`, but there is no `{path}`{REFRESH}")
    return parse(name, path.read_bytes())


def parse(name: str, data: bytes) -> Patch:
    """Parse the bytes of a patch file.

    Raises PatchError for anything but changes to existing text files, and for a hunk with wrong line counts.
    Test: tests/unit/test_applier.py.
    """
    return _Parser(name, split_lines(data)).patch()


class _Parser:
    def __init__(self, name: str, lines: list[bytes]) -> None:
        self.name = name
        self.lines = lines
        self.at = 0

    def patch(self) -> Patch:
        while not self.starts(b"diff --git ", b"--- "):
            if self.line is None:
                raise self.error("found no diff, expected `diff --git`")
            self.at += 1
        header = b"".join(self.lines[: self.at]).decode("utf-8")
        files: list[FilePatch] = []
        while self.line is not None:
            if self.line.strip():
                files.append(self.file())
                if files[-1].path in {file.path for file in files[:-1]}:
                    raise self.error(f"changes `{files[-1].path}` in two places; join them in one diff")
            else:
                self.at += 1
        return Patch(self.name, header, tuple(files))

    @property
    def line(self) -> bytes | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def starts(self, *prefixes: bytes) -> bool:
        return self.line is not None and self.line.startswith(prefixes)

    def error(self, what: str) -> PatchError:
        line = min(self.at + 1, len(self.lines))
        return PatchError(f"patch `{self.name}`, line {line}: {what}{REFRESH}")

    def file(self) -> FilePatch:
        if not self.starts(b"diff --git ", b"--- "):
            raise self.error(f"expected `diff --git` or `@@`, found {_show(self.line)}")
        while not self.starts(b"--- "):
            for prefix, what in _REFUSED.items():
                if self.starts(prefix):
                    raise self.error(f"{what}; {_ONLY}")
            self.at += 1
            if self.line is None or self.starts(b"diff --git ", b"@@"):
                raise self.error(f"expected `--- a/<file>`, found {_show(self.line)}")
        old = self.path(b"--- ", "a/", "adds a file")
        new = self.path(b"+++ ", "b/", "deletes a file")
        if old != new:
            raise self.error(f"renames `{old}` to `{new}`; {_ONLY}")
        hunks: list[Hunk] = []
        while self.starts(b"@@"):
            hunks.append(self.hunk(len(hunks) + 1))
        if not hunks:
            raise self.error(f"changes nothing in `{old}`: expected `@@`, found {_show(self.line)}")
        return FilePatch(old, tuple(hunks))

    def path(self, mark: bytes, prefix: str, if_null: str) -> str:
        if not self.starts(mark):
            raise self.error(f"expected `{mark.decode()}{prefix}<file>`, found {_show(self.line)}")
        assert self.line is not None
        text = self.line[len(mark) :].split(b"\t")[0].rstrip(b"\r\n").decode("utf-8", "replace")
        if text == "/dev/null":
            raise self.error(f"{if_null}; {_ONLY}")
        path = PurePosixPath(text.removeprefix(prefix))
        unsafe = path.is_absolute() or ".." in path.parts or "\\" in text or ":" in text
        if not text.startswith(prefix) or unsafe or not path.parts:
            raise self.error(f"expected `{prefix}<file inside the tree>`, found `{text}`")
        self.at += 1
        return str(path)

    def hunk(self, number: int) -> Hunk:
        head = self.at
        match = _HUNK.match(self.lines[head])
        if match is None:
            raise self.error(f"hunk {number}: expected `@@ -n,n +n,n @@`, found {_show(self.line)}")
        start, n_old, new_start, n_new = (1 if group is None else int(group) for group in match.groups())
        if n_old == 0:
            raise self.error(f"hunk {number} has no line of context, so nothing holds it in place")
        lines: list[tuple[bytes, bytes]] = []
        self.at += 1
        while n_old > 0 or n_new > 0 or self.starts(b"\\"):
            mark, text = (self.line or b"")[:1], (self.line or b"")[1:]
            if mark == b"\\" and lines:  # "\ No newline at end of file"
                lines[-1] = (lines[-1][0], lines[-1][1].removesuffix(b"\n"))
            elif mark in (b" ", b"-", b"+"):
                lines.append((mark, text))
                n_old -= mark != b"+"
                n_new -= mark != b"-"
            else:
                n_old = -1
            if n_old < 0 or n_new < 0:
                found = _show(self.line)
                raise self.error(f"hunk {number}, at line {head + 1}: its counts do not fit, found {found}")
            self.at += 1
        return Hunk(number, start, new_start, tuple(lines))


def apply_file(name: str, file: FilePatch, data: bytes) -> bytes:
    """Return the new content of one file.

    Args: `name` of the patch, for the error text; `data` the whole old content.
    Raises PatchError naming patch, file, hunk, line, what was expected and what was found.
    Test: tests/unit/test_applier.py.
    """
    lines = split_lines(data)
    out: list[bytes] = []
    taken = 0
    for hunk in file.hunks:
        begin, end = hunk.start - 1, hunk.start - 1 + len(hunk.old)
        out += lines[taken:begin]
        if begin < taken or lines[begin:end] != hunk.old:
            raise PatchError(_misfit(name, file, hunk, lines, overlaps=begin < taken))
        new_start = len(out) + bool(hunk.new)  # by convention the line before, where nothing remains
        if hunk.new_start != new_start:
            raise PatchError(
                f"patch `{name}`, file `{file.path}`, hunk {hunk.number}: its header says that it begins "
                f"at line {hunk.new_start} of the new file, expected {new_start}{REFRESH}"
            )
        out += hunk.new
        taken = end
    return b"".join(out + lines[taken:])


def apply_patch(patch: Patch, tree: Path) -> None:
    """Change the files under `tree`; where a hunk fails, none is written (raises PatchError)."""
    changed: dict[Path, bytes] = {}
    for file in patch.files:
        target = tree / file.path
        if target.is_symlink() or not target.is_file():
            raise PatchError(
                f"patch `{patch.name}` changes `{file.path}`, expected a file there, found "
                f"{'a link' if target.is_symlink() else 'none'}{REFRESH}"
            )
        changed[target] = apply_file(patch.name, file, target.read_bytes())
    for target, data in changed.items():
        target.write_bytes(data)


def apply_series(patches: Path, tree: Path) -> list[str]:
    """Apply every patch of `patches/series` to `tree`, in order, and return their names.

    Stops with a PatchError at the first that fails; the tree is then half patched: give it a temporary one.
    """
    names = read_series(patches)
    for name in names:
        apply_patch(load_patch(patches, name), tree)
    return names


def _show(line: bytes | None) -> str:
    return "the end of the file" if line is None else f"`{line.decode('utf-8', 'replace').rstrip()}`"


def _places(block: list[bytes], lines: list[bytes]) -> Iterator[int]:
    return (at + 1 for at in range(len(lines) - len(block) + 1) if lines[at : at + len(block)] == block)


def _misfit(name: str, file: FilePatch, hunk: Hunk, lines: list[bytes], overlaps: bool) -> str:
    """Word why a hunk does not fit, and guess the reason: already applied, moved, or changed upstream."""
    begin = hunk.start - 1
    where = f"patch `{name}` does not apply: file `{file.path}`, hunk {hunk.number}"
    if overlaps:
        return f"{where}: line {hunk.start} lies inside or before the hunk above it{REFRESH}"
    found = [*lines[begin : begin + len(hunk.old)], *[None] * len(hunk.old)]
    at = next(i for i, (want, have) in enumerate(zip(hunk.old, found, strict=False)) if want != have)
    text = f"{where}, line {hunk.start + at}\n  expected {_show(hunk.old[at])}\n  found    {_show(found[at])}"
    moved = [str(line) for line in _places(hunk.old, lines)]
    if hunk.removed + hunk.added and lines[hunk.new_start - 1 :][: len(hunk.new)] == hunk.new:
        text += "\nIts result already stands there: the patch is applied, or upstream has taken it."
    elif moved:
        text += f"\nThe expected lines stand at line {', '.join(moved)}; an offset is never guessed."
    return f"{text}{REFRESH}"
