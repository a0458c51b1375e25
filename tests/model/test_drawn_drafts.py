"""draw_drafts=True: text follows the model's distribution though drafts are drawn. src/tree/sampled.h."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from draftwood import Llama

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
PROMPT = [3, 14, 15, 92, 65, 35]
TOP_K, TEMP, N = 3, 1.3, 1500
SAMPLING = {"top_k": TOP_K, "temp": TEMP, "top_p": 1.0, "min_p": 0.0}


def exact(llm):
    """Return the probability of each text of three tokens after the prompt, from plain evaluations."""

    def following(tokens):
        llm.reset()
        llm.eval(tokens)
        logits = np.array(llm._ctx.get_logits_ith(-1)[: llm.n_vocab()], dtype=np.float64)
        best = np.argsort(-logits, kind="stable")[:TOP_K]
        weights = np.exp((logits[best] - logits[best[0]]) / TEMP)
        return dict(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))

    probabilities = {}
    for a, p_a in following(PROMPT).items():
        for b, p_b in following([*PROMPT, a]).items():
            for c, p_c in following([*PROMPT, a, b]).items():
                probabilities[a, b, c] = p_a * p_b * p_c
    return probabilities


def test_texts_come_as_often_as_without_drafts(llama_of):
    llm = llama_of("planted-moe", {}, speculation="mtp", draw_drafts=True, tree_budget=8, draft_tokens=3)
    plain = llama_of("planted-moe", {}, speculation="off")
    expected = exact(plain)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(N):
        llm.set_seed(seed + 1)
        found[tuple(itertools.islice(llm.generate(PROMPT, **SAMPLING), 3))] += 1
    assert set(found) <= set(expected)
    # rare ones together: a count of five is what the statistic needs
    common = {text for text, p in expected.items() if p * N >= 5}
    pairs = [(found[text], expected[text] * N) for text in common]
    rest = N - sum(count for count, _ in pairs), N - sum(e for _, e in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    statistic = sum((count - e) ** 2 / e for count, e in pairs) / (len(pairs) - 1)
    assert statistic < 2.2, sorted(pairs)  # 99.9th percentile of 12 degrees of freedom is 2.7, of 26 is 2.1
    stats = llm.speculation_stats
    assert stats.tree_rounds > N / 2
    assert 0 < stats.accepted < stats.drafted


def test_auto_draws_the_whole_budget(llama_of):
    settings = {"speculation": "auto", "draw_drafts": True, "tree_budget": 8, "draft_tokens": 3}
    llm = llama_of("planted-moe", {}, **settings)
    list(itertools.islice(llm.generate(PROMPT, **SAMPLING), 60))
    stats = llm.speculation_stats
    assert stats.drafted / stats.rounds == pytest.approx(7, abs=0.5)  # the last rounds may have less room


def test_greedy_text_is_that_of_plain_decode(llama_of):
    llm = llama_of("planted-moe", {}, speculation="mtp", draw_drafts=True, tree_budget=8, draft_tokens=3)
    plain = llama_of("planted-moe", {}, speculation="off")
    texts = [list(itertools.islice(each.generate(PROMPT, temp=0.0), 60)) for each in (llm, plain)]
    assert texts[0] == texts[1]


def test_the_same_seed_gives_the_same_text(llama_of):
    llm = llama_of("planted-moe", {}, speculation="mtp", draw_drafts=True, tree_budget=8, draft_tokens=3)
    texts = []
    for _ in range(2):
        llm.reset()
        llm.set_seed(5)
        texts.append(list(itertools.islice(llm.generate(PROMPT, **SAMPLING), 40)))
    assert texts[0] == texts[1]


def test_without_a_seed_texts_differ(llama_of):
    settings = {"speculation": "mtp", "draw_drafts": True, "tree_budget": 8, "draft_tokens": 3}
    llm = llama_of("planted-moe", {}, **settings, seed=0xFFFFFFFF)
    texts = []
    for _ in range(4):
        llm.reset()
        texts.append(tuple(itertools.islice(llm.generate(PROMPT, **SAMPLING), 40)))
    assert len(set(texts)) > 1


def test_a_grammar_and_penalties_bind_drawn_text(llama_of):
    from draftwood import LlamaGrammar

    llm = llama_of("planted-moe", {}, speculation="mtp", draw_drafts=True, tree_budget=8, draft_tokens=3)
    grammar = LlamaGrammar.from_string("root ::= [a-f]*", verbose=False)
    tokens = list(itertools.islice(llm.generate(PROMPT, temp=1.0, grammar=grammar, repeat_penalty=1.3), 30))
    text = llm.detokenize([t for t in tokens if t != llm.token_eos()]).decode()
    assert text
    assert set(text) <= set("abcdef")


@pytest.mark.parametrize("value", [1.5, "yes", None])
def test_bad_values(llama_of, value):
    with pytest.raises(ValueError, match="draw_drafts is"):
        llama_of("planted-moe", {}, draw_drafts=value)


def test_dflash_draws_too():
    """tiny-moe's drafter knows fewer positions than a shape may be deep."""
    llm = Llama(
        str(MODELS / "tiny-moe-f16.gguf"),
        drafter=str(MODELS / "dflash-f16.gguf"),
        speculation="dflash",
        draw_drafts=True,
        tree_budget=24,
        draft_tokens=20,
        n_ctx=256,
        n_threads=1,
        seed=3,
        verbose=False,
    )
    prompt = llm.tokenize(b"def read(path):")
    assert len(list(itertools.islice(llm.generate(prompt, temp=0.8), 200))) == 200
    stats = llm.speculation_stats
    assert stats.tree_rounds > 20
    assert stats.accepted > stats.rounds / 2
    llm.close()
