"""Where OpenAI's requests and chunks differ from llama-cpp-python's: JSON schemas, streamed calls of tools.

Must not know: models, drafting. Tests: tests/unit/test_formats.py, tests/model/test_api_chat.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from draftwood._llama_cpp import llama_grammar
from draftwood.errors import GrammarError, OptionError

# what upstream's conversion says of a type or a reference; of other schemas it makes any JSON
_UNKNOWN = re.compile(r"ref |Unsupported ref|Fetching remote|Unrecognized schema: .*'type': ['\[]", re.DOTALL)
_TYPES = ("text", "json_object", "json_schema")
_HINT = 'response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}'


def with_schema(response_format: Any) -> Any:
    """Return a response_format as upstream knows it: OpenAI's json_schema is its json_object with a schema.

    Errors: OptionError for a format that is none, or a json_schema without its object.
    """
    given = response_format.get("type") if isinstance(response_format, dict) else None
    if response_format is not None and given not in _TYPES:
        raise OptionError(
            f"found response_format={response_format!r:.120}; expected a dict with a type, which is "
            f"{' or '.join(_TYPES)}",
            hint='response_format={"type": "json_object"}',
        )
    if response_format is None or response_format["type"] != "json_schema":
        return response_format
    own = {name: value for name, value in response_format.items() if name != "type"}
    wrapped = own.get("json_schema", own or None)  # llama-server takes both
    schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
    if not isinstance(wrapped, dict) or not isinstance(schema, (dict, type(None))):
        raise OptionError(
            f"found response_format={response_format!r:.120}; expected a JSON schema in it", hint=_HINT
        )
    return {"type": "json_object", **({} if schema is None else {"schema": schema})}


def require_grammar_of(schema: Any, name: str) -> None:
    """Refuse a JSON schema with an unknown type or a reference to nothing; upstream allows any JSON for it.

    Errors: GrammarError.
    """
    if schema is None:
        return
    try:
        llama_grammar.json_schema_to_gbnf(json.dumps(schema))
    except GrammarError:
        raise
    except Exception as error:  # asserts, and whatever Python says of a schema of another shape
        if isinstance(error, KeyError) or _UNKNOWN.search(str(error)):
            raise GrammarError(
                f"found a JSON schema in {name} with an unknown type or $ref: {error!s:.200}",
                hint='types are string, number, integer, boolean, object, array and null; "$ref" is '
                '"#/$defs/name"',
            ) from None


def calls_told_once(chunks: Iterator[Any]) -> Iterator[Any]:
    """Yield chunks that name a tool's call where it begins, and then go on with its arguments.

    Clients join what chunks of a call have, as OpenAI's stream is to be read; upstream names it in each.
    """
    begun: set[Any] = set()
    for chunk in chunks:
        choices: list[Any] = (chunk.get("choices") if isinstance(chunk, dict) else None) or []
        delta = choices[0].get("delta") if choices else None
        if delta and (delta.get("tool_calls") or delta.get("function_call")):
            chunk = {**chunk, "choices": [{**choices[0], "delta": _once(delta, begun)}, *choices[1:]]}
        yield chunk


def _once(delta: dict[str, Any], begun: set[Any]) -> dict[str, Any]:
    changed = dict(delta)
    if delta.get("tool_calls"):
        changed["tool_calls"] = [_rest(call, begun) for call in delta["tool_calls"]]
    if delta.get("function_call"):
        if None in begun:
            changed["function_call"] = _without_name(delta["function_call"])
        begun.add(None)
    return changed


def _rest(call: dict[str, Any], begun: set[Any]) -> dict[str, Any]:
    """Return a call's part of a chunk, without what was told."""
    index = call.get("index", 0)
    if index not in begun:
        begun.add(index)
        return call
    return {"index": index, "function": _without_name(call.get("function") or {})}


def _without_name(function: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in function.items() if key != "name"}
