"""OpenAI's JSON schemas in requests, and calls of tools in streams that are to be joined."""

from __future__ import annotations

import pytest
from draftwood.api.formats import calls_told_once, require_grammar_of, with_schema
from draftwood.errors import GrammarError, OptionError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "json_object", "schema": SCHEMA}, {"type": "json_object", "schema": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            {"type": "json_object", "schema": SCHEMA},
        ),
        ({"type": "json_schema", "schema": SCHEMA}, {"type": "json_object", "schema": SCHEMA}),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, {"type": "json_object"}),
    ],
)
def test_a_schema_is_found(given, expected):
    assert with_schema(given) == expected


@pytest.mark.parametrize("json_schema", [None, "x", [SCHEMA], {"schema": "x"}])
def test_a_schema_that_is_none_is_refused(json_schema):
    with pytest.raises(OptionError, match="expected a JSON schema in it"):
        with_schema({"type": "json_schema", "json_schema": json_schema})
    with pytest.raises(OptionError, match="expected a JSON schema in it"):
        with_schema({"type": "json_schema"})


@pytest.mark.parametrize("given", ["json", {}, 5, {"type": None}, [{"type": "text"}]], ids=str)
def test_a_format_that_is_none_is_refused(given):
    with pytest.raises(OptionError, match="expected a dict with a type"):
        with_schema(given)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strng"},
        {"type": ["string", "strng"]},
        {"properties": {"a": {"type": "strng"}}},
        {"$ref": "#/$defs/a"},
        {"$ref": "https://a.b/c.json"},
        {"allOf": [{"$ref": "a.json"}]},
    ],
    ids=str,
)
def test_types_and_references_that_nobody_knows(schema):
    """Upstream allows any JSON in place of such a schema."""
    with pytest.raises(GrammarError, match="with an unknown type or \\$ref"):
        require_grammar_of(schema, "response_format")


@pytest.mark.parametrize(
    "schema",
    [
        None,
        SCHEMA,
        {"title": "anything"},
        {"properties": {"type": {"type": "string"}}},
        {"const": {"type": "strng"}},
        {"$ref": "#/$defs/a", "$defs": {"a": SCHEMA}},
    ],
    ids=str,
)
def test_other_schemas_are_left_to_upstream(schema):
    require_grammar_of(schema, "response_format")


def chunk(**delta):
    return {"id": "1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def call(index, arguments, name="f"):
    return {
        "index": index,
        "id": f"c{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def test_a_call_is_named_where_it_begins():
    chunks = [
        chunk(role="assistant", tool_calls=None),
        chunk(content="x"),
        chunk(tool_calls=[call(0, "{")], function_call={"name": "f", "arguments": "{"}),
        chunk(tool_calls=[call(0, "}")], function_call={"name": "f", "arguments": "}"}),
        chunk(tool_calls=[call(1, "[", "g"), call(0, "!")]),
        {"choices": []},
    ]
    before = repr(chunks)
    found = list(calls_told_once(iter(chunks)))
    assert found[:3] == chunks[:3]
    again = found[3]["choices"][0]["delta"]
    assert again["tool_calls"] == [{"index": 0, "function": {"arguments": "}"}}]
    assert again["function_call"] == {"arguments": "}"}
    assert found[4]["choices"][0]["delta"]["tool_calls"] == [
        call(1, "[", "g"),
        {"index": 0, "function": {"arguments": "!"}},
    ]
    assert found[5] == {"choices": []}
    assert repr(chunks) == before
