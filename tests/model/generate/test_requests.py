"""Completions and chats: the same result with drafting on and off, up to the context's end."""

from __future__ import annotations

import pytest
from draftwood import ContextFullError

from tests.model.texts import STOCK, P, drain, fresh, text


def same(on, off, call):
    """The two results without what is new at each call."""
    a, b = call(on), call(off)
    for result in (a, b):
        for part in result if isinstance(result, list) else [result]:
            part.pop("id")
            part.pop("created")
            part.pop("timings", None)
    assert a == b
    return a


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 3}], ids=str
)
def test_completion(on, off, settings):
    same(on, off, lambda llm: llm.create_completion("one two", max_tokens=40, **settings))
    same(on, off, lambda llm: llm("one two three", max_tokens=10, echo=True, **settings))
    chunks = same(
        on, off, lambda llm: list(llm.create_completion("one", max_tokens=30, stream=True, **settings))
    )
    assert len(chunks) > 5


def test_completion_stops_at_strings(on, off):
    whole = on.create_completion("one two", max_tokens=40, temperature=0.0)["choices"][0]["text"]
    stopped = 0
    for start in range(0, len(whole) - 3, 5):
        stop = whole[start : start + 3]
        result = same(
            on,
            off,
            lambda llm, stop=stop: llm.create_completion(
                "one two", max_tokens=40, temperature=0.0, stop=[stop]
            ),
        )
        stopped += result["choices"][0]["finish_reason"] == "stop"
    assert stopped > 2


def test_completion_with_bias_and_processor(on, off):
    same(
        on,
        off,
        lambda llm: llm.create_completion("ab", max_tokens=20, temperature=0.0, logit_bias={"100": 50.0}),
    )
    same(
        on,
        off,
        lambda llm: llm.create_completion("ab", max_tokens=20, repeat_penalty=1.3, frequency_penalty=0.5),
    )


def test_logprobs(llama):
    on, off = llama(speculation="mtp", logits_all=True), llama(speculation="off", logits_all=True)
    result = same(
        on, off, lambda llm: llm.create_completion("one two", max_tokens=30, temperature=0.0, logprobs=3)
    )
    assert len(result["choices"][0]["logprobs"]["tokens"]) > 5
    same(
        on,
        off,
        lambda llm: llm.create_completion("one", max_tokens=20, temperature=0.9, logprobs=2, echo=True),
    )
    same(
        on,
        off,
        lambda llm: list(
            llm.create_completion("one", max_tokens=20, temperature=0.0, logprobs=2, stream=True)
        ),
    )
    chat = [{"role": "user", "content": "hello"}]
    same(on, off, lambda llm: llm.create_chat_completion(chat, max_tokens=20, logprobs=True, top_logprobs=2))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chat(on, off, temperature):
    settings = {"max_tokens": 30, "temperature": temperature}
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    answer = same(on, off, lambda llm: llm.create_chat_completion(messages, **settings))
    reply = answer["choices"][0]["message"]["content"]
    second = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    same(on, off, lambda llm: llm.create_chat_completion(second, **settings))
    same(on, off, lambda llm: list(llm.create_chat_completion(second, stream=True, **settings)))


def test_chat_in_json(on, off):
    messages = [{"role": "user", "content": "an object"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    same(
        on,
        off,
        lambda llm: llm.create_chat_completion(
            messages,
            max_tokens=30,
            temperature=0.0,
            response_format={"type": "json_object", "schema": schema},
        ),
    )


def test_end_of_the_context(on, off, llama):
    def until_the_end(llm):
        llm.reset()
        tokens = []
        with pytest.raises(RuntimeError, match="llama_decode returned 1") as caught:
            drain(llm.generate(P, temp=0.0), tokens)
        return tokens, llm.n_tokens, str(caught.value), type(caught.value)

    a, b, stock = until_the_end(on), until_the_end(off), until_the_end(llama(**STOCK))
    assert a == b
    assert a[3] is ContextFullError
    assert len(a[0]) == len(stock[0]) == 256 - len(P) + 1
    assert a[1] == stock[1] == 256
    assert text(on, 20) == fresh(off, 20)


def test_prompt_longer_than_the_context(either):
    long = [1] * 300
    with pytest.raises(ContextFullError, match="context of 256 tokens"):
        text(either, 3, long)
    assert len(text(either, 5)) == 5
    with pytest.raises(ValueError, match="exceed context window"):
        either.create_completion("a b c d e f g h " * 60, max_tokens=4)


def test_completion_stops_at_the_context(on, off):
    results = [
        llm.create_completion("ab " * 60, max_tokens=None, temperature=0.0, stop=["\0\0\0"])
        for llm in (on, off)
    ]
    assert results[0]["choices"] == results[1]["choices"]
    assert results[0]["usage"] == results[1]["usage"]
