"""`Llama.generate` with drafting on and off: the same tokens and scores, whatever the sampling or the model.

The planted model accepts about two of three drafts, so rounds of every length occur (checked below).
"""

from __future__ import annotations

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native

from tests.model.texts import STOCK, P, fresh, text

SAMPLING = {
    "greedy": {"temp": 0.0},
    "temp": {"temp": 0.8},
    "hot": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "distribution": {"temp": -1.0},
    "top-k": {"temp": 0.8, "top_k": 3},
    "top-p": {"temp": 0.9, "top_p": 0.5, "min_p": 0.0},
    "min-p": {"temp": 0.9, "min_p": 0.2},
    "typical": {"temp": 0.9, "typical_p": 0.4},
    "mirostat-1": {"temp": 0.8, "mirostat_mode": 1},
    "mirostat-2": {"temp": 0.8, "mirostat_mode": 2, "mirostat_tau": 3.0},
    "repeat": {"temp": 0.8, "repeat_penalty": 1.4},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": 0.7},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_the_same(on, off, name):
    expected = text(off, 60, **SAMPLING[name])
    assert text(on, 60, **SAMPLING[name]) == expected
    assert fresh(on, 60, **SAMPLING[name]) == expected, "one seed, one text"
    assert fresh(off, 60, **SAMPLING[name]) == expected


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_the_same_where_steps_are_queued(queues, off, name):
    """Only greedy steps without penalties are."""
    expected = text(off, 60, **SAMPLING[name])
    assert text(queues, 60, **SAMPLING[name]) == expected
    assert fresh(queues, 60, **SAMPLING[name]) == expected
    stats = queues.speculation_stats
    assert stats.queued_steps == (2 * 58 if name == "greedy" else 0)
    assert stats.dropped_steps == (2 if name == "greedy" else 0)


@pytest.mark.parametrize("small", ["n_batch", "n_ubatch", "n_ctx"])
def test_batches_of_one_row_queue_no_steps(queueing, small):
    """llama.cpp ends the process where a context for two sequences has them."""
    llm = queueing(**{small: 1}, speculation="off")
    assert len(text(llm, 10, P[:1])) == 10
    assert llm.speculation_stats.queued_steps == 0


@pytest.mark.parametrize("preset", ["planted-dense", "moe-mtp", "odd", "q4k", "tied-mtp", "mtp-heads"])
def test_presets(llama, preset):
    on, off = llama(preset, speculation="mtp"), llama(preset, speculation="off")
    assert text(on, 60) == text(off, 60)
    assert text(on, 60, temp=0.8) == text(off, 60, temp=0.8)


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 16, 63])
def test_draft_lengths(llama, draft_tokens):
    on, off = llama(speculation="mtp", draft_tokens=draft_tokens), llama(speculation="off")
    assert text(on, 80, temp=0.5) == text(off, 80, temp=0.5)
    assert len(on.speculation_stats.drafted_by_depth) == draft_tokens


def test_draft_p_min(llama, off):
    unsure = llama(speculation="mtp", draft_tokens=5, draft_p_min=0.5)
    assert text(unsure, 80) == text(off, 80)
    stats = unsure.speculation_stats
    assert 0 < stats.drafted < 5 * stats.rounds


def test_rounds_of_every_length_occur(on):
    """Without this the tests of this file would prove little."""
    text(on, 200)
    stats = on.speculation_stats
    reached, taken = stats.drafted_by_depth, stats.accepted_by_depth
    ends = [reached[0] - taken[0], *(taken[i] - taken[i + 1] for i in range(4)), taken[4]]
    assert all(n > 0 for n in ends), f"rounds by accepted length: {ends}"
    assert stats.cold_rounds == 0
    assert stats.emitted == 200
    assert stats.tokens_per_round > 1.5
    assert stats.to_dict()["tokens_per_round"] == stats.tokens_per_round
    on.reset_speculation_stats()
    assert on.speculation_stats.rounds == 0


def test_seeds(on, off):
    texts = []
    for seed in (1, 2):
        for llm in (on, off):
            llm.set_seed(seed)
            texts.append(fresh(llm, 40, temp=0.9))
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert texts[0] != texts[2]


def test_scores_are_equal_bit_for_bit(llama):
    on, off = llama(speculation="mtp", logits_all=True), llama(speculation="off", logits_all=True)
    for n in (1, 2, 3, 4, 5, 6, 7, 30):
        assert fresh(on, n) == fresh(off, n)
        assert on.n_tokens == off.n_tokens
        assert np.array_equal(on._scores, off._scores), f"after {n} tokens"
        assert on.eval_logits == off.eval_logits


def test_stock_kernels_also_draft(llama):
    """exact=False gives llama.cpp's fast kernels; every token is still the target's own sample."""
    fast = llama(speculation="mtp", exact=False)
    assert len(text(fast, 60)) == 60
    assert fast.speculation_stats.exact_batches == 0
    assert fast.speculation_stats.accepted > 0
    assert llama(**STOCK).speculation_stats is None


def test_two_objects_side_by_side(llama, off):
    expected = text(off, 40)
    a, b = llama(speculation="mtp"), llama(speculation="mtp", draft_tokens=2)
    streams = [a.generate(P, temp=0.0), b.generate(P, temp=0.0)]
    pairs = [(next(streams[0]), next(streams[1])) for _ in range(40)]
    assert [x for x, _ in pairs] == [y for _, y in pairs] == expected


def test_verifies_try_n_threads(llama, off):
    """They are chosen by time; the text does not depend on them, and the context keeps what it was given."""
    on = llama(speculation="mtp", draft_tokens=3, n_threads=1, n_threads_batch=2)
    for temp in (0.0, 0.8):
        assert text(on, 60, temp=temp) == text(off, 60, temp=temp)
    stats = on.speculation_stats
    assert 0 < stats.step_thread_rounds <= stats.rounds
    ctx = on._ctx.ctx
    assert (native.llama_n_threads(ctx), native.llama_n_threads_batch(ctx)) == (1, 2)


def test_no_line_of_log_comes_with_a_verify(llama, capfd):
    on = llama(speculation="mtp", draft_tokens=3, n_threads=1, n_threads_batch=2, verbose=True)
    capfd.readouterr()
    text(on, 60)
    assert on.speculation_stats.step_thread_rounds > 0
    assert "set_n_threads" not in capfd.readouterr().err


def test_one_thread_count_leaves_nothing_to_try(on):
    text(on, 60)
    assert on.speculation_stats.step_thread_rounds == 0
