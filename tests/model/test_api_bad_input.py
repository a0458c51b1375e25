"""Grammars, processors and objects that cannot go on: an exception with cause and fix, then exact again."""

from __future__ import annotations

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


@pytest.mark.parametrize("bias", [{"x": 1.0}, {5: "much"}, {10**6: 1.0}], ids=str)
def test_bias_that_is_none(llm, bias):
    expected = text(llm)
    with pytest.raises((ValueError, IndexError)):
        llm.create_completion("a", max_tokens=4, logit_bias=bias)
    assert text(llm) == expected


def test_prompt_that_does_not_fit(llm):
    expected = text(llm)
    with pytest.raises(OptionError, match=r"Requested tokens \(300\) exceed context window of 256"):
        llm.create_completion([5] * 300)
    with pytest.raises(OptionError, match="logprobs is not supported"):
        llm.create_completion("a", logprobs=2)
    assert text(llm) == expected
