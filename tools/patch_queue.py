"""The patch queue as data: headers, names, the summary table, and the rules that a patch must keep.

A patch adds call sites and nothing else (patches/README.md). Every rule looks at the parsed patch and at the
files before and after it; nothing here runs git, nothing writes. Used by tools/patches.py and tools/bump.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import _paths  # noqa: F401
from applier import FilePatch, Hunk, Patch, PatchError, apply_file, load_patch, read_series
from source import Lock

FIELDS = ("Subject", "Why", "Class", "Drop-when", "Checked-at")
CLASSES = ("hook", "build", "backport", "fix")
MAX_PATCHES = 10
MAX_ADDED = 150  # for the server's files and for all others, each
SERVER = ("tools/server/*", "common/*")
PUBLIC_HEADERS = ("include/*", "ggml/include/*", "tools/mtmd/mtmd*.h")
C_SUFFIXES = (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".m", ".mm")
TABLE_BEGIN, TABLE_END = "<!-- table: begin -->", "<!-- table: end -->"

_FIELD = re.compile(r"^([A-Z][A-Za-z-]*):[ \t]*(.*)$")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENUM = re.compile(r"\benum\b([^;{}()]*)\{([^{}]*)\}")
_PUBLIC_STRUCT = re.compile(r"\bstruct\s+(llama_\w+_params)\s*\{([^{}]*)\}")
_HOOK = re.compile(rb"\bdw_hook_\w+(?=\s*\()")


@dataclass(frozen=True, slots=True)
class Entry:
    """A patch of the queue with its header fields and line counts."""

    patch: Patch
    fields: dict[str, str]
    added: int
    added_server: int
    removed: int

    @property
    def files(self) -> list[str]:
        """The paths that it changes."""
        return [file.path for file in self.patch.files]


def file_name(subject: str) -> str:
    """Derive a patch's file name from its subject: lower case, all else than letters and digits one dash."""
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-") + ".patch"


def header_fields(patch: Patch) -> dict[str, str]:
    """Read `Name: value` lines, joined with the lines that follow them up to the next name.

    Raises PatchError for a field that stands twice and for text before the first field.
    """
    fields: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in header_text(patch).splitlines():
        match = None if line[:1].isspace() else _FIELD.match(line)
        if match:
            if match[1] in fields:
                raise PatchError(f"patch `{patch.name}`: its header holds `{match[1]}:` twice")
            last = fields[match[1]] = [match[2].strip()]
        elif last is not None:
            last.append(line.strip())
        elif line.strip():
            raise PatchError(f"patch `{patch.name}`: expected `Subject:` at its head, found `{line}`")
    return {name: " ".join(part for part in parts if part) for name, parts in fields.items()}


def header_text(patch: Patch) -> str:
    """Return the header without the `---` that closes it."""
    return re.sub(r"^---\s*\Z", "", patch.header, flags=re.MULTILINE).strip("\n") + "\n"


def is_server(path: str) -> bool:
    """Tell whether a file counts towards the server's own budget."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in SERVER)


def load_entry(patches: Path, name: str) -> Entry:
    """Read one patch; raises PatchError where it cannot be read."""
    patch = load_patch(patches, name)
    added = [(is_server(file.path), sum(len(hunk.added) for hunk in file.hunks)) for file in patch.files]
    return Entry(
        patch,
        header_fields(patch),
        added=sum(count for server, count in added if not server),
        added_server=sum(count for server, count in added if server),
        removed=sum(len(hunk.removed) for file in patch.files for hunk in file.hunks),
    )


# ---- rules ----


def lint_listing(patches: Path) -> Iterator[str]:
    """Every patch is listed once, is on disk, and none is on disk only."""
    names = read_series(patches)
    for name in sorted(set(names)):
        if names.count(name) > 1:
            yield f"`{name}` is listed {names.count(name)} times in `series`, expected once"
        if not (patches / name).is_file():
            yield f"`{name}` is listed in `series` but is not on disk"
    for path in sorted(patches.glob("*.patch")):
        if path.name not in names:
            yield f"`{path.name}` is on disk but not listed in `series`"


def lint_budget(entries: list[Entry]) -> Iterator[str]:
    """The queue stays small: patches, added lines, added lines in the server."""
    for what, found, limit in (
        ("patches", len(entries), MAX_PATCHES),
        ("added lines outside the server", sum(entry.added for entry in entries), MAX_ADDED),
        ("added lines in the server", sum(entry.added_server for entry in entries), MAX_ADDED),
    ):
        if found > limit:
            yield f"over budget: {found} {what}, at most {limit}"


def lint_header(entry: Entry, lock: Lock) -> Iterator[str]:
    """All fields are there and say something; the name is the subject's; the check was made at this pin."""
    fields = entry.fields
    for name in FIELDS:
        if not fields.get(name):
            yield f"header field `{name}:` is missing or empty, expected {', '.join(FIELDS)}"
    if fields.get("Class") and fields["Class"] not in CLASSES:
        yield f"`Class: {fields['Class']}`, expected one of {', '.join(CLASSES)}"
    if fields.get("Subject") and entry.patch.name != file_name(fields["Subject"]):
        yield f"expected the name `{file_name(fields['Subject'])}`, from its subject (make patch-export)"
    if fields.get("Why") and "Rejected:" not in fields["Why"]:
        yield "`Why:` does not name the alternative, expected `Rejected: ...` in it"
    checked = fields.get("Checked-at", "")
    if checked and not (len(checked) >= 9 and lock.commit.startswith(checked)):
        yield f"`Checked-at: {checked}`, expected the pin `{pin(lock)}` (make patch-export writes it)"


def lint_hunk(hunk: Hunk, n_lines: int) -> Iterator[str]:
    """One line of context on each side, no trailing space, and a change that is more than white space."""
    if any(re.search(rb"[ \t\r]+\n?$", line) for line in hunk.added):
        yield "adds white space at the end of a line"
    if b"".join(hunk.added).split() == b"".join(hunk.removed).split():
        yield "changes white space only"
    marks = b"".join(mark for mark, _ in hunk.lines)
    before = len(marks) - len(marks.lstrip(b" "))
    after = len(marks) - len(marks.rstrip(b" "))
    last = hunk.start - 1 + len(hunk.old)
    want = (min(1, hunk.start - 1 + before), min(1, n_lines - last + after))
    if (before, after) != want or b"   " in marks.strip(b" "):
        yield f"has {before} and {after} lines of context, expected one on each side (-U1)"


def lint_file(file: FilePatch, before: bytes, after: bytes) -> Iterator[str]:
    """No public header, no enum value, no struct that callers fill in."""
    if any(fnmatch.fnmatch(file.path, pattern) for pattern in PUBLIC_HEADERS):
        yield "is a public header, which no patch may change"
    if file.path.endswith(C_SUFFIXES):
        old, new = _plain(before), _plain(after)
        if _blocks(_ENUM, old) != _blocks(_ENUM, new):
            yield "an enum changes; no patch may add or change an enum value"
        for struct in sorted(_blocks(_PUBLIC_STRUCT, old) ^ _blocks(_PUBLIC_STRUCT, new)):
            yield f"`struct {struct[0].strip()}` changes; callers lay it out themselves"
            break


def lint_hooks(entries: Iterable[Entry], header: Path) -> Iterator[str]:
    """Every hook that a patch calls is declared in `src/hooks/hooks.h`."""
    declared = set(_HOOK.findall(header.read_bytes())) if header.is_file() else set()
    for entry in entries:
        for hook in sorted(called_hooks(entry.patch) - declared):
            yield f"`{entry.patch.name}` calls `{hook.decode()}`, which {header.name} does not declare"


def called_hooks(patch: Patch) -> set[bytes]:
    """Names of the hooks called in added lines."""
    lines = (line for file in patch.files for hunk in file.hunks for line in hunk.added)
    return {name for line in lines for name in _HOOK.findall(line)}


def lint_patch(entry: Entry, files: dict[str, bytes], lock: Lock) -> Iterator[str]:
    """Apply one patch to `files` (path -> content, changed in place) and check it by all its own rules."""
    yield from (f"`{entry.patch.name}`: {problem}" for problem in lint_header(entry, lock))
    for file in entry.patch.files:
        before = files[file.path]
        for hunk in file.hunks:
            for problem in lint_hunk(hunk, before.count(b"\n") + (not before.endswith(b"\n"))):
                yield f"`{entry.patch.name}`, `{file.path}`, hunk {hunk.number}: {problem}"
        files[file.path] = apply_file(entry.patch.name, file, before)
        for problem in lint_file(file, before, files[file.path]):
            yield f"`{entry.patch.name}`, `{file.path}`: {problem}"


def _plain(data: bytes) -> str:
    return _COMMENT.sub(" ", data.decode("utf-8", "replace"))


def _blocks(pattern: re.Pattern[str], text: str) -> set[tuple[str, str]]:
    return {(match[1].strip(), " ".join(match[2].split())) for match in pattern.finditer(text)}


# ---- the table ----


def pin(lock: Lock) -> str:
    """Return the short form of the pinned commit that `Checked-at` holds."""
    return lock.commit[:9]


def table(entries: list[Entry]) -> str:
    """Return the Markdown table of patches/README.md: one row a patch, and the sums against the budget."""
    rows = ["| patch | class | why | files | lines | it can go when |", "|---|---|---|---|---|---|"]
    for entry in entries:
        cells = (
            f"`{entry.patch.name.removesuffix('.patch')}`",
            entry.fields.get("Class", ""),
            entry.fields.get("Why", "").split("Rejected:")[0].strip(),
            " ".join(f"`{path}`" for path in entry.files),
            f"+{entry.added + entry.added_server} -{entry.removed}",
            entry.fields.get("Drop-when", ""),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*rows, "", budget_line(entries)])


def budget_line(entries: list[Entry]) -> str:
    """Return one sentence: how much of the budget is used."""
    added, server = sum(entry.added for entry in entries), sum(entry.added_server for entry in entries)
    return (
        f"{len(entries)} of {MAX_PATCHES} patches, {added} of {MAX_ADDED} added lines, "
        f"{server} of {MAX_ADDED} in the server."
    )


def readme_with(text: str, entries: list[Entry]) -> str:
    """Return the README text with a fresh table between the markers; raises PatchError without markers."""
    pattern = re.compile(re.escape(TABLE_BEGIN) + ".*?" + re.escape(TABLE_END), re.DOTALL)
    if not pattern.search(text):
        raise PatchError(f"patches/README.md lacks the markers `{TABLE_BEGIN}` and `{TABLE_END}`")
    return pattern.sub(lambda _: f"{TABLE_BEGIN}\n{table(entries)}\n{TABLE_END}", text)
