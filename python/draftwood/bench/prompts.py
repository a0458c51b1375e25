"""Prompts by category, from JSON Lines files or the small set in texts/. Must not know: the library.

A file is a category, named by its stem; a line is an object with the string "text".
Test: tests/unit/test_bench_input.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwood.errors import OptionError

OWN = Path(__file__).parent / "texts"
_HINT = 'a line is {"text": "..."}; the file\'s stem is the category'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens and what kind of text it is."""

    category: str
    ids: list[int]


def read(paths: Sequence[Path]) -> dict[str, list[str]]:
    """Return the texts of every category; a folder stands for its *.jsonl, no path for the built-in set.

    Errors: OptionError for what cannot be read, has no text, or comes twice.
    """
    texts: dict[str, list[str]] = {}
    for file in _files(paths or [OWN]):
        if file.stem in texts:
            raise OptionError(f"found two files for the category {file.stem!r}; expected one", hint=_HINT)
        texts[file.stem] = _texts(file)
    return texts


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise OptionError(f"found no {path}; expected a file of prompts, or a folder of them", hint=_HINT)
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise OptionError(f"found no *.jsonl in {path}; expected a file for each category", hint=_HINT)
        files += found
    return files


def _texts(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} cannot be read: {error}", hint=_HINT) from error
    texts = [_text(f"{file}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise OptionError(f"found no prompts in {file}; expected at least one line", hint=_HINT)
    return texts


def _text(place: str, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise OptionError(f"{place} is no JSON: {error}", hint=_HINT) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text:
        raise OptionError(
            f'{place} has no "text"; expected an object with a text that is not empty', hint=_HINT
        )
    return text


def encode(
    texts: Mapping[str, Sequence[str]],
    tokenize: Callable[[bytes], list[int]],
    per_category: int,
    n_tokens: int,
) -> list[Prompt]:
    """Return the first n_tokens tokens of per_category texts of every category, i32[<= n_tokens] each.

    Texts that have so many go first, in the order of their file; shorter ones follow where too few do.
    """
    prompts: list[Prompt] = []
    for category, some in texts.items():
        whole: list[list[int]] = []
        short: list[list[int]] = []
        for text in some:
            ids = tokenize(text.encode("utf-8"))[:n_tokens]
            (whole if len(ids) == n_tokens else short).append(ids)
            if len(whole) == per_category:
                break
        prompts += [Prompt(category, ids) for ids in [*whole, *short][:per_category]]
    return prompts
