"""docs/troubleshooting.md: each message that it quotes, and the class beside it, stands in the sources.

What the server sends to its clients is quoted there.
"""

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
    joined = rf"{literal}(?:\s*\+\s*[\w.:()]+\s*\+\s*{literal}|\s*{literal})*"
    found = []
    for each in re.findall(joined, source):
        with_values = re.sub(r'"\s*\+.*?\+\s*"', VALUE, each)
        said = re.sub(r'"\s*"', "", with_values)[1:-1].replace('\\"', '"')
        found.append(re.sub(r"%(?!%)[-\d.]*(?:ll|z)?[a-z]", VALUE, said))
    return found


def of_calls(source: str) -> list[str]:
    """What C++ says in two places: refuse_more of input_size.h, and a text that gets an end."""
    counted = re.findall(r'refuse_more\(\s*"([^"]*)"', source)
    ended = re.findall(r'(\w+)\s*=\s*"([^"]*)";\s*\1 \+= [^;"]*"([^"]*)"', source)
    return [
        *(f"found {VALUE} {what}; expected at most {VALUE}" for what in counted),
        *(begin + end for _, begin, end in ended),
    ]


@cache
def sayings() -> list[str]:
    python = [each for path in (ROOT / "python").rglob("*.py") for each in of_python(path.read_text("utf-8"))]
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.[ch]*")]
    return python + [each for source in sources for each in of_cpp(source) + of_calls(source)]


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


# ---- what clients of the server see ----

SERVER = ROOT / "src" / "server"
REPLIES = dict(re.findall(r"^\| `(.+?)` \| (\d+) \|", PAGE.partition("### Replies of the server")[2], re.M))
# these speak to who starts the server, before it listens; counters.h speaks to Prometheus
AT_START = {"counters.h", "heat_file.cpp", "options.h", "pool.cpp", "pool_spec.h", "resolve.cpp"}
# texts of other files that no client sees
OF_THE_LOG = {
    "no pipe for the server's connections": "the server does not start",
    "no pipe for signals": "the server does not start",
    " each, on a card what 16 rows leave a slot": "how many slots draft",
}


def code(path: Path) -> str:
    """A file without comments, preprocessor lines and what it logs."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    text = re.sub(rf"({literal})|//[^\n]*|/\*.*?\*/", r"\1", path.read_text("utf-8"), flags=re.S)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    return re.sub(rf'\bLOG_\w+\((?:{literal}|[^";])*\);', "", text)


def to_clients() -> dict[str, str]:
    """Texts of two words or more outside of AT_START and of logs, with their files."""
    files = [path for path in SERVER.glob("*.[ch]*") if path.name not in AT_START]
    said = {each: path.name for path in files for each in of_cpp(code(path)) + of_calls(code(path))}
    return {each: name for each, name in said.items() if re.search(r"[A-Za-z]+ [A-Za-z]+", each)}


def test_what_the_server_sends_to_clients_is_quoted():
    found = to_clients()
    assert {"http_replies.cpp", "connections.cpp", "input_size.cpp", "input_size.h"} <= set(found.values())
    assert {
        each: name
        for each, name in found.items()
        if each not in OF_THE_LOG and not any(says(row, each.replace(VALUE, "...")) for row in REPLIES)
    } == {}
    assert [each for each in OF_THE_LOG if each not in found] == []


def test_statuses_that_the_server_sends_are_there():
    sources = "".join(code(path) for path in SERVER.glob("*.[ch]*") if path.name not in AT_START)
    sent = set(re.findall(r"(?<![\w.])(?:\w+_)?(4\d\d|50\d)\b", sources))
    assert {"400", "408", "413", "429", "431"} <= sent
    assert sent <= set(REPLIES.values())


@pytest.mark.parametrize("name", sorted(AT_START))
def test_files_of_the_start_know_no_client(name):
    source = (SERVER / name).read_text("utf-8")
    assert [each for each in ("httplib", "http_replies.h", "input_size.h") if each in source] == []


def test_a_new_text_is_found(tmp_path):
    file = tmp_path / "new.cpp"
    file.write_text(
        '#include "a b c"\n// says "not this"\nLOG_WRN("nor this: %s; so\\n",\n        e.what());\n'
        'throw E("found " + std::to_string(n) + " tokens");\nrefuse_more("bytes of it", 1, 2);\n'
        'say = "too late";\nsay += late ? "; --patience is the limit" : "";\n',
        "utf-8",
    )
    assert of_cpp(code(file)) + of_calls(code(file)) == [
        "found \0 tokens",
        "bytes of it",
        "too late",
        "; --patience is the limit",
        "",
        "found \0 bytes of it; expected at most \0",
        "too late; --patience is the limit",
    ]


def test_refuse_more_says_what_is_taken_for_granted():
    assert "found \0 \0; expected at most " in of_cpp((SERVER / "input_size.h").read_text("utf-8"))


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
