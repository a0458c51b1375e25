"""Drafts that begin behind a verify, beside another sequence of the context: each text is its own.

Contract: dw_params.begin_drafts, src/drafters/mtp_ahead.cpp, dflash_ahead.cpp.
"""

from __future__ import annotations

import random

import pytest
from draftwood.engine import _capi
from draftwood.errors import ContextFullError

from bench.testing_api import propose_all, verify_all
from tests.model.engine.begun import engines_of, start, take_round, walk
from tests.model.rig import PROMPT


@pytest.mark.parametrize("unified", [False, True], ids=["", "unified"])
def test_sequences_that_are_verified_alone_and_together(tiny, unified):
    """Begun alone, gone on together."""
    r = tiny(engine=False, n_seq_max=2, n_ctx=512, kv_unified=unified)
    plain, prompts = tiny(drafter=_capi.DRAFTER_NONE, n_ctx=256), [PROMPT, PROMPT[::-1]]
    runs = [plain.reference(60, prompt).tokens for prompt in prompts]
    engines = engines_of(r)
    texts = [start(engine, r.sampler, prompt) for engine, prompt in zip(engines, prompts, strict=True)]
    draw = random.Random(3)
    for _ in range(40):
        who = draw.choice([0, 0, 0, 1, 1, 1, None])
        if who is not None:
            take_round(engines[who], texts[who], r.sampler)
            continue
        for engine in engines:
            engine.commit()
        propose_all(engines, [text[-1] for text in texts], [5, 5])
        verify_all(engines)
        for engine, text in zip(engines, texts, strict=True):
            walk(engine, text, r.sampler)
    for engine, text, run in zip(engines, texts, runs, strict=True):
        n = min(60, len(text))
        assert n > 20
        assert text[:n] == run[:n]
        assert engine.stats().begun_drafts > 0
        engine.close()


@pytest.mark.parametrize("n", [8, 96], ids=["waits", "fed"])
def test_another_sequence_reads_a_prompt_meanwhile(tiny, n):
    """The drafter's newest decode is then of the other sequence, and of a long prompt without results."""
    r, plain = tiny(engine=False, n_seq_max=2, n_ctx=1024), tiny(drafter=_capi.DRAFTER_NONE, n_ctx=512)
    run, draw = plain.reference(150).tokens, random.Random(4)
    alone, other = engines_of(r)
    other.reset()
    text = start(alone, r.sampler)
    while len(text) < 140:
        take_round(alone, text, r.sampler)
        if len(text) % 3 == 0 and other.n_past + n < 480:
            other.eval([draw.randrange(300, 4000) for _ in range(n)], other.n_past)
    assert text[:140] == run[:140]
    stats = alone.stats()
    assert stats.failed_drafts == stats.cold_rounds == 0
    assert stats.begun_drafts == stats.rounds - 1
    alone.close()
    other.close()


def test_a_full_cache(tiny):
    """Near its end nothing begins, since others need the cells; behind a reset it does again."""
    r = tiny(engine=False, n_seq_max=2, n_ctx=256, kv_unified=True)
    engines, before = engines_of(r), 0
    for _ in range(2):
        texts, full = [start(engine, r.sampler) for engine in engines], False
        while not full:
            for engine, text in zip(engines, texts, strict=True):
                try:
                    take_round(engine, text, r.sampler)
                except ContextFullError:
                    full = True
        now = sum(engine.stats().begun_drafts for engine in engines)
        assert now > before + 10
        before = now
    assert [engine.stats().failed_drafts for engine in engines] == [0, 0]
    for engine in engines:
        engine.close()
