"""The committed DFlash drafter through llama.cpp's C API alone: it loads, borrows, drafts, leaves no trace.

Quick, without torch; parity with the training module is in test_dflash_parity.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from draftwood import Llama
from draftwood.bench.rounds import generate_rounds, mean_tokens

from bench.models import heldout_prompts
from tools.tiny_moe import dflash_native
from tools.tiny_moe.dflash_native import Drafter, lib

MODELS = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
DRAFTER, TARGET = MODELS / "dflash-f16.gguf", MODELS / "tiny-moe-f16.gguf"
PROMPT, NEW = 128, 48


class Tokenizer:
    """The drafter's own vocabulary, which must be the target's."""

    def __init__(self, drafter: Drafter) -> None:
        self.vocab = lib.llama_model_get_vocab(drafter.model)

    def tokenize(self, text: bytes, add_bos: bool) -> list[int]:
        out = (lib.llama_token * (len(text) + 8))()
        n = lib.llama_tokenize(self.vocab, text, len(text), out, len(out), add_bos, False)
        return list(out[:n])


@pytest.fixture(scope="module")
def native() -> Iterator[Drafter]:
    with Drafter(TARGET, DRAFTER, n_ctx=256, threads=1) as drafter:
        yield drafter


@pytest.fixture(scope="module")
def prompts(native: Drafter) -> list[tuple[str, list[int]]]:
    return heldout_prompts(Tokenizer(native), 2, PROMPT)


def greedy(native: Drafter, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    native.clear()
    ids, rows = list(prompt), []
    features, logits = native.read(ids)
    for _ in range(NEW):
        rows.append(features)
        ids.append(int(logits[-1].argmax()))
        features, logits = native.read(ids[-1:], len(ids) - 1)
    return ids, np.concatenate(rows)


def test_the_file_is_small_and_names_what_it_reads(native: Drafter) -> None:
    assert DRAFTER.stat().st_size <= 5_000_000
    assert native.taps == [1, 4, 7, 9, 11]
    assert native.positions == 4
    assert native.n_vocab == 4096
    assert native.mask == 3


def test_drafts_are_accepted(native: Drafter, prompts: list[tuple[str, list[int]]]) -> None:
    """Eight drafts a round over two held-out prompts a category: 2 tokens a round at the very least."""
    by: dict[str, list[tuple[list[int], list[tuple[int, int]]]]] = {}
    for category, prompt in prompts:
        ids, features = greedy(native, prompt)
        by.setdefault(category, []).append((ids, native.rounds(ids, features, PROMPT, 8)))
    assert sorted(by) == ["json", "prose", "python"]
    for category, texts in by.items():
        assert mean_tokens(texts)[0] >= 2.0, category


def test_the_engine_drafts_the_same(native: Drafter, prompts: list[tuple[str, list[int]]]) -> None:
    """Rounds of `Llama` are those of the feeding in Python, but for near ties of other kernels."""
    drafting = {"speculation": "dflash", "drafter": DRAFTER, "draft_tokens": 8}
    drafting["draft_vocab"] = native.n_vocab  # the drafter in Python chooses among all tokens
    llm = Llama(str(TARGET), **drafting, n_ctx=256, n_threads=1, verbose=False)
    same = total = 0
    for _, prompt in prompts[::2]:
        ids, rounds = generate_rounds(llm, prompt, NEW, temp=0.0)
        features, _ = (native.clear(), native.read(ids))[1]
        wanted = native.rounds(ids, features, rounds[0][0], 8)
        same += len(set(rounds) & set(wanted))
        total += len(rounds)
    llm.close()
    assert total > 20
    assert same >= 0.95 * total


def test_a_short_head_accepts_as_much(prompts: list[tuple[str, list[int]]]) -> None:
    """An eighth of the vocabulary, as by default, beside all of it."""
    found = {}
    for size in (512, None, 4096):
        drafting = {"speculation": "dflash", "drafter": DRAFTER, "draft_tokens": 8, "draft_vocab": size}
        llm = Llama(str(TARGET), **drafting, n_ctx=256, n_threads=1, verbose=False)
        texts = [generate_rounds(llm, prompt, NEW, temp=0.0) for _, prompt in prompts]
        stats = llm.speculation_stats
        found[size] = ([ids for ids, _ in texts], stats.tokens_per_round, stats.draft_vocab)
        llm.close()
    assert [found[size][2] for size in found] == [512, 512, 0]
    assert found[512][0] == found[None][0] == found[4096][0]
    assert found[512][1] >= 0.97 * found[4096][1]


def test_drafting_needs_the_features(native: Drafter, prompts: list[tuple[str, list[int]]]) -> None:
    """Features of another text give other drafts: they are what the drafter goes by."""
    ids, features = greedy(native, prompts[0][1])
    _, other = greedy(native, prompts[-1][1])
    drafts = []
    for rows in (features, other):
        native.cut(0)
        native.inject(rows[:PROMPT], range(PROMPT))
        drafts.append(native.draft(ids[PROMPT], PROMPT, 8))
    assert drafts[0] != drafts[1]


def test_reading_layer_inputs_leaves_the_target_as_it_is(
    native: Drafter, prompts: list[tuple[str, list[int]]]
) -> None:
    ids = prompts[0][1]

    def logits() -> np.ndarray:
        native.clear()
        parts = [(0, 90), (90, 91), (91, 99)]
        return np.concatenate([_plain(native, ids[a:b], a) for a, b in parts])

    tapped = logits()
    try:
        for layer in native.taps:
            dflash_native._tap(native.target, layer, False)
        np.testing.assert_array_equal(logits(), tapped)
    finally:
        for layer in native.taps:
            dflash_native._tap(native.target, layer, True)


def _plain(native: Drafter, ids: list[int], first: int) -> np.ndarray:
    native._decode(native.target, np.arange(first, first + len(ids)), tokens=ids)
    return native._logits(native.target, len(ids))


def test_all_rows_of_a_block_must_be_outputs(native: Drafter, prompts: list[tuple[str, list[int]]]) -> None:
    """The pin's graph computes every row's logits, so leaving row 0 out moves each row up by one.

    If this fails the pin has learned to leave rows out, and callers may.
    """
    ids = prompts[0][1]
    native.clear()
    features, _ = native.read(ids)
    native.inject(features[:100], range(100))
    full = native.logits(ids[100], 100, 4)
    batch = lib.llama_batch_init(5, 0, 1)
    try:
        batch.n_tokens = 5
        for i, token in enumerate([ids[100], *[native.mask] * 4]):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, 100 + i, 1, int(i > 0)
            batch.seq_id[i][0] = 0
        assert lib.llama_decode(native.ctx, batch) == 0
        asked = np.ctypeslib.as_array(lib.llama_get_logits_ith(native.ctx, 1), shape=(native.n_vocab,)).copy()
    finally:
        lib.llama_batch_free(batch)
        native.cut(100)
    np.testing.assert_array_equal(asked, full[0])


def test_a_drafter_alone_makes_no_context() -> None:
    """It has neither embedding nor output matrix: without `ctx_other` llama.cpp refuses it."""
    model = dflash_native._load(DRAFTER)
    try:
        with pytest.raises(RuntimeError, match="no context"):
            dflash_native._make(model, 64, 1, None, None)
    finally:
        lib.llama_model_free(model)
