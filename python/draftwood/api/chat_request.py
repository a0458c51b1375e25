"""A chat request before it is rendered: bound to names, and checked.

Must not know: models, drafting. Tests: tests/model/test_api_chat.py.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

from draftwood.api.formats import require_grammar_of, with_schema
from draftwood.api.stops import listed_stops
from draftwood.api.tools import forced_function, require_tools, with_parameters
from draftwood.errors import OptionError
from draftwood.load.grammars import require_schema

# arguments of our create_chat_completion beyond upstream's
_OURS = ("chat_template_kwargs", "reasoning_format", "parse_tool_calls")
# arguments of OpenAI's clients and of Transformers that Llama has by other names, or not at all
_RENAMED = {"max_completion_tokens": "max_tokens", "repetition_penalty": "repeat_penalty"}
_WITHOUT = {
    **dict.fromkeys(("user", "store", "metadata", "service_tier", "parallel_tool_calls"), ""),
    "n": "leave n out, and make one call for each choice",
    "stream_options": "leave stream_options out; last_usage has the tokens of a stream",
}
_VARIABLES = ("reasoning_effort",)  # of the template of gpt-oss, though near to reasoning_format
_NEAR = 0.8


def bound_request(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by upstream's names, `self` left out, defaults included.

    Errors: TypeError as of any call; OptionError for messages, tools or a response_format that are none;
    GrammarError for JSON schemas beyond the limits of grammars.py.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        if not unknown:
            raise
        known = [*signature.parameters][1:]
        hint = _advice({name: kwargs[name] for name in unknown}, [*known, *_OURS])
        raise TypeError(
            f"create_chat_completion() {error}; expected its own arguments, and variables of the chat "
            f"template in chat_template_kwargs\n\nhint: {hint}"
        ) from None
    bound.apply_defaults()
    request = dict(bound.arguments)
    del request["self"]
    _check_messages(request["messages"])
    if request["stop"] is not None:
        request["stop"] = listed_stops(request["stop"])  # upstream's handlers add theirs
    forced = forced_function(request["tool_choice"], request["function_call"])
    request["response_format"] = with_schema(request["response_format"])
    require_schema(request["response_format"], "response_format")
    asked = request["response_format"]
    if asked is not None and asked["type"] == "json_object":
        require_grammar_of(asked.get("schema"), "response_format")
    for name in ("tools", "functions"):
        require_schema(request[name], name, counts=forced is not None)
        require_tools(request[name], name, named=forced is not None)
        if request[name] and forced is not None:
            request[name] = [with_parameters(tool, forced) for tool in request[name]]
            for function in (tool.get("function", tool) for tool in request[name]):
                if function["name"] == forced:
                    require_grammar_of(function["parameters"], name)
    return request


def _advice(unknown: dict[str, Any], known: list[str]) -> str:
    """Return what to write in place of unknown arguments."""
    hints, variables = [], {}
    for name, value in unknown.items():
        near = [_RENAMED[name]] if name in _RENAMED else difflib.get_close_matches(name, known, 1, _NEAR)
        if name in _WITHOUT:
            hints.append(_WITHOUT[name] or f"leave {name} out")
        elif near and name not in _VARIABLES:
            hints.append(f"{near[0]}={value!r:.80} in place of {name}")
        else:
            variables[name] = value
    if variables:
        hints.append(f"chat_template_kwargs={variables!r:.120}")
    return "; ".join(hints)


def _check_messages(messages: Any) -> None:
    """Refuse what programs pass by mistake; whatever else a template can go through is left to it."""
    wrong, never = messages, (str, bytes, int, float, type(None))
    if isinstance(messages, (list, tuple)):
        wrong = next((each for each in messages if isinstance(each, never)), messages)
    if wrong is not messages or isinstance(messages, (*never, dict)) or not isinstance(messages, Iterable):
        found = "messages" if wrong is messages else "a message"
        raise OptionError(
            f"found {found} of type {type(wrong).__name__}; expected a list of dicts, with role and content",
            hint='create_chat_completion([{"role": "user", "content": "..."}])',
        )
