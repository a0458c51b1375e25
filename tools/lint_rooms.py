#!/usr/bin/env python3
"""Hold includes and imports against rooms.toml, and the table of docs/layout.md too (--write writes it).

    python tools/lint_rooms.py [--write] [ROOT]

Test: tests/unit/test_lint_rooms.py.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from _paths import ROOT
from pin import tomllib

LANGUAGES = tomllib.loads((ROOT / "tools" / "rooms.toml").read_text())
FILES = {each: room for room, row in LANGUAGES["python/draftwood"].items() for each in row.get("files", ())}
BEGIN, END = "<!-- written by tools/lint_rooms.py -->\n", "<!-- end of the rooms -->\n"


def includes(text: str) -> Iterator[str]:
    """Yield the rooms that a C++ file includes."""
    for folder, name in re.findall(r'^\s*#\s*include\s+["<](?:(\w+)/)?([^">]+)[">]', text, re.M):
        if folder in LANGUAGES["src"]:
            yield folder
        elif name == "draftwood-testing.h":
            yield name
        elif name.startswith(("draftwood", "llama-")):
            yield "include" if name.startswith("draftwood") else "llama.cpp"


def imports(text: str) -> Iterator[str]:
    """Yield the rooms that a Python file imports, inside functions too."""
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        for package, name, *_ in (f"{name}.".split(".") for name in names):
            if package == "draftwood" and name != "_llama_cpp":  # that one is upstream's
                known = FILES.get(name, name)
                yield known if known in LANGUAGES["python/draftwood"] else "draftwood"


def faults(root: Path) -> Iterator[str]:
    """Yield each arrow against the flow."""
    for language, rooms in LANGUAGES.items():
        pattern, used_by = ("*.py", imports) if language.startswith("python") else ("*.[hc]*", includes)
        for path in sorted((root / language).rglob(pattern)):
            first, *rest = path.relative_to(root / language).parts
            room = first if rest else FILES.get(path.stem, "")
            if room not in rooms:
                yield f"{path}: found in no room of tools/rooms.toml"
                continue
            uses = rooms[room]["uses"]
            for used in (each for each in used_by(path.read_text()) if each not in (room, *uses)):
                yield f"{path}: {room} -> {used}; expected one of {uses}"


def table() -> str:
    """Return the table of docs/layout.md."""
    lines = ["| room | what it is | may use | must not know |", "|---|---|---|---|"]
    for language, rooms in LANGUAGES.items():
        for room, row in rooms.items():
            place = row.get("place", f"{language}/{room}/")
            lines.append(f"| `{place}` | {row['what']} | {', '.join(row['uses'])} | {row['hidden']} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> int:
    """Return 1 for a fault."""
    root = Path(next((each for each in arguments if each != "--write"), ROOT))
    layout = root / "docs" / "layout.md"
    before, _, old = layout.read_text().partition(BEGIN)
    written = before + BEGIN + table() + END + old.partition(END)[2]
    if "--write" in arguments:
        layout.write_text(written)
    found = list(faults(root))
    if layout.read_text() != written:
        found.append(f"{layout}: the table is stale; expected that of tools/lint_rooms.py --write")
    print(*found, sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
