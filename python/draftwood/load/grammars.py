"""Limits of grammars and JSON schemas, checked before anything parses them.

llama.cpp parses a grammar recursively: 470 bytes of stack for a group in a group, 130 for a rule that begins
with a rule. A thread of 8 MiB survives 17,900 groups or 64,000 rules, one of 512 KiB 1,120 or 4,000. A JSON
schema with maxLength=900 is a grammar of 900 nested groups. Deep grammars are parsed on another thread, with
stack for every grammar within the limits. Must not know: models, requests.
Tests: tests/unit/test_grammars.py, tests/model/test_api_bad_input.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from draftwood.errors import GrammarError, OptionError

MAX_BYTES = 4 << 20
"""Of a grammar, or of the text of a JSON schema."""
MAX_DEPTH = 2_000
"""Groups in groups. Of groups that end in ")?" llama.cpp itself takes 1,000."""
MAX_ELEMENTS = 16 << 20
"""Elements that repetitions come to, 8 bytes each in llama.cpp."""
MAX_COUNT = 10_000
"""Of minItems and its like in a JSON schema: the grammar holds as many copies."""
MAX_JSON_DEPTH = 200
"""Objects and lists in each other, in a JSON schema or a tool."""

_REPEATED = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD: beyond it a grammar does not parse
_SHALLOW = 500  # groups and rules: 235 KB of stack at most
# two bytes of a grammar are at most one call of 130 bytes
_STACK = 384 << 20
_SPACE = r"(?:\s|\#[^\r\n]*[\r\n])*"
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\r\n]*) | (?P<string>"(?:[^"\\]|\\.)*") | (?P<class>\[(?:[^\]\\]|\\.)*\])
      | (?P<token>!?<[^>]*>) | (?P<open>\() | (?P<close>\)) | (?P<word>[\w-]+)
      | (?P<many>\{@(?P<least>\d+)@(?:,@(?P<most>\d*)@)?\})""".replace("@", _SPACE),
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_PATTERN_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_alone = threading.Lock()
_T = TypeVar("_T")


def require_grammar(grammar: Any) -> None:
    """Refuse what is no LlamaGrammar, or a grammar beyond the limits. Errors: OptionError, GrammarError."""
    text, root = getattr(grammar, "_grammar", None), getattr(grammar, "_root", None)
    if not isinstance(text, str) or not isinstance(root, str):
        raise OptionError(
            f"grammar is of type {type(grammar).__name__}; expected a LlamaGrammar",
            hint="grammar=LlamaGrammar.from_string(text); LlamaGrammar is in draftwood, too",
        )
    try:
        size = len(text.encode())
        root.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(
            f"found a grammar that is no Unicode text: {error.reason}", hint="read its file as UTF-8"
        ) from None
    _require_size("a grammar", size)
    if text.count("(") > MAX_DEPTH or "{" in text:
        _require_expansion(text)


def parsed(text: str, parse: Callable[[], _T]) -> _T:
    """Return parse(), which parses the grammar `text`, on a thread with stack enough if it is deep."""
    if text.count("(") + text.count("::=") <= _SHALLOW:
        return parse()
    result: list[_T] = []
    thread = threading.Thread(target=lambda: result.append(parse()))
    with _alone:
        usual = threading.stack_size(_STACK)
        try:
            thread.start()
        except RuntimeError as error:
            raise GrammarError(
                f"found a grammar of {len(text)} characters, and no {_STACK >> 20} MiB of address space for "
                f"parsing it: {error}",
                hint="a simpler grammar, or a higher limit of virtual memory (ulimit -v)",
            ) from error
        finally:
            threading.stack_size(usual)
    thread.join()
    return result[0]


def require_schema(schema: Any, name: str, *, counts: bool = True) -> None:
    """Refuse a JSON schema, or an object with some in it, beyond the limits. Errors: GrammarError.

    name: what it is in the words of an error, such as "tools". counts: whether it becomes a grammar, so that
    its repetitions count.
    """
    size = 0
    for depth, key, value in _walk(schema):
        if depth > MAX_JSON_DEPTH:
            raise GrammarError(
                f"found {name} nested more than {MAX_JSON_DEPTH} deep; expected at most {MAX_JSON_DEPTH}",
                hint="define inner parts once and refer to them with $ref",
            )
        size += len(value) if isinstance(value, str) else 1
        _require_size(name, size)
        if counts:
            _require_count(name, key, value)


def _require_count(name: str, key: Any, value: Any) -> None:
    count = value if key in _COUNTS and isinstance(value, int) else 0
    if key == "pattern" and isinstance(value, str):
        count = _pattern_count(value)
    if count > MAX_COUNT:
        raise GrammarError(
            f"found {key}={value!r:.80} in {name}, {count:.6g} repetitions; expected at most {MAX_COUNT}",
            hint="leave the limit out and check the length of what was generated",
        )


def _walk(value: Any) -> Iterator[tuple[int, Any, Any]]:
    """Yield depth, key and value of everything in an object of dicts and lists, which may contain itself."""
    todo = [(1, None, value)]
    while todo:
        depth, key, value = todo.pop()
        yield depth, key, value
        if isinstance(value, dict):
            todo += [(depth + 1, key, each) for key, each in value.items()]
        elif isinstance(value, (list, tuple)):
            todo += [(depth + 1, None, each) for each in value]


def _pattern_count(pattern: str) -> int:
    """Return how often a part of a regular expression may be repeated: repetitions may be in each other."""
    count = 1
    for least, most in _PATTERN_COUNT.findall(pattern):
        count *= max(1, _int(least), _int(most))
    return count


def _int(digits: str) -> int:
    return int(digits[:9] or 0)  # Python itself refuses thousands of digits


def _require_size(name: str, size: int) -> None:
    if size > MAX_BYTES:
        raise GrammarError(
            f"found {name} of {size} bytes or more; expected at most {MAX_BYTES}",
            hint="a simpler one: llama.cpp compares every candidate token with it",
        )


def _require_expansion(text: str) -> None:
    """Refuse groups too deep, and repetitions that come to too much."""
    depth = deepest = elements = item = 0
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if kind == "open":
            depth += 1
            deepest = max(deepest, depth)
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "many":
            item = (item + 3) * min(max(_int(found["least"]), _int(found["most"] or "")), _REPEATED)
            elements += item
        if kind != "many":
            item = len(found[0]) if kind in ("string", "class") else 1
    if deepest > MAX_DEPTH:
        raise GrammarError(
            f"found a grammar with groups nested {deepest} deep; expected at most {MAX_DEPTH}",
            hint='give inner groups rules of their own, or write repetitions as "x"{0,100}',
        )
    if elements > MAX_ELEMENTS:
        raise GrammarError(
            f"found a grammar whose repetitions come to {elements} elements; expected at most {MAX_ELEMENTS}",
            hint="smaller numbers in {}, or rules in place of long repeated strings",
        )
