"""docs/troubleshooting.md: each message that it quotes, and the class beside it, stands in the sources."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from draftwood import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
OURS = PAGE.partition("## By error message")[2].partition("### Messages of other programs")[0]
ROWS = re.findall(r"^\| `(.+?)` \| ([^|]*) \|", OURS, re.M)
VALUE = "\0"
"""Stands in a literal where a value is put in."""


def text(node: ast.expr) -> str:
    """What a Python literal says, with VALUE for what is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    return VALUE


def of_python(source: str) -> list[str]:
    literals = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.Constant, ast.JoinedStr)))
    return [each for each in map(text, literals) if each != VALUE]


def of_cpp(source: str) -> list[str]:
    """What literals say that stand side by side, and those that `+` joins to values."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    joined = rf"{literal}(?:\s*\+\s*[\w.()]+\s*\+\s*{literal}|\s*{literal})*"
    found = []
    for each in re.findall(joined, source):
        with_values = re.sub(r'"\s*\+.*?\+\s*"', VALUE, each)
        said = re.sub(r'"\s*"', "", with_values)[1:-1].replace('\\"', '"')
        found.append(re.sub(r"%(?!%)[-\d.]*(?:ll|z)?[a-z]", VALUE, said))
    return found


@cache
def sayings() -> list[str]:
    python = [each for path in (ROOT / "python").rglob("*.py") for each in of_python(path.read_text("utf-8"))]
    cpp = [each for path in (ROOT / "src").rglob("*.[ch]*") for each in of_cpp(path.read_text("utf-8"))]
    return python + cpp


def says(saying: str, quoted: str) -> bool:
    """Whether all parts of a quoted message stand in a literal, one behind the other."""
    at = 0
    for part in (each for each in quoted.split("...") if each.strip()):
        at = saying.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.mark.parametrize("quoted", [message for message, _ in ROWS], ids=lambda each: each[:40])
def test_a_quoted_message_is_one_of_ours(quoted):
    assert len(quoted.replace("...", "")) >= 12, "too short to be searched for"
    assert any(says(each, quoted) for each in sayings())


def test_each_message_is_quoted_once():
    messages = [message for message, _ in ROWS]
    assert len(messages) > 50
    assert len(set(messages)) == len(messages)


def test_classes_are_ours_or_pythons():
    named = {name for _, kind in ROWS for name in re.findall(r"\w+Error", kind)}
    assert {"OptionError", "ModelFileError"} <= named
    assert [
        name for name in named if not (hasattr(errors, name) or name in {"ImportError", "TypeError"})
    ] == []


def test_classes_that_a_user_meets_are_there():
    """NativeError is a fault of draftwood itself."""
    known = {name for name in vars(errors) if name.endswith("Error")} - {"DraftwoodError", "NativeError"}
    assert {name for name in known if name not in OURS} == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [('raise E(f"found {a}; " "expected 2")', "found \0; expected 2"), ('x = "plain"', "plain")],
)
def test_literals_of_python(source, expected):
    assert expected in of_python(source)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            'fail(X, "%s is cut off: found %lld bytes, "\n "it has %zu", a)',
            "\0 is cut off: found \0 bytes, it has \0",
        ),
        ('return "--spec-type " + dw.type + " takes none";', "--spec-type \0 takes none"),
    ],
)
def test_literals_of_cpp(source, expected):
    assert expected in of_cpp(source)


def test_what_is_said_otherwise_is_found():
    assert says("\0 is cut off: found \0 bytes", "... is cut off: found ...")
    assert not says("\0 is cut off: found \0 bytes", "... is cut off: expected ...")
    assert not says("found \0 bytes", "bytes ... found")
