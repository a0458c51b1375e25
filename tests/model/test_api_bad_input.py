"""Grammars, processors and objects that cannot go on: an exception with cause and fix, then exact again."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from draftwood import GrammarError, OptionError
from draftwood._llama_cpp.llama_grammar import LlamaGrammar

from tests.model.rig import PROMPT
from tests.model.texts import Boom, text

BROKEN = {
    "not closed": "root ::= (",
    "unknown rule": "root ::= foo",
    "calls itself first": 'root ::= root "a"',
    "no root": 'foo ::= "a"',
}


@pytest.mark.parametrize("name", BROKEN)
def test_grammar_that_does_not_parse(llm, name, capfd):
    """Upstream puts a null pointer into the sampler chain, and the process ends."""
    expected = text(llm)
    grammar = LlamaGrammar.from_string(BROKEN[name], verbose=False)
    for call in (
        lambda: text(llm, grammar=grammar),
        lambda: llm.create_completion("a", max_tokens=4, grammar=grammar),
        lambda: list(llm.create_completion("a", max_tokens=4, grammar=grammar, stream=True)),
    ):
        with pytest.raises(GrammarError, match="cannot parse, or without its root rule"):
            call()
        assert text(llm) == expected
    capfd.readouterr()  # llama.cpp's own words


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("end", ["abc", "a\\x00"])
def test_grammar_that_dead_ends(llm, temp, end):
    """Nothing is left: the processor bans what the grammar wants, or no token is that character."""

    def ban(ids, scores):
        for token in range(380):
            if b"b" in llm.detokenize([token]):
                scores[token] = -np.inf
        return scores

    expected = text(llm)
    got = []
    grammar = LlamaGrammar.from_string(f'root ::= "{end}"', verbose=False)
    settings = {"temp": temp, "grammar": grammar, "logits_processor": [ban]}
    with pytest.raises(GrammarError, match="no token that the grammar allows here"):
        got += llm.generate(list(PROMPT), **settings)
    assert text(llm) == expected
    with pytest.raises(GrammarError, match="no token that the grammar allows here"):
        llm.create_completion("a", max_tokens=9, temperature=temp, grammar=grammar, logits_processor=[ban])
    llm.reset()
    assert text(llm) == expected


def test_grammar_that_ends_is_no_dead_end(llm):
    grammar = LlamaGrammar.from_string('root ::= "ab"', verbose=False)
    done = llm.create_completion("a", max_tokens=20, temperature=0.0, grammar=grammar)["choices"][0]
    assert (done["text"], done["finish_reason"]) == ("ab", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_processor_that_raises_in_a_completion(llm, stream, at):
    expected = text(llm)
    calls = []

    def processor(ids, scores):
        calls.append(1)
        if len(calls) == at:
            raise Boom("cause")
        return scores

    asked = {"max_tokens": 9, "temperature": 0.0, "stream": stream, "logits_processor": [processor]}
    with pytest.raises(Boom, match="cause"):
        list(llm.create_completion("one two", **asked))
    assert len(calls) == at
    assert text(llm) == expected
    calls.clear()
    grammar = LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
    with pytest.raises(Boom):  # in a grammar's company too
        list(llm.create_completion("one two", grammar=grammar, **asked))
    assert text(llm) == expected


NAN = float("nan")


@pytest.mark.parametrize(
    "bias", [{"x": 1.0}, {5: "much"}, {10**6: 1.0}, {384: 1.0}, {-1: 1.0}, {5: NAN}, [5]], ids=str
)
def test_bias_that_is_none(llm, bias):
    expected = text(llm)
    with pytest.raises(OptionError, match=r"logit_bias.*expected") as caught:
        llm.create_completion("a", max_tokens=4, logit_bias=bias)
    assert "tokenize()" in caught.value.hint
    assert text(llm) == expected


def test_bias_that_bans(llm):
    banned = llm.create_completion("a", max_tokens=4, temperature=0.0, logit_bias={5: -np.inf, 6.0: 1})
    assert banned["choices"][0]["text"]


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repeat_penalty", "mirostat_tau"])
def test_numbers_that_are_none(llm, name):
    expected = text(llm)
    asked = {"max_tokens": 4, name: NAN}
    for call in (
        lambda: llm.create_completion("a", **asked),
        lambda: list(llm.create_completion("a", stream=True, **asked)),
        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}], **asked),
        lambda: llm.sample(temp=NAN),
    ):
        llm._sampler = None
        with pytest.raises(OptionError, match="is nan; expected a finite number"):
            call()
    assert text(llm) == expected


def test_a_text_as_a_grammar(llm):
    expected = text(llm)
    with pytest.raises(OptionError, match="grammar is of type str; expected a LlamaGrammar"):
        llm.create_completion("a", max_tokens=4, grammar='root ::= "a"')
    assert text(llm) == expected


DEEP = {
    "groups": lambda n: "root ::= " + "(" * n + '"a"' + ")" * n,
    "rules": lambda n: "".join(f"r{i} ::= r{i + 1}\n" for i in range(n)) + f'r{n} ::= "a"\nroot ::= r0',
    "optional": lambda n: 'root ::= "a" ' + '("b" ' * n + ")?" * n,
}


def test_a_grammar_too_deep(llm):
    """llama.cpp's parser is recursive: the process ended."""
    expected = text(llm)
    grammar = LlamaGrammar.from_string(DEEP["groups"](50_000), verbose=False)
    with pytest.raises(GrammarError, match="nested 50000 deep; expected at most 2000"):
        llm.create_completion("a", max_tokens=4, grammar=grammar)
    assert text(llm) == expected


@pytest.mark.parametrize("stack", [512 << 10, 8 << 20])
@pytest.mark.parametrize("name", DEEP)
def test_deep_grammars_within_the_limits(gguf, python, tmp_path, name, stack):
    """Whatever stack the caller's thread has: schemas with maxLength=900 are such grammars."""
    size = {"rules": 200_000, "groups": 2000, "optional": 900}[name]
    file = tmp_path / "deep.gbnf"
    file.write_text(DEEP[name](size))
    done = python(
        """
        import sys, threading
        from draftwood import Llama, LlamaGrammar

        grammar = LlamaGrammar.from_string(open(sys.argv[2]).read(), verbose=False)

        def run():
            llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
            done = llm.create_completion("a", max_tokens=1, temperature=0.0, grammar=grammar)
            print(done["choices"][0]["text"])
            llm.close()

        threading.stack_size(int(sys.argv[3]))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        """,
        *(gguf("planted-moe"), str(file), str(stack)),
    )
    assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr[-1500:]


def nested_schema(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def test_json_schemas_too_deep(llm):
    expected = text(llm)
    user = [{"role": "user", "content": "x"}]
    schemas = (
        (nested_schema(5000), "nested more than 200 deep"),
        ({"type": "string", "maxLength": 50_000}, "maxLength=50000"),
    )
    for schema, found in schemas:
        tool = {"name": "f", "description": "", "parameters": schema}
        tools = [{"type": "function", "function": tool}]
        choice = {"type": "function", "function": {"name": "f"}}
        for asked in (
            {"response_format": {"type": "json_object", "schema": schema}},
            {"tools": tools, "tool_choice": choice},
            {"functions": [tool], "function_call": {"name": "f"}},
        ):
            with pytest.raises(GrammarError, match=found):
                llm.create_chat_completion(user, max_tokens=2, **asked)
        with pytest.raises(GrammarError, match=f"{found}|too deep for Python"):
            LlamaGrammar.from_json_schema(_json(schema), verbose=False)
    assert text(llm) == expected


def _json(schema):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        return json.dumps(schema)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "schema", [nested_schema(66), {"type": "string", "maxLength": 900}], ids=["deep", "long"]
)
def test_json_schemas_within_the_limits(llm, schema):
    asked = {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 2}
    done = llm.create_chat_completion([{"role": "user", "content": "x"}], **asked)
    assert done["choices"][0]["message"]["content"].strip()[:1] == ("{" if "properties" in schema else '"')


def test_prompt_that_does_not_fit(llm):
    expected = text(llm)
    with pytest.raises(OptionError, match=r"Requested tokens \(300\) exceed context window of 256"):
        llm.create_completion([5] * 300)
    with pytest.raises(OptionError, match="logprobs is not supported"):
        llm.create_completion("a", logprobs=2)
    assert text(llm) == expected
