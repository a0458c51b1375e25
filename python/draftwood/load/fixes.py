"""Corrections of upstream's classes in the private package, put in place when `draftwood.llama` is imported.

Only where a subclass would not be met: these are made inside upstream's own methods, or by users through its
names. Signatures stay. docs/compat.md lists them. Must not know: engines, requests.
Tests: tests/model/test_api_bad_input.py, tests/model/test_api_chat.py, tests/model/test_api_states.py,
tests/model/test_contexts.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import sqlite3
import threading
from collections.abc import Sequence
from typing import Any, Literal

import jinja2
from typing_extensions import NotRequired, TypedDict

from draftwood._llama_cpp import (
    _internals,
    _utils,
    llama_cache,
    llama_chat_format,
    llama_grammar,
    llama_speculative,
    llama_types,
)
from draftwood._llama_cpp import llama_cpp as _native
from draftwood.errors import CacheError, GrammarError
from draftwood.load import contexts, files, log
from draftwood.load.grammars import parsed, require_grammar, require_schema
from draftwood.speculative import SpecConfig, SpeculativeType

CACHE_ERRORS = (OSError, sqlite3.Error, pickle.PickleError, EOFError)
"""What a cache raises that cannot be read or written; the last two for a damaged state."""


def add_grammar(self: Any, model: Any, grammar: Any) -> None:
    """Add a grammar to a sampler chain. Upstream adds a null pointer where it does not parse, and crashes.

    Errors: GrammarError, OptionError.
    """
    watched = hasattr(grammar, "check")  # of generate/processors.py: checked before it was watched
    if not watched:
        require_grammar(grammar)
    text, root = grammar._grammar, grammar._root
    raw = (model.vocab, text.encode(), root.encode())
    sampler = parsed(text, lambda: _native.llama_sampler_init_grammar(*raw))
    if not sampler:
        raise GrammarError(
            f"found a grammar that llama.cpp cannot parse, or without its root rule {root!r}: {text[:200]!r}",
            hint="llama.cpp has written what is wrong to stderr; its grammars/README.md has the syntax",
        )
    _native.llama_sampler_chain_add(self.sampler, sampler)
    if watched:
        self.add_custom(grammar.check)


def apply() -> None:
    """Put the corrections in place; again is harmless."""
    _internals.LlamaSampler.add_grammar = add_grammar
    llama_speculative.SpecConfig, llama_speculative.SpeculativeType = SpecConfig, SpeculativeType
    log.listen()
    _accept_json_schemas()
    made: tuple[tuple[Any, Any], ...] = (
        (_internals.LlamaModel, files.readable_model_errors),
        (_internals.LlamaContext, contexts.readable_context_errors),
    )
    for each, readable in made:
        if not hasattr(each.__init__, "__wrapped__"):
            each.__init__ = readable(each.__init__)
    llama_grammar.SchemaConverter._format_literal = _format_literal
    if not hasattr(llama_grammar.json_schema_to_gbnf, "__wrapped__"):
        llama_grammar.json_schema_to_gbnf = _within_limits(llama_grammar.json_schema_to_gbnf)
    formatter: Any = llama_chat_format.Jinja2ChatFormatter
    if not hasattr(formatter.__call__, "__wrapped__"):
        formatter.__call__ = _failing_as_templates(formatter.__call__)
    silence: Any = _utils.suppress_stdout_stderr
    if not hasattr(silence.__enter__, "__wrapped__"):
        silence.__enter__, silence.__exit__ = _shared_silence(silence.__enter__, silence.__exit__)
    cache: Any = llama_cache.LlamaDiskCache
    if not hasattr(cache.__init__, "__wrapped__"):
        cache.__init__ = _saying_which_folder(cache.__init__)
        cache.__getitem__ = _keeping_getitem


def _format_literal(_: Any, literal: str) -> str:
    """Return a text, or a value in JSON, as a literal of a grammar. Upstream does not escape backslashes."""
    with contextlib.suppress(ValueError):
        literal = json.dumps(json.loads(literal), ensure_ascii=False)  # models write characters, not \\u00e9
    for character, escaped in (("\\", "\\\\"), ("\r", "\\r"), ("\n", "\\n"), ('"', '\\"')):
        literal = literal.replace(character, escaped)
    return f'"{literal}"'


class _JsonSchema(TypedDict):
    """OpenAI's wrapping of a schema."""

    name: NotRequired[str]
    description: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool | None]


def _accept_json_schemas() -> None:
    """Let upstream's type of a response_format, by which its server checks requests, have a json_schema."""
    kind: Any = llama_types.ChatCompletionRequestResponseFormat
    kind.__annotations__["type"] = Literal["text", "json_object", "json_schema"]
    kind.__annotations__["json_schema"] = NotRequired[_JsonSchema]
    kind.__optional_keys__ |= {"json_schema"}


def _within_limits(to_gbnf: Any) -> Any:
    """Return json_schema_to_gbnf, which recurses and repeats as its schema says. Errors: GrammarError."""
    kept = functools.lru_cache(maxsize=8)(to_gbnf)  # a request's is checked, and then asked for by upstream

    @functools.wraps(to_gbnf)
    def wrapped(schema: str, *args: Any, **kwargs: Any) -> Any:
        try:
            require_schema(json.loads(schema), "a JSON schema")
            return to_gbnf(schema, *args, **kwargs) if args or kwargs else kept(schema)
        except RecursionError:
            raise GrammarError(
                "found a JSON schema whose parts are nested too deep for Python; expected a flatter one",
                hint="define inner parts once and refer to them with $ref; mark properties as required",
            ) from None

    return wrapped


def _failing_as_templates(render: Any) -> Any:
    """Return a formatter's call. A value that a filter cannot take is an error of Python in Jinja."""

    @functools.wraps(render)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return render(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            raise jinja2.TemplateRuntimeError(str(error)) from error

    return wrapped


def _shared_silence(enter: Any, leave: Any) -> tuple[Any, Any]:
    """Silence stdout and stderr for all threads at once: the first swaps them, the last swaps back.

    By itself each thread would put back what it found, which may be another's silence.
    """
    lock, shared = threading.RLock(), _utils.suppress_stdout_stderr(disable=False)  # __del__ may come within
    silent = 0

    def wrapped_enter(self: Any) -> Any:
        nonlocal silent
        if not self.disable:
            with lock:
                if silent == 0:
                    enter(shared)
                silent += 1
        return self

    def wrapped_leave(self: Any, *_: object) -> None:
        nonlocal silent
        if not self.disable:
            with lock:
                silent -= 1
                if silent == 0:
                    leave(shared)

    return functools.wraps(enter)(wrapped_enter), functools.wraps(leave)(wrapped_leave)


def _saying_which_folder(init: Any) -> Any:
    @functools.wraps(init)
    def wrapped(self: Any, cache_dir: str = ".cache/llama_cache", *args: Any, **kwargs: Any) -> None:
        try:
            init(self, cache_dir, *args, **kwargs)
        except CACHE_ERRORS as error:
            raise CacheError(
                f"found a cache folder that cannot be written, {os.path.abspath(cache_dir)!r}: {error}",
                hint="pass cache_dir= with a folder of your own, or use LlamaRAMCache",
            ) from error

    return wrapped


def _keeping_getitem(self: Any, key: Sequence[int]) -> Any:
    """Return the state with the longest common prefix; upstream also removes it from the cache."""
    found = self._find_longest_prefix_key(tuple(key))
    if found is None:
        raise KeyError("Key not found")
    return self.cache[found]
