"""A chat request before it is rendered: bound to names, and checked.

Must not know: models, drafting. Tests: tests/model/test_api_chat.py.
"""

from __future__ import annotations

import inspect
from typing import Any

from draftwood.api.formats import with_schema
from draftwood.api.tools import forced_function, require_tools, with_parameters
from draftwood.errors import OptionError
from draftwood.load.grammars import require_schema


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
        variables = ", ".join(f"{name!r}: {kwargs[name]!r}" for name in unknown)
        raise TypeError(
            f"create_chat_completion() {error}; expected variables of the chat template, such as "
            f"enable_thinking, as chat_template_kwargs={{{variables}}}"
        ) from None
    bound.apply_defaults()
    request = dict(bound.arguments)
    del request["self"]
    _check_messages(request["messages"])
    forced = forced_function(request["tool_choice"], request["function_call"])
    request["response_format"] = with_schema(request["response_format"])
    require_schema(request["response_format"], "response_format")
    for name in ("tools", "functions"):
        require_schema(request[name], name, counts=forced is not None)
        require_tools(request[name], name, named=forced is not None)
        if request[name] and forced is not None:
            request[name] = [with_parameters(tool, forced) for tool in request[name]]
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
