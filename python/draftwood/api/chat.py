"""Chat with what llama-server has and llama-cpp-python lacks: template arguments, reasoning, tool calls.

A request that asks for none of these takes upstream's way; only `timings` are added. One that does is
rendered with the model file's own template and its reply split by replies.py. Must not know: drafting.
Tests: tests/model/test_api_chat.py.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2

from draftwood._llama_cpp import llama_chat_format
from draftwood._llama_cpp import llama_cpp as _native
from draftwood.api.detokenize import token_text
from draftwood.api.formats import calls_told_once
from draftwood.api.replies import CALL, Part, Splitter, opening_of, split
from draftwood.api.timings import Latest
from draftwood.api.tools import require_tools, whole_tool, with_objects
from draftwood.errors import OptionError, UnsupportedError, translated
from draftwood.generate.host import Host
from draftwood.warn import warn

FALLBACK = "llama-2"
"""The chat_format that upstream takes for a model file without a template."""
_OWN_VARIABLES = {
    "messages": "pass messages as the first argument",
    **{name: f"pass {name}=" for name in ("tools", "tool_choice", "functions", "function_call")},
    **dict.fromkeys(("bos_token", "eos_token", "raise_exception", "strftime_now"), "leave it out"),
    "add_generation_prompt": "leave it out, or render the prompt yourself: create_completion(prompt)",
}
"""Variables of a template that a chat sets itself, and what to do instead."""
REASONING_FORMATS = (None, "none", "auto", "deepseek")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a chat request, or a Llama for all of its requests, asks for beyond upstream's arguments."""

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as enable_thinking."""
    reasoning_format: str | None = None
    """"auto" or "deepseek": thoughts go to `reasoning_content`. None and "none": they stay in the content."""
    parse_tool_calls: bool | None = None
    """Turn Qwen's <tool_call> blocks into `tool_calls` where the request has tools."""

    def __post_init__(self) -> None:
        if self.reasoning_format not in REASONING_FORMATS:
            expected = ", ".join(map(repr, REASONING_FORMATS))
            raise OptionError(
                f"reasoning_format is {self.reasoning_format!r}; expected one of {expected}",
                hint='reasoning_format="auto" puts thoughts into reasoning_content',
            )
        if not isinstance(self.chat_template_kwargs, (dict, type(None))):
            raise OptionError(
                f"chat_template_kwargs is {self.chat_template_kwargs!r}; expected a dict or None",
                hint='chat_template_kwargs={"enable_thinking": False}',
            )
        for name in self.chat_template_kwargs or {}:
            _check_variable(name)
        if self.parse_tool_calls not in (None, True, False):
            raise OptionError(
                f"parse_tool_calls is {self.parse_tool_calls!r}; expected True or False",
                hint="parse_tool_calls=True turns <tool_call> blocks into tool_calls",
            )

    def over(self, defaults: ChatOptions) -> ChatOptions:
        """Return these options with `defaults` where they say nothing; template variables are merged."""
        variables = self.chat_template_kwargs
        if defaults.chat_template_kwargs is not None:
            variables = {**defaults.chat_template_kwargs, **(variables or {})}
        return ChatOptions(
            variables,
            defaults.reasoning_format if self.reasoning_format is None else self.reasoning_format,
            defaults.parse_tool_calls if self.parse_tool_calls is None else self.parse_tool_calls,
        )

    @property
    def splits(self) -> bool:
        """Tell whether thoughts go to `reasoning_content`."""
        return self.reasoning_format in ("auto", "deepseek")


def _check_variable(name: Any) -> None:
    if not isinstance(name, str):
        raise OptionError(
            f"chat_template_kwargs has a name of type {type(name).__name__}, {name!r:.40}; expected texts",
            hint='chat_template_kwargs={"enable_thinking": False}',
        )
    if name in _OWN_VARIABLES:
        raise OptionError(
            f"chat_template_kwargs has {name!r}, which a chat sets itself; expected other variables of the "
            "template",
            hint=_OWN_VARIABLES[name],
        )


def chat(llm: Host, request: dict[str, Any], options: ChatOptions) -> Any:
    """Answer a chat request: upstream's result or iterator of chunks, changed as `options` say.

    Errors: UnsupportedError where the options need the model file's chat template and another format is in
    force, or tool calls are to be parsed that are not Qwen's; OptionError for options that make no sense.
    """
    formatter = _Formatter(llm, _template(llm), options)
    handler = llama_chat_format.chat_formatter_to_chat_completion_handler(formatter)
    tools = request["tools"]
    chosen = request["tool_choice"]
    parses = bool(options.parse_tool_calls and tools) and (chosen is None or chosen in ("auto", "required"))
    if parses and CALL not in formatter.template:
        raise UnsupportedError(
            "found a chat template without <tool_call>; parse_tool_calls=True reads the calls of Qwen models",
            hint="pass tool_choice={...} to force one tool with a grammar",
        )
    if parses or options.chat_template_kwargs is not None:
        require_tools(tools)
    result = handler(llama=llm, **request)
    opening = opening_of(formatter.prompt) if options.splits else None
    splitter = Splitter(opening, tools if parses else None, tagged="<function=" in formatter.template)
    if request["stream"]:
        return _split_chunks(result, splitter)
    return _split_result(result, splitter)


def warn_of_fallback() -> None:
    """Say that messages are formatted for another model. Upstream prints it, and only if verbose."""
    warn(
        f'found no chat template in the model file; messages get chat_format="{FALLBACK}", as by '
        "llama-cpp-python, and a reply may be empty (a base model continues text: create_completion(); "
        "for a chat model give its own chat_format=)"
    )


def failing_template_as_error() -> contextlib.AbstractContextManager[None]:
    """Raise UnsupportedError for a chat template that fails on a request."""
    return translated(
        jinja2.TemplateError,
        lambda error: UnsupportedError(
            f"the chat template failed on this request: {error}; expected messages and tools that it knows",
            hint="look at llm.metadata['tokenizer.chat_template'], or pass chat_format= to Llama()",
        ),
    )


def with_timings(latest: Latest, result: Any) -> Any:
    """Add the completion's timings to a chat result, or to the last chunk; calls are named once."""
    if isinstance(result, dict):
        return {**result, "timings": latest.timings} if latest.timings is not None else result
    return _chunks_with_timings(latest, calls_told_once(result))


def _chunks_with_timings(latest: Latest, chunks: Iterator[Any]) -> Iterator[Any]:
    for chunk in chunks:
        ends = isinstance(chunk, dict) and chunk.get("choices") and chunk["choices"][0].get("finish_reason")
        yield {**chunk, "timings": latest.timings} if ends and latest.timings is not None else chunk


def answered(request: dict[str, Any], answer: Callable[[dict[str, Any]], Any]) -> Any:
    """Return answer(request), again with arguments of tool calls as objects if the chat template fails.

    OpenAI's format has them as text; templates like Qwen3.5's walk through an object. Errors: OptionError for
    a text that is no JSON object, jinja2.TemplateError if the template fails again.
    """
    try:
        return answer(request)
    except jinja2.TemplateError:
        messages = with_objects(request["messages"])
        if messages == request["messages"]:
            raise
    return answer({**request, "messages": messages})


def _template(llm: Host) -> str:
    """Return the template of the model file. Errors: UnsupportedError if another format is in force."""
    name = llm.chat_format
    template = llm.metadata.get(f"tokenizer.{name}")
    if template is None and name == "chat_template.default":
        template = llm.metadata.get("tokenizer.chat_template")
    if template is not None and llm.chat_handler is None:
        return str(template)
    found = "a chat_handler" if llm.chat_handler is not None else f"chat_format={llm.chat_format!r}"
    hint = 'Llama(..., chat_format="chat_template.default") without a chat_handler takes it'
    if "tokenizer.chat_template" not in llm.metadata:
        found = "no chat template in the model file"
        hint = "leave these options out; Llama(..., chat_format=...) chooses how messages are formatted"
    raise UnsupportedError(
        f"found {found}; chat_template_kwargs, reasoning_format and parse_tool_calls work with the chat "
        "template of the model file",
        hint=hint,
    )


class _Formatter:
    """Renders a model file's template as llama-server does, and keeps the prompt."""

    def __init__(self, llm: Host, template: str, options: ChatOptions) -> None:
        self.template, self._variables, self.prompt = template, options.chat_template_kwargs, ""
        eos, bos = llm.token_eos(), llm.token_bos()
        vocab = _native.llama_model_get_vocab(llm.model)
        self._jinja = llama_chat_format.Jinja2ChatFormatter(
            template=template,
            eos_token=token_text(vocab, eos) if eos != -1 else "",
            bos_token=token_text(vocab, bos) if bos != -1 else "",
            stop_token_ids=[eos],
        )

    def __call__(self, *, messages: Any, tools: Any = None, **rest: Any) -> Any:
        if self._variables is not None:
            rest.update({"enable_thinking": True, **self._variables})
            tools = [whole_tool(tool) for tool in tools] if tools else None
            messages = [{**message, "content": message.get("content") or ""} for message in messages]
        response = self._jinja(messages=messages, tools=tools, **rest)
        self.prompt = response.prompt
        return response


def _split_result(result: dict[str, Any], splitter: Splitter) -> dict[str, Any]:
    choice = result["choices"][0]
    message = choice["message"]
    if message["content"] is None:  # a forced tool: upstream has made the call
        return result
    part = split([message["content"]], splitter)
    message = {**message, "content": part.content}
    finish = choice["finish_reason"]
    if part.reasoning:
        message["reasoning_content"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [_call(call) for call in part.calls]
        finish = "tool_calls"
    return {**result, "choices": [{**choice, "message": message, "finish_reason": finish}]}


def _call(call: Any) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _split_chunks(chunks: Iterator[dict[str, Any]], splitter: Splitter) -> Iterator[dict[str, Any]]:
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta, finish = choice["delta"], choice["finish_reason"]
        if finish is None and isinstance(delta.get("content"), str):
            changed = _delta(splitter.feed(delta["content"]))
            if changed or choice["logprobs"]:
                yield {**chunk, "choices": [{**choice, "delta": changed}]}
            continue
        if finish is not None:
            part = splitter.finish()
            last = _delta(part)
            if last:
                yield {**chunk, "choices": [{**choice, "delta": last, "finish_reason": None}]}
            if part.calls:
                chunk = {**chunk, "choices": [{**choice, "finish_reason": "tool_calls"}]}
        yield chunk


def _delta(part: Part) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if part.reasoning:
        delta["reasoning_content"] = part.reasoning
    if part.content:
        delta["content"] = part.content
    if part.calls:
        delta["tool_calls"] = [{"index": i, **_call(call)} for i, call in enumerate(part.calls)]
    return delta
