"""Values that no request can have: an error in words, not one of Python's, and then exact again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from draftwood import GrammarError, OptionError, StateError

from tests.model.texts import P, fresh, text

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stop": [1]}, r"found stop=\[1\]; expected a str or a list"),
        ({"stop": 5}, "found stop=5; expected a str or a list"),
        ({"stop": "\udc80"}, "no Unicode character"),
        ({"max_tokens": "3"}, "max_tokens is '3'; expected a whole number"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5; expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number"),
        ({"top_k": "3"}, "top_k is '3'; expected a whole number"),
        ({"prompt": "a\udc80"}, r"found text with '\\udc80' at character 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_values_of_a_completion(llm, wrong, words, stream):
    expected = text(llm)
    with pytest.raises(OptionError, match=words):
        list(llm.create_completion(**{"prompt": "a", "max_tokens": 2, "stream": stream, **wrong}))
    assert text(llm) == expected


def test_a_seed_that_is_none(llm):
    for seed in ("x", 1.5, None):
        with pytest.raises(OptionError, match=f"seed is {seed!r}; expected a whole number"):
            llm.set_seed(seed)
    llm.set_seed(np.int64(7))
    assert text(llm)


@pytest.mark.parametrize(
    ("prompt", "hint"), [("", "pass some text; this model adds no BOS token"), ([], "pass some text")]
)
def test_a_prompt_without_tokens(llm, prompt, hint):
    with pytest.raises(
        OptionError, match="found a prompt without tokens; expected one token at least"
    ) as caught:
        llm.create_completion(prompt, max_tokens=2)
    assert caught.value.hint == hint
    assert text(llm)


@pytest.mark.parametrize("messages", [5, 1.5, len, [5], [True]], ids=str)
def test_messages_that_are_none(llm, messages):
    with pytest.raises(OptionError, match="expected a list of dicts, with role and content"):
        llm.create_chat_completion(messages)


@pytest.mark.parametrize("wrong", [5, [1], (None,)], ids=str)
def test_stops_of_a_chat(llm, wrong):
    with pytest.raises(OptionError, match="expected a str or a list of some"):
        llm.create_chat_completion(MESSAGES, stop=wrong, max_tokens=2)
    assert llm.create_chat_completion(MESSAGES, stop=("never there",), max_tokens=2)["choices"]


def test_stops_may_be_a_tuple(llm):
    asked = {"max_tokens": 20, "temperature": 0.0}
    whole = llm.create_completion("a", **asked)["choices"][0]["text"]
    cut = llm.create_completion("a", **asked, stop=("never there", whole[3:5]))["choices"][0]["text"]
    assert len(whole) > 5
    assert cut == whole[: whole.index(whole[3:5])]


@pytest.mark.parametrize("asked", [5, {}, {"type": 5}, {"type": "jsn"}, {"schema": {}}], ids=str)
def test_a_response_format_that_is_none(llm, asked):
    with pytest.raises(
        OptionError, match="expected a dict with a type, which is text or json_object or json_"
    ):
        llm.create_chat_completion(MESSAGES, response_format=asked)


def test_a_message_that_utf8_does_not_hold(llm):
    with pytest.raises(OptionError, match="no Unicode character"):
        llm.create_chat_completion([{"role": "user", "content": "a\udc80"}])


def test_top_k_beyond_an_int_is_all_tokens(llm):
    settings = {"max_tokens": 12, "temperature": 2.0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    texts = [llm.create_completion("a", top_k=k, **settings)["choices"][0]["text"] for k in (0, 2**31, 2**40)]
    assert texts[1:] == texts[:1] * 2
    llm.reset()
    llm.eval(P)
    assert llm.sample(top_k=2**31) >= 0


def test_n_tokens_below_nothing(llm):
    """The hint is about n_tokens, not about the tokens."""
    for tokens in ([1], [1] * 7):
        llm.n_tokens = -5
        with pytest.raises(OptionError, match="found n_tokens=-5") as caught:
            llm.eval(tokens)
        assert "reset()" in str(caught.value)
    llm.reset()
    assert text(llm) == fresh(llm)


@pytest.mark.parametrize("state", [None, 5, {}, "a"], ids=str)
def test_states_that_are_none(llm, state):
    expected = text(llm)
    with pytest.raises(StateError, match="expected a LlamaState"):
        llm.load_state(state)
    assert text(llm) == expected


@pytest.mark.parametrize("value", ['a"b\\c\n', {"é": [1, '"']}, "\x00"], ids=["quote", "object", "nul"])
@pytest.mark.parametrize("keyword", ["const", "enum", "properties"])
def test_values_with_quotes_in_a_json_schema(llm, keyword, value):
    """Upstream's grammar of them does not parse."""
    schema = {"const": value} if keyword == "const" else {"enum": [value]}
    if keyword == "properties":
        value = {json.dumps(value): 1}
        schema = {"type": "object", "properties": {key: {"const": 1} for key in value}, "required": [*value]}
    asked = {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 100}
    done = llm.create_chat_completion(MESSAGES, **asked)
    assert json.loads(done["choices"][0]["message"]["content"]) == value


def test_unknown_types_of_a_response_and_of_a_forced_tool(llm):
    wrong = {"type": "object", "properties": {"a": {"type": "strng"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
    forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    for name, asked in (
        ("response_format", {"response_format": {"type": "json_object", "schema": wrong}}),
        ("tools", forced),
    ):
        with pytest.raises(GrammarError, match=f"a JSON schema in {name} with an unknown type"):
            llm.create_chat_completion(MESSAGES, **asked)


@pytest.mark.parametrize("pooling", [{}, {"pooling_type": 1}], ids=["rows", "pooled"])
def test_texts_to_embed(llama, pooling):
    """Upstream writes in front of its batch for a text without tokens; the process ended in close()."""
    llm = llama("dense-plain", embedding=True, **pooling)
    llm.tokenize = lambda text, *_: [] if text == b"" else [5]  # as of models without BOS
    expected = llm.embed(["a"])
    for wrong, words in (
        ("", "a text without tokens"),
        ([""], "a text without tokens"),
        (["abc", ""], "text 1 of 2 without tokens"),
        (5, "found (input|a text) of type int"),
        (None, "found (input|a text) of type NoneType"),
        (["a", 5], "text 1 of 2 of type int"),
        ("\udc80", "no Unicode character"),
    ):
        for call in (llm.embed, llm.create_embedding):
            with pytest.raises(OptionError, match=words):
                call(wrong)
    assert llm.embed([]) == []
    assert llm.embed([], return_count=True) == ([], 0)
    assert llm.embed(["a"]) == expected


def test_texts_to_embed_are_tokenised_once(llama):
    """The check for a text without tokens reads its beginning, and more only where that has none."""
    llm = llama("dense-plain", embedding=True, n_ctx=1024, pooling_type=1)
    tokenize, sizes = llm.tokenize, []

    def without_blanks(text, *given):
        sizes.append(len(text))
        return tokenize(text, *given) if text.strip() else []

    llm.tokenize = without_blanks
    texts = ["a word " * 60, "one " * 100]
    assert len(llm.embed(texts)) == 2
    assert sum(sizes) < 1.2 * sum(map(len, texts))
    assert llm.embed([" " * 50 + "a"])
    with pytest.raises(OptionError, match="a text without tokens"):
        llm.embed(" " * 50)
