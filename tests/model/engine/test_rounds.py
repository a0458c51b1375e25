"""Rounds by the C API: every accepted length really happens, and rows are bit-equal to plain decoding.

The reference is a context without recurrent snapshots that decodes one token at a time (rig.Run). Drafts
come from an oracle. Contract: src/include/draftwood.h.
"""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.errors import DraftwoodError

from tests.model.engine.calls import HYBRIDS, MTP, NONE
from tests.model.rig import PROMPT, check_plain, follow


@pytest.mark.parametrize("drafter", [NONE, MTP], ids=["no-drafter", "mtp"])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_every_accepted_length(rig, run_of, preset, drafter):
    run = run_of(preset)
    r = rig(preset, drafter=drafter)
    for accept in range(6):
        for take in range(1, accept + 2):
            assert r.start() == run.tokens[0]
            done = follow(r, run, 1, accept, take)
            check_plain(r, run, done)


@pytest.mark.parametrize("preset", [*HYBRIDS, "moe-plain", "odd", "much-attention", "deep"])
def test_long_walk_of_mixed_rounds(rig, run_of, preset):
    run = run_of(preset)
    r = rig(preset, drafter=MTP if preset != "moe-plain" else NONE)
    r.start()
    chance, done = random.Random(1), 1
    while done < 150:
        accept = chance.randrange(6)
        done = follow(r, run, done, accept, chance.choice([None, None, chance.randrange(1, accept + 2)]))
    check_plain(r, run, done)
    stats = r.engine.stats()
    assert 0 < stats.accepted < stats.drafted


def test_longest_draft(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, draft_tokens=_capi.MAX_DRAFT)
    for accept in (0, 1, 31, 62, 63):
        r.start()
        done = follow(r, run, 1, accept, depth=_capi.MAX_DRAFT)
        check_plain(r, run, done)


def test_no_consumer_at_all(started):
    """A round whose rows nobody samples keeps its root, which was emitted before."""
    r, run = started
    done = follow(r, run, 1, 5, take=0)
    check_plain(r, run, done + 1)


def test_drafts_do_not_depend_on_how_the_prefix_came(rig, run_of):
    """The drafter saw only accepted pairs: it proposes what it would after evaluating the prefix anew."""
    run = run_of("planted-moe")
    fresh, r = rig("planted-moe", drafter=MTP), rig("planted-moe", drafter=MTP)
    r.start()
    chance, done, drafts = random.Random(2), 1, 0
    for _ in range(12):
        done = follow(r, run, done, chance.randrange(6))
        fresh.engine.reset()
        fresh.engine.eval([*run.prompt, *run.tokens[: done - 1]], 0)
        drafts += fresh.engine.propose(run.tokens[done - 1])
        assert r.engine.propose(run.tokens[done - 1]) == len(fresh.engine.draft())
        assert r.engine.draft() == fresh.engine.draft()
    assert drafts == 60


def test_own_drafts_are_accepted_and_exact(rig, run_of):
    run = run_of("planted-moe")
    r = rig("planted-moe", drafter=MTP)
    last, done = r.start(), 1
    while done < 120:
        r.engine.propose(last)
        r.engine.verify()
        while r.engine.row() is not None:
            last, logits = r.sample()
            assert last == run.tokens[done]
            assert np.array_equal(logits, run.rows[done])
            done += 1
    assert r.engine.stats().tokens_per_round > 1.5


def seeded_chain():
    chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_temp(1.5))
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_dist(7))
    return chain


@pytest.mark.parametrize("tree_budget", [0, 12])
@pytest.mark.parametrize("chain", [native.llama_sampler_init_greedy, seeded_chain], ids=["greedy", "seeded"])
def test_sampling_outside_is_sampling_inside(rig, chain, tree_budget):
    """A caller samples rows by index and says what came out: text, rows and counters are those of dw_next."""
    found = []
    for outside in (False, True):
        r, sampler = rig("planted-moe", drafter=MTP, tree_budget=tree_budget), chain()
        r.engine.eval(PROMPT, 0)
        text, rows = [], []
        while len(text) < 80:
            if text:
                r.engine.propose(text[-1])
                r.engine.verify()
            while (row := r.engine.row()) is not None:
                rows.append(r.logits(row[0]))
                if outside:
                    text.append(native.llama_sampler_sample(sampler, r.ctx, row[0]))
                    r.engine.took(text[-1])
                else:
                    text.append(r.engine.next(sampler))
        native.llama_sampler_free(sampler)
        stats = r.engine.stats()
        found.append((text, np.stack(rows), stats.accepted, stats.emitted, stats.accepted_by_depth))
    (text, rows, *counts), (text_outside, rows_outside, *counts_outside) = found
    assert text == text_outside
    assert np.array_equal(rows, rows_outside)
    assert counts == counts_outside
    assert counts[0] > 0


def test_a_token_that_is_none_leaves_the_row(started):
    r, run = started
    r.open_round(run, 3)
    before = r.engine.row()
    for token in (-1, r.n_vocab):
        with pytest.raises(DraftwoodError, match="expected 0 to"):
            r.engine.took(token)
    assert r.engine.row() == before
    r.engine.took(run.tokens[1])
    assert r.engine.row() != before


@pytest.mark.parametrize("n", [1, 2, 5, 7, 63, 64])
def test_eval_rows_equal_single_steps(started, n):
    r, run = started
    r.engine.eval(run.tokens[:n], len(PROMPT), all_logits=True)
    for i in range(n):
        assert np.array_equal(r.logits(i), run.rows[i + 1]), f"row {i}"
    check_plain(r, run, n + 1)


def test_attention_only_models_roll_back_anywhere(rig, llama_arch):
    """Their memory can be cut at any position: given drafts need no snapshots, and every trim is exact."""
    r = rig(llama_arch, n_rs_seq=0)
    run = r.reference(120)
    for accept in range(6):
        r.start()
        done = follow(r, run, 1, accept)
        check_plain(r, run, done)
    text = [*run.prompt, *run.tokens]
    r.engine.reset()
    r.engine.eval(text[:60], 0)
    for keep in (59, 50, 50, 20, 13):
        assert r.engine.trim(keep)
        assert r.held == r.engine.n_past == keep
        check_plain(r, run, keep - len(run.prompt) + 1, 5)


def test_draft_p_min_ends_a_draft_early(rig):
    every = rig("planted-moe", drafter=MTP)
    assert every.engine.propose(every.start()) == 5
    none = rig("planted-moe", drafter=MTP, draft_p_min=1.0)
    assert none.engine.propose(none.start()) == 0


def test_max_draft_bounds(rig):
    r = rig("planted-moe", drafter=MTP)
    last = r.start()
    for asked, given in ((0, 0), (1, 1), (3, 3), (5, 5), (63, 5), (10**9, 5)):
        assert r.engine.propose(last, asked) == given
        assert len(r.engine.draft()) == given


def test_stats_count(started):
    r, run = started
    done = 1
    for accept in (0, 3, 5):
        done = follow(r, run, done, accept)
    done = follow(r, run, done, 4, take=2)
    stats = r.engine.stats()
    assert (stats.rounds, stats.drafted, stats.prompt_tokens, stats.cold_rounds) == (4, 20, 12, 0)
    assert stats.accepted == 0 + 3 + 5 + 2
    assert stats.emitted == done
    assert stats.drafted_by_depth == (4, 4, 4, 4, 4)
    assert stats.accepted_by_depth == (3, 3, 2, 1, 1)
    r.engine.stats_reset()
    empty = r.engine.stats()
    assert (empty.rounds, empty.emitted, empty.exact_batches, empty.drafted_by_depth) == (0, 0, 0, ())


def test_stats_have_the_times_of_parts(rig):
    start = time.perf_counter()
    r = rig("planted-moe", drafter=MTP)
    last = r.start()
    r.engine.stats_reset()
    r.engine.eval([last], len(PROMPT))
    last = r.engine.next(r.sampler)
    for _ in range(5):
        r.engine.propose(last)
        r.engine.verify()
        while r.engine.row() is not None:
            last = r.engine.next(r.sampler)
        r.engine.commit()
    wall = time.perf_counter() - start
    stats = r.engine.stats()
    parts = [getattr(stats, f"{part}_seconds") for part in ("prompt", "draft", "verify", "sample", "commit")]
    assert min(parts) > 0
    assert sum(parts) < wall


def test_exact_batches_are_counted_up_to_64_rows(rig):
    r = rig()
    counts = []
    for n in (1, 64, 65, 128):
        r.engine.reset()
        r.engine.stats_reset()
        r.engine.eval([1] * n, 0)
        counts.append(r.engine.stats().exact_batches)
    assert counts == [1, 1, 0, 0]
    off = rig(exact_rows=0)
    off.engine.eval([1, 2], 0)
    assert off.engine.stats().exact_batches == 0
