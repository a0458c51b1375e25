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


def with_objects(messages: Any) -> list[Any]:
    """Return messages with the arguments of their tool calls as objects. Errors: OptionError."""
    return [_with_objects(message) for message in messages]


def _with_objects(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    """Return a call, or its function, with an object; what is not there is left to the template."""
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise OptionError(
            f"found a tool call in the messages whose arguments are no JSON object: {text[:80]!r}",
            hint='"arguments": "{\\"place\\": \\"Oslo\\"}", as the model wrote them, or drop the message',
        )
    return {**call, "arguments": arguments}


def whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that llama-server hands to templates, no others."""
    function = tool["function"]
    rest = {"description": function.get("description") or "", "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": {"name": function["name"], **rest}}
