"""A chat request before it is rendered: checked, and as templates can go through it.

Must not know: models, drafting. Tests: tests/model/test_api_chat.py.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from draftwood.api.formats import with_schema
from draftwood.errors import OptionError
from draftwood.load.grammars import require_schema


def bound_request(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by upstream's names, `self` left out, defaults included.

    Errors: TypeError as of any call; OptionError for messages or a response_format that are none;
    GrammarError for JSON schemas beyond the limits of grammars.py.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        if not unknown:
            raise
        variables = ", ".join(f"{name!r}: {kwargs[name]!r}" for name in unknown)
        raise TypeError(
            f"create_chat_completion() {error}; expected variables of the chat template, such as "
            f"enable_thinking, as chat_template_kwargs={{{variables}}}"
        ) from None
    bound.apply_defaults()
    request = dict(bound.arguments)
    del request["self"]
    _check_messages(request["messages"])
    forced = isinstance(request["tool_choice"], dict) or isinstance(request["function_call"], dict)
    request["response_format"] = with_schema(request["response_format"])
    require_schema(request["response_format"], "response_format")
    for name in ("tools", "functions"):
        require_schema(request[name], name, counts=forced)
    return request


def _check_messages(messages: Any) -> None:
    """Refuse what programs pass by mistake; whatever else a template can go through is left to it."""
    wrong = messages
    if isinstance(messages, (list, tuple)):
        wrong = next((each for each in messages if isinstance(each, (str, bytes, type(None)))), messages)
    if wrong is not messages or isinstance(messages, (str, bytes, dict, type(None))):
        found = "messages" if wrong is messages else "a message"
        raise OptionError(
            f"found {found} of type {type(wrong).__name__}; expected a list of dicts, with role and content",
            hint='create_chat_completion([{"role": "user", "content": "..."}])',
        )


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
    except ValueError:
        raise OptionError(
            f"found a tool call in the messages whose arguments are no JSON: {arguments[:80]!r}",
            hint="pass the arguments as the model wrote them, or drop the message",
        ) from None


def whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that llama-server hands to templates, no others."""
    function = tool["function"]
    rest = {"description": function.get("description") or "", "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": {"name": function["name"], **rest}}
