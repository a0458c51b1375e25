"""Tools of a chat request and calls of them in its messages: checked, and as templates can go through them.

Must not know: models, drafting. Tests: tests/model/test_api_chat.py.
"""

from __future__ import annotations

import json
from typing import Any

from draftwood.errors import OptionError

_FUNCTION = '{"name": "weather", "parameters": {"type": "object", "properties": {}}}'
_EXAMPLES = {"tools": f'{{"type": "function", "function": {_FUNCTION}}}', "functions": _FUNCTION}


def require_tools(given: Any, name: str = "tools", *, named: bool = True) -> None:
    """Refuse what is no list of tools. Errors: OptionError.

    named: also refuse tools without a function's name. A template may know such ones.
    """
    if given is None:
        return
    if isinstance(given, (list, tuple)) and all(isinstance(each, dict) for each in given):
        functions = [each.get("function") for each in given] if name == "tools" else given
        if not named or all(map(_is_function, functions)):
            return
    raise OptionError(
        f"found {name}={given!r:.120}; expected a list of dicts, each with a function's name",
        hint=f"{name}=[{_EXAMPLES[name]}]",
    )


def _is_function(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("parameters"), (dict, type(None)))
    )


def forced_function(tool_choice: Any, function_call: Any) -> str | None:
    """Return the name of the function that a reply has to call. Errors: OptionError for a choice of none."""
    if isinstance(tool_choice, dict) and not _is_function(tool_choice.get("function")):
        raise OptionError(
            f"found tool_choice={tool_choice!r:.120}; expected a function's name in it",
            hint='tool_choice={"type": "function", "function": {"name": "weather"}}',
        )
    if isinstance(function_call, dict) and "name" in function_call:
        return str(function_call["name"])
    return str(tool_choice["function"]["name"]) if isinstance(tool_choice, dict) else None


def with_parameters(tool: dict[str, Any], forced: str) -> dict[str, Any]:
    """Return a tool, or a function, with parameters if it is forced: upstream makes a grammar of them."""
    if "function" in tool:
        return {**tool, "function": with_parameters(tool["function"], forced)}
    if tool["name"] != forced or tool.get("parameters") is not None:
        return tool
    return {**tool, "parameters": {"type": "object", "properties": {}}}


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
        arguments = json.loads(text) if text.strip() else {}  # some servers write nothing for no parameters
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise OptionError(
            f"found a tool call in the messages whose arguments are no JSON object: {text[:80]!r}",
            hint='"arguments": "{\\"place\\": \\"Oslo\\"}"; drop the message if max_tokens cut it short',
        )
    return {**call, "arguments": arguments}


def whole_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool with the fields that llama-server hands to templates, no others."""
    function = tool["function"]
    rest = {"description": function.get("description") or "", "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": {"name": function["name"], **rest}}
