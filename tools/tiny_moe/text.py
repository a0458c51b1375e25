"""Turn package archives into clean documents of three categories, and count their 13-grams.

Must not know: tokenizers, torch, which packages are used. Entry points: `documents`, `grams`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON = {".py"}
PROSE = {".rst", ".md"}
CONFIG = {".json", ".toml", ".yaml", ".yml", ".cfg", ".ini"}
CATEGORIES = ("python", "prose", "json")
LIMIT = 60_000  # characters of one document; longer files are cut at a line end
WORD = re.compile(r"\w+")
# Boilerplate and tables teach a small model to repeat: these never become documents.
SKIP_PATH = re.compile(
    r"(^|/)(LICEN[CS]E|COPYING|NOTICE|AUTHORS|CONTRIBUTORS|locale|locales|i18n|_vendor|vendor|third_party|extern|"
    r"node_modules|static|\.git|__pycache__)[^/]*(/|$)|\.dist-info/|\.egg-info/|(^|/)(package-lock|yarn)|\.min\.",
    re.I,
)
OTHER_LANGUAGE = re.compile(r"(^|/)(translations?|lang)/(?!en[._-]|en\.json)[^/]+$")
LICENCE_LINE = re.compile(r"copyright|licen[cs]e|warrant|apache|all rights reserved|spdx", re.I)


@dataclass(frozen=True)
class Document:
    """One file's text: where it is from, its category, its cleaned text."""

    package: str
    path: str
    category: str
    text: str


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of the text files of a wheel, zip or tar archive, in path order."""
    wanted = PYTHON | PROSE | CONFIG | {".txt", ".gz"}
    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as z:
            for name in sorted(z.namelist()):
                if Path(name).suffix in wanted:
                    yield name, z.read(name)
    else:
        with tarfile.open(archive) as t:
            for m in sorted((m for m in t.getmembers() if m.isfile()), key=lambda m: m.name):
                if Path(m.name).suffix in wanted and (f := t.extractfile(m)):
                    yield m.name.split("/", 1)[-1], f.read()


def category(path: str) -> str | None:
    """Sort a path into a category; None leaves it out."""
    if SKIP_PATH.search(path) or OTHER_LANGUAGE.search(path):
        return None
    suffix = Path(path).suffix
    if suffix in PYTHON:
        return "python"
    if suffix in PROSE or (suffix == ".txt" and "docs/" in path):
        return "prose"
    return "json" if suffix in CONFIG or path.endswith(".json.gz") else None


def without_licence(text: str) -> str:
    """Drop the leading comment block of a file if it speaks of licences."""
    lines = text.splitlines(keepends=True)
    n = next(
        (i for i, x in enumerate(lines) if x.strip() and not x.startswith(("#", ".. ", "   "))), len(lines)
    )
    return "".join(lines[n:]) if LICENCE_LINE.search("".join(lines[:n])) else text


def clean(text: str, kind: str) -> str | None:
    """Return the text to keep of one file, or None where it is a table, generated, not English or tiny."""
    text = text.replace("\r\n", "\n").replace("\t", "    ").lstrip("\ufeff")
    if kind == "json" and text.lstrip()[:1] in "{[" and len(text) / (text.count("\n") + 1) > 200:
        try:
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
        except ValueError:
            return None
    text = without_licence(text).strip() + "\n"
    if len(text) > LIMIT:
        text = text[: text.rfind("\n", 0, LIMIT) + 1]
    n, lines = len(text), text.splitlines()
    digits = sum(map(str.isdigit, text))
    odd = n - len(text.encode("ascii", "ignore"))
    if n < 200 or digits > 0.15 * n or odd > 0.02 * n or max(map(len, lines)) > 1200 or n > 160 * len(lines):
        return None
    if len({x.strip() for x in lines}) < 0.35 * len(lines):
        return None  # mostly repeated lines
    return text


def documents(package: str, archive: Path, seen: set[bytes]) -> Iterator[Document]:
    """Yield the clean documents of an archive that are not in `seen` (hashes without spaces), adding them."""
    for path, raw in members(archive):
        kind = category(path)
        if kind is None or len(raw) > 3_000_000:
            continue
        try:
            text = clean((gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8"), kind)
        except (UnicodeDecodeError, OSError, RecursionError):
            continue
        if text is None:
            continue
        key = hashlib.sha256("".join(text.split()).encode()).digest()[:12]
        if key not in seen:
            seen.add(key)
            yield Document(package, path.removesuffix(".gz"), kind, text)


def grams(text: str, n: int = 13) -> Iterator[str]:
    """Yield every run of n words of `text`, case folded and joined by spaces; words are runs of \\w."""
    words = WORD.findall(text.lower())
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
