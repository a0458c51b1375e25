"""grammars.py: which grammars and JSON schemas are within the limits."""

from __future__ import annotations

import pytest
from draftwood.errors import GrammarError, OptionError
from draftwood.load import grammars


class Grammar:
    """As LlamaGrammar holds it."""

    def __init__(self, text: str, root: str = "root") -> None:
        self._grammar, self._root = text, root


def nested(depth: int) -> str:
    return "root ::= " + "(" * depth + '"a"' + ")" * depth


BEYOND = {
    "groups": (nested(2_001), "groups nested 2001 deep; expected at most 2000"),
    "groups over lines": (nested(2_001).replace("(", "( # )\n"), "nested 2001 deep"),
    "bytes": (f'root ::= "{"é" * (2 << 20)}"', f"expected at most {4 << 20}"),
    "repetitions": (f'root ::= "{"a" * 10_000}"{{2000}}', "come to 200"),
    "repetitions of repetitions": (f'root ::= "{"a" * 1000}"{{100}}{{ 20, # x\n 200 }}', "elements"),
    "surrogates": ('root ::= "\ud800"', "is no Unicode text"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_grammars_beyond_the_limits(name):
    text, found = BEYOND[name]
    with pytest.raises(GrammarError, match=found) as caught:
        grammars.require_grammar(Grammar(text))
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        nested(2_000),
        "root ::= " + "x ( y ) " * 20_000,
        f'root ::= "{"(" * 20_000}" [{"(" * 20_000}] # {"(" * 20_000}',
        'root ::= "\\"" (x)' + ' "(" [\\](] <(> # (\n' * 20_000,
        "root ::= " + "x{0,500} " * 1000,
        "root ::= x{999999999999999999999999999999}",  # llama.cpp says no
    ],
    ids=["deep", "wide", "quoted", "escaped", "repeated", "too often"],
)
def test_grammars_within_the_limits(text):
    grammars.require_grammar(Grammar(text))


@pytest.mark.parametrize("grammar", ["root ::= x", b"root", 5, object(), Grammar(b"x"), Grammar("x", None)])
def test_what_is_no_grammar(grammar):
    with pytest.raises(OptionError, match="expected a LlamaGrammar") as caught:
        grammars.require_grammar(grammar)
    assert "LlamaGrammar.from_string(text)" in caught.value.hint


def deep(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


def loop() -> object:
    value: dict[str, object] = {}
    value["properties"] = value
    return value


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (deep(201), "nested more than 200 deep"),
        (deep(100_000), "nested more than 200 deep"),
        (loop(), "nested more than 200 deep"),
        ({"properties": {"a": {"maxLength": 10_001}}}, "maxLength=10001"),
        ([{"maxItems": 10**30}], "maxItems=1000"),
        ({"pattern": "^(a{200}){3,100}$"}, "20000 repetitions"),
        ({"pattern": "a{" + "9" * 5000 + "}"}, "repetitions"),
        ({"enum": ["x" * (5 << 20)]}, "expected at most 4194304"),
        ({"enum": [0] * (5 << 20)}, "expected at most 4194304"),
    ],
    ids=[
        "lists",
        "very deep",
        "itself",
        "length",
        "items",
        "pattern",
        "long number",
        "long text",
        "long list",
    ],
)
def test_schemas_beyond_the_limits(schema, found):
    with pytest.raises(GrammarError, match=found) as caught:
        grammars.require_schema(schema, "tools")
    assert "tools" in caught.value.message
    assert caught.value.hint


def test_schemas_within_the_limits():
    grammars.require_schema(None, "tools")
    inner: object = {"type": "string", "maxLength": 10_000, "pattern": "^[0-9]{4}-[0-9]{2}$"}
    for _ in range(60):
        inner = {"type": "object", "properties": {"pattern": inner}, "required": ["pattern"]}
    grammars.require_schema(inner, "tools")
    grammars.require_schema({"maxLength": 1 << 20, "pattern": "a{99999}"}, "tools", counts=False)


def test_deep_grammars_are_parsed_with_room():
    import threading

    def stack() -> bool:
        return threading.current_thread() is threading.main_thread()

    before = threading.stack_size()
    assert grammars.parsed(nested(10), stack)
    assert not grammars.parsed(nested(1000), stack)
    assert not grammars.parsed("a ::= b\n" * 1000, stack)
    assert threading.stack_size() == before
