"""What the context holds after each token, and what callers do with it: go on, send, set back, decode.

Upstream's contract: the newest token is yielded before it is evaluated.
"""

from __future__ import annotations

import ctypes

import pytest
from draftwood import OptionError, UnsupportedError
from draftwood._llama_cpp import llama_cpp as native

from tests.model.texts import STOCK, P, fresh, text


def test_n_tokens_after_each_yield(either):
    tokens = []
    for k, token in enumerate(either.generate(P, temp=0.0), start=1):
        tokens.append(token)
        assert either.n_tokens == len(P) + k - 1
        assert either._input_ids.tolist() == [*P, *tokens[:-1]]
        assert list(either.eval_tokens) == [*P, *tokens[:-1]]
        if k == 40:
            break
    assert either.n_tokens == len(P) + 39


def continuations(tokens):
    """Prompts that share more or less of what the context holds after `tokens`."""
    held = [*P, *tokens]
    return {
        "longer": [*held, 11, 12, 13],
        "equal": held,
        "one less": held[:-1],
        "what is evaluated": held[:-1] if len(tokens) else held,
        "shorter": held[: len(P) + len(tokens) // 2],
        "the prompt": P,
        "changed end": [*held[:-1], (held[-1] + 1) % 380, 5],
        "changed middle": [*held[: len(held) // 2], 379, *held[len(held) // 2 :]],
        "another": [9, 8, 7],
        "one token": P[:1],
    }


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_break_and_go_on_with_another_prompt(on, off, k):
    tokens = text(off, k)
    for name, prompt in continuations(tokens).items():
        assert fresh(on, k) == tokens
        assert text(on, 25, prompt) == fresh(off, 25, prompt), name
        assert fresh(off, k) == tokens
        assert text(off, 25, prompt) == fresh(off, 25, prompt), f"{name}, off"


def test_chain_of_turns(llama):
    """Ten requests, each on top of the last, never evaluated from nothing."""
    on, off = llama(speculation="mtp", n_batch=64), llama(speculation="off", n_batch=64)
    prompt, evaluated = list(P), 0
    for turn in range(10):
        expected = fresh(off, 3 + turn, prompt, temp=0.7)
        assert text(on, 3 + turn, prompt, temp=0.7) == expected
        evaluated += len(prompt)
        prompt = [*prompt, *expected, turn, turn + 1]
    assert on.speculation_stats.prompt_tokens < evaluated / 2, "prefixes were reused"


@pytest.mark.parametrize("sent", [[], [5], [5, 6, 7]])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_send(on, off, at, sent):
    def conversation(llm):
        llm.reset()
        generator = llm.generate(P, temp=0.0)
        got = [next(generator)]
        for i in range(1, 30):
            got.append(generator.send(sent) if i % at == 0 else next(generator))
        generator.close()
        return got, llm.n_tokens, llm._input_ids.tolist()

    assert conversation(on) == conversation(off)


@pytest.mark.parametrize("k", range(1, 8))
def test_without_reset(on, off, k):
    """reset=False adds the prompt behind what is evaluated."""
    results = []
    for llm in (on, off):
        text(llm, k)
        results.append((text(llm, 20, [40, 41], reset=False), llm.n_tokens))
        results.append((text(llm, 5, [42], reset=False), llm.n_tokens))
    assert results[:2] == results[2:]
    assert results[1][1] == len(P) + (k - 1) + 2 + 19 + 1 + 4


def test_empty_prompt_goes_on_from_eval(llama, either):
    stock = llama(**STOCK)
    first = []
    for llm in (stock, either):
        llm.eval(P)
        first.append(text(llm, 1, [], reset=False))
    assert first[0] == first[1]
    assert text(either, 20, [*P, *first[1]]) == fresh(either, 20, [*P, *first[1]])


def test_generate_after_eval_of_the_same_prompt(either):
    expected = fresh(either, 20)
    either.reset()
    either.eval(P)
    assert text(either, 20) == expected


def test_empty_prompt_of_nothing(either):
    with pytest.raises(OptionError, match="a prompt without tokens"):
        text(either, 1, [])
    assert len(text(either, 3)) == 3


def test_low_level_loop(on, off):
    """eval and sample by hand, as old programs do it."""

    def loop(llm, temp):
        llm.reset()
        llm._sampler = None
        llm.eval(P)
        tokens = []
        for _ in range(20):
            tokens.append(llm.sample(temp=temp))
            llm.eval([tokens[-1]])
        return tokens

    expected = fresh(off, 20)
    assert loop(off, 0.0) == expected
    assert loop(on, 0.0) == expected
    assert loop(on, 0.8) == loop(off, 0.8)


@pytest.mark.parametrize("k", range(1, 9))
def test_sample_after_a_generation(on, off, k):
    """Between two requests sample() looks at the row that the last token came from."""
    seen = []
    for llm in (on, off):
        text(llm, k)
        llm._sampler = None
        seen.append([llm.sample(temp=0.0), llm.n_tokens, llm.sample(temp=0.0, idx=llm.n_tokens - 1)])
    assert seen[0] == seen[1]
    assert seen[0][0] == text(off, k)[-1]


def test_eval_set_back_by_hand(on, off):
    """n_tokens is public: setting it back is exact or refused, never garbage."""
    tokens = text(off, 30)
    for k in (1, 2, 3, 4, 5, 9):
        for back in range(8):
            fresh(on, k)
            n = on.n_tokens - back
            on.n_tokens = n
            follow = [*P, *tokens][n : n + 3]
            try:
                on.eval(follow)
            except UnsupportedError:
                assert back > 0
                continue
            on._sampler = None
            assert on.sample(temp=0.0) == fresh(off, 1, [*P, *tokens][: n + 3])[0]


def test_raw_decode_in_mid_generation(on, off):
    """Somebody decodes on the bare context between two tokens: an exception in words, then exact again."""
    for k in range(1, 8):
        generator = on.generate(P, temp=0.0)
        for _ in range(k):
            next(generator)
        array = (ctypes.c_int32 * 2)(5, 6)
        assert native.llama_decode(on.ctx, native.llama_batch_get_one(array, 2)) == 0
        with pytest.raises(UnsupportedError, match="expected it untouched"):
            next(generator)
        assert text(on, 20) == fresh(off, 20)


def test_positions_that_an_image_skips(on, off, llama):
    """Multimodal handlers decode by themselves and set n_tokens past the cells they filled (M-RoPE)."""
    stock = llama(**STOCK)
    found = []
    for llm in (on, off, stock):
        llm.reset()
        llm.eval(P[:3])
        llm.n_tokens = 10
        llm.eval(P[3:5])
        assert llm.n_tokens == 12
        found.append(text(llm, 12, prompt=[], reset=False))
    assert found[0] == found[1]
    assert len(found[2]) == 12
