"""Split the text of a Qwen chat model into reasoning, content and tool calls, as llama-server does.

Knows text only: <think> blocks, and <tool_call> blocks in Qwen3's JSON or Qwen3.5's tags. What is no whole,
valid call stays content; llama-server drops it, or fails. Must not know: models, requests, streams of chunks.
Tests: tests/model/test_api_replies.py (against llama.cpp's own parser).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

THINK, END_THINK, CALL = "<think>", "</think>", "<tool_call>"

Opening = Literal["open", "closed", "free"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """What became certain: pieces of reasoning and content, or calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def opening_of(prompt: str) -> Opening:
    """Tell what a prompt's end does: opens a thought, has closed one, or leaves it to the model."""
    tail = prompt.rstrip()
    return "open" if tail.endswith(THINK) else "closed" if tail.endswith(END_THINK) else "free"


class Splitter:
    """Takes a reply piece by piece; `finish` gives what only the end can tell.

    opening: where the prompt left off, or None to leave reasoning in the content. tools: OpenAI's list, whose
    calls are looked for, or None. tagged: calls are written in tags, not in JSON.
    """

    def __init__(self, opening: Opening | None, tools: list[dict[str, Any]] | None, tagged: bool) -> None:
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools or []}
        self._tagged = tagged
        self._held = ""
        self._strip = opening in ("open", "free") or (opening == "closed" and tagged)
        self._thought_ends = (END_THINK, CALL) if tagged else (END_THINK,)
        self._state = {"open": "reasoning", "free": "start"}.get(opening or "", "content")

    def feed(self, text: str) -> Part:
        """Add text; return what is certain now."""
        self._held += text
        reasoning, content = "", ""
        moved = True
        while moved:
            state = self._state
            if self._strip:
                self._held = self._held.lstrip()
                self._strip = not self._held
            if state == "start":
                self._start()
            elif state == "reasoning":
                reasoning += self._until(self._thought_ends, "content")
            elif state == "content":
                content += self._until((CALL,) if self._tools else (), "calls")
            moved = self._state != state
        return Part(reasoning, content)

    def finish(self) -> Part:
        """Return what was held back, calls parsed."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            return Part(reasoning=held)
        if self._state != "calls":
            return Part(content=held)
        calls, rest = parse_calls(held, self._tools, self._tagged)
        return Part(content=rest, calls=tuple(calls))

    def _start(self) -> None:
        if self._held.startswith(THINK):
            self._held = self._held[len(THINK) :]
            self._state, self._strip = "reasoning", True
        elif not THINK.startswith(self._held):
            self._state = "content"

    def _until(self, marks: tuple[str, ...], then: str) -> str:
        """Return the text before the first mark and enter `then`, or all that cannot begin a mark."""
        hits = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
        if hits:
            at, mark = min(hits)
            before, self._held = self._held[:at], self._held[at:]
            if mark == END_THINK:
                self._held, self._strip = self._held[len(mark) :], True
            self._state = then
            return before
        keep = max((_overlap(self._held, mark) for mark in marks), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def parse_calls(text: str, tools: dict[str, dict[str, Any]], tagged: bool) -> tuple[list[ToolCall], str]:
    """Return the calls that `text` begins with and the rest, which is "" where that is only space."""
    calls: list[ToolCall] = []
    at = 0
    while True:
        one = _tagged_call(text, at, tools) if tagged else _json_call(text, at, tools)
        if one is None:
            rest = text[at:]
            return calls, rest if rest.strip() or not calls else ""
        call, at = one
        calls.append(call)


_JSON_HEAD = re.compile(r'<tool_call>\n\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*')
_JSON_TAIL = re.compile(r"\s*\}\s*</tool_call>\s*")
_TAG_HEAD = re.compile(r"<tool_call>\n<function=([^>\n]*)>\n")
_TAG_ARGUMENT = re.compile(r"<parameter=([^>\n]*)>\n(.*?)\n</parameter>\n", re.DOTALL)
_TAG_TAIL = re.compile(r"</function>\n</tool_call>\s*")


def _json_call(text: str, at: int, tools: dict[str, dict[str, Any]]) -> tuple[ToolCall, int] | None:
    head = _JSON_HEAD.match(text, at)
    if head is None or head[1] not in tools:
        return None
    try:
        arguments, end = json.JSONDecoder().raw_decode(text, head.end())
    except ValueError:
        return None
    tail = _JSON_TAIL.match(text, end)
    if tail is None or not isinstance(arguments, dict):
        return None
    return ToolCall(head[1], text[head.end() : end]), tail.end()


def _tagged_call(text: str, at: int, tools: dict[str, dict[str, Any]]) -> tuple[ToolCall, int] | None:
    head = _TAG_HEAD.match(text, at)
    if head is None or head[1] not in tools:
        return None
    schemas = (tools[head[1]].get("parameters") or {}).get("properties") or {}
    at, written = head.end(), []
    while argument := _TAG_ARGUMENT.match(text, at):
        value = _value(argument[2], schemas.get(argument[1]))
        if value is None:
            return None
        written.append(f"{json.dumps(argument[1], ensure_ascii=False)}:{value}")
        at = argument.end()
    tail = _TAG_TAIL.match(text, at)
    return (ToolCall(head[1], "{" + ",".join(written) + "}"), tail.end()) if tail else None


_KINDS: dict[str, Any] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def _value(text: str, schema: Any) -> str | None:
    """Return the JSON of a tagged argument, or None where it does not fit its schema or has none."""
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json.loads(text)
    except ValueError:
        return None
    fits = kind not in _KINDS or (
        isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
    )
    return text if fits else None


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` begin `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def split(pieces: Iterable[str], splitter: Splitter) -> Part:
    """Return all that a whole reply holds."""
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.finish()]
    return Part(
        "".join(part.reasoning for part in parts), "".join(part.content for part in parts), parts[-1].calls
    )
