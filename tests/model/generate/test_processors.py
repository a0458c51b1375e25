"""Logits processors, stopping criteria and grammars: what they see, and what happens when they raise."""

from __future__ import annotations

import numpy as np
import pytest
from draftwood._llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
from draftwood._llama_cpp.llama_grammar import LlamaGrammar

from tests.model.texts import STOCK, Boom, P, drain, fresh, text


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit, StopIteration])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_processor_that_raises(either, off, at, error):
    calls = []

    def processor(ids, scores):
        calls.append(ids.tolist())
        if len(calls) == at:
            raise error("stop")
        return scores

    generator = either.generate(P, temp=0.0, logits_processor=LogitsProcessorList([processor]))
    expected = RuntimeError if error is StopIteration else error  # PEP 479
    got = []
    with pytest.raises(expected):
        drain(generator, got)
    assert len(calls) == at, "no processor runs after one has raised"
    assert calls[-1] == [*P, *got]
    assert either.n_tokens == len(P) + at - 1
    assert text(either, 20, calls[-1]) == fresh(off, 20, calls[-1])


def test_second_processor_is_not_called_after_the_first_raised(either):
    called = []

    def first(ids, scores):
        raise Boom

    def second(ids, scores):
        called.append(1)
        return scores

    with pytest.raises(Boom):
        text(either, 3, logits_processor=[first, second])
    assert not called


@pytest.mark.parametrize("settings", [{"speculation": "mtp"}, {"speculation": "off"}, STOCK], ids=str)
def test_no_exception_of_a_processor_is_lost(llama, settings):
    llm = llama(**settings)

    def bad(ids, scores):
        raise Boom("lost?")

    with pytest.raises(Boom, match="lost"):
        text(llm, 3, logits_processor=[bad])
    llm.reset()
    llm.eval(P)
    llm._sampler = None
    with pytest.raises(Boom, match="lost"):
        llm.sample(logits_processor=[bad])
    assert len(text(llm, 5)) == 5


@pytest.mark.parametrize(
    "result", [None, "text", [1.0, 2.0], np.zeros((3, 3))], ids=["none", "text", "short", "2d"]
)
def test_processor_that_returns_nonsense(either, result):
    with pytest.raises((TypeError, ValueError)):
        text(either, 3, logits_processor=[lambda ids, scores: result])
    assert len(text(either, 5)) == 5


def recorded(llm, n=40, **settings):
    calls, criteria = [], []

    def processor(ids, scores):
        calls.append((ids.tolist(), scores.copy(), llm.n_tokens))
        return scores

    def criterion(ids, scores):
        criteria.append((ids.tolist(), llm.n_tokens, scores.shape))
        return False

    tokens = text(
        llm, n, logits_processor=[processor], stopping_criteria=StoppingCriteriaList([criterion]), **settings
    )
    return tokens, calls, criteria


def test_processors_and_criteria_see_each_prefix_once(llama, on, off):
    stock = recorded(llama(**STOCK))
    for temp in (0.0, 0.8):
        a, b = recorded(on, temp=temp), recorded(off, temp=temp)
        assert a[0] == b[0]
        assert a[2] == b[2]
        assert [c[0] for c in a[1]] == [[*P, *a[0][:i]] for i in range(40)]
        for x, y in zip(a[1], b[1], strict=True):
            assert x[0] == y[0]
            assert x[2] == y[2]
            assert np.array_equal(x[1], y[1])
        on.reset()
        off.reset()
    # upstream's own loop: the same prefixes, counts and shapes
    assert [len(c[0]) for c in stock[1]] == [len(c[0]) for c in a[1]]
    assert [c[2] for c in stock[1]] == [c[2] for c in a[1]]
    assert [(len(ids), n, shape) for ids, n, shape in stock[2]] == [
        (len(ids), n, shape) for ids, n, shape in a[2]
    ]


def test_stateful_processor(on, off):
    """One that counts its calls and acts on the count, as outlines and guidance do."""

    def banning():
        banned = []

        def processor(ids, scores):
            banned.append(int(np.argmax(scores)) if len(banned) % 3 == 0 else -1)
            for token in banned:
                if token >= 0:
                    scores[token] = -np.inf
            return scores

        return [processor]

    assert text(on, 60, logits_processor=banning()) == text(off, 60, logits_processor=banning())
    assert fresh(on, 40, logits_processor=banning(), temp=0.9) == fresh(
        off, 40, logits_processor=banning(), temp=0.9
    )


@pytest.mark.parametrize("at", range(8))
def test_criterion_that_stops(either, off, at):
    expected = fresh(off, 30)
    seen = []

    def criterion(ids, scores):
        seen.append(ids.tolist())
        return len(seen) > at

    either.reset()
    tokens = list(either.generate(P, temp=0.0, stopping_criteria=StoppingCriteriaList([criterion])))
    assert tokens == expected[:at]
    assert either.n_tokens == len(P) + at
    assert text(either, 30) == expected


def test_criterion_that_raises(either, off):
    def criterion(ids, scores):
        if len(ids) > len(P) + 4:
            raise Boom
        return False

    got = []
    with pytest.raises(Boom):
        drain(either.generate(P, temp=0.0, stopping_criteria=StoppingCriteriaList([criterion])), got)
    expected = fresh(off, 30)
    assert got == expected[:5]
    assert text(either, 30) == expected


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize(
    "rules", ["root ::= [a-e]+", 'root ::= ("abc" | "de" [0-9])+', 'root ::= "{" [a-z]+ ":" [0-9]+ "}" root']
)
def test_grammar(on, off, rules, temp):
    def run(llm):
        return fresh(llm, 40, grammar=LlamaGrammar.from_string(rules, verbose=False), temp=temp)

    tokens = run(off)
    assert run(on) == tokens
    written = off.detokenize(tokens).decode()
    assert set(written) <= set("abcdefghijklmnopqrstuvwxyz0123456789{}:")
    assert len(written) >= 20
