"""Drafts that begin behind a verify whose tokens nobody knows yet: same text, drafts as from the whole text.

On a CPU such a draft is computed at once: what is tested is which rows and pairs are whose.
Contract: dw_params.begin_drafts, src/drafters/mtp_ahead.cpp.
"""

from __future__ import annotations

import random

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Curve
from draftwood.errors import ContextFullError

from bench.testing_api import next_scheduled
from tests.model.engine.begun import BEGINS, DFLASH_ALONE, MTP_ALONE, begin, begun, open_round, text_of, turn
from tests.model.engine.queued import ON_TREES
from tests.model.rig import PROMPT
from tests.unit.cost_curves import curve


@pytest.mark.parametrize("flash", [False, True], ids=["", "flash"])
def test_drafts_are_those_of_the_whole_text(tiny, flash):
    """What the drafter holds is what it takes of a prompt; the text is that of plain decoding."""
    r, whole = tiny(flash=flash), tiny(flash=flash)
    plain = tiny(flash=flash, drafter=_capi.DRAFTER_NONE).reference(80).tokens
    text, lengths = [begin(r)], set()
    while len(text) < 80:
        n = r.engine.n_past
        tokens, drafted = turn(r, text[-1])
        whole.engine.reset()
        whole.engine.eval([*PROMPT, *text[:-1]], 0)
        assert n == len(PROMPT) + len(text) - 1
        whole.engine.propose(text[-1])
        assert drafted == whole.engine.draft(), f"{len(text)} tokens"
        text += tokens
        lengths.add(len(tokens))
    assert text[:80] == plain
    assert len(lengths) >= 3, "rounds that keep few tokens and many"
    stats = r.engine.stats()
    assert stats.begun_drafts == stats.rounds - 1


@ON_TREES
@pytest.mark.parametrize("preset", ["moe-mtp", "dense-mtp"])
def test_the_text_is_that_without(rig, preset):
    run = rig(preset).reference(60)
    r = rig(preset, **BEGINS)
    assert text_of(r, begin(r), 60)[:60] == run.tokens
    assert begun(r) > 40


@ON_TREES
@pytest.mark.parametrize(
    "settings",
    [
        {"begin_drafts": False},
        {"results": _capi.RESULTS_AUTO},  # a CPU's best tokens are on the host
        {"draft_p_min": 0.1},  # each draft waits for the one before
        {"tree_budget": 6},
        {"draft_tokens": 8},  # more rows than a decode of the block has results for
    ],
    ids=str,
)
def test_other_engines_begin_with_their_round(rig, run_of, settings):
    r, run = rig(**{**BEGINS, **settings}), run_of("moe-mtp")
    assert text_of(r, begin(r), 30)[:30] == run.tokens[:30]
    assert begun(r) == 0


@ON_TREES
def test_sampled_requests_begin_with_their_round(rig):
    r = rig(**BEGINS)
    last = begin(r)
    r.engine.set_request(temperature=0.8, n_top=40)
    text_of(r, last, 20)
    assert begun(r) == 0


@MTP_ALONE
def test_a_text_of_other_tokens_begins_ever_less(tiny):
    """A caller that takes what is not best: its text is plain decoding's, and guesses become rare."""
    r, plain = tiny(), tiny(drafter=_capi.DRAFTER_NONE)
    draw = random.Random(1)
    text = [begin(r)]
    while len(text) < 100:
        open_round(r, text[-1])
        other = draw.randrange(300, 4000)
        r.engine.took(other)
        text.append(other)
        r.engine.commit()
    assert begun(r) <= 1
    plain.engine.reset()
    plain.engine.eval([*PROMPT, *text[:-1]], 0)
    expected = plain.plain(text[-1], 30)[0]
    assert text_of(r, text[-1], 31)[1:31] == expected


def test_a_text_that_ends_within_a_round_goes_on_elsewhere(tiny):
    """Tokens taken are kept, the rest goes: cut back, gone on from another token, or begun anew."""
    r, plain = tiny(), tiny(drafter=_capi.DRAFTER_NONE)
    draw = random.Random(2)
    for case in range(12):
        text = text_of(r, begin(r), 20 + case)
        assert r.engine.trim(len(PROMPT) + len(text) - 1)
        r.engine.propose(text[-1])
        r.engine.verify()
        for _ in range(case % 3):  # of the round's rows, none at times
            if r.engine.row() is not None:
                text.append(r.engine.next(r.sampler))
        keep = r.engine.n_past if case % 4 else len(PROMPT) + len(text) - 3
        if not r.engine.trim(keep):  # the recurrent state is not there any more
            r.engine.reset()
            r.engine.eval([*PROMPT, *text][:keep], 0)
        known, behind = [*PROMPT, *text][:keep], [*PROMPT, *text][keep:]
        other = behind[0] if behind and case % 2 == 0 else draw.randrange(300, 4000)
        plain.engine.reset()
        plain.engine.eval(known, 0)
        expected = plain.plain(other, 15)[0]
        assert text_of(r, other, 16)[1:16] == expected, f"case {case}"


def test_others_decode_save_and_restore_between_verify_and_commit(tiny):
    r, plain = tiny(), tiny(drafter=_capi.DRAFTER_NONE)
    run = plain.reference(60)
    text = text_of(r, begin(r), 20)
    assert r.engine.trim(len(PROMPT) + len(text) - 1)
    r.engine.propose(text[-1])
    r.engine.verify()
    text.append(r.engine.next(r.sampler))
    state = r.save()  # settles the round
    assert text == run.tokens[: len(text)]
    assert r.raw_decode([7, 8, 9]) == 0
    r.load(state)
    n = len(PROMPT) + len(text) - 1
    if r.engine.n_past != n:
        assert r.engine.trim(n)
    n = len(text) - 1
    assert text_of(r, text[-1], 20)[:20] == run.tokens[n : n + 20]


def test_a_round_that_is_scheduled_goes_on_from_its_row(tiny):
    """Benchmarks prescribe what is accepted; they time drafts that are begun, whatever the tokens are."""
    r = tiny()
    text = [begin(r)]
    for i in range(20):
        open_round(r, text[-1])
        kept = 0
        while r.engine.row() is not None:
            text.append(next_scheduled(r.engine, r.sampler, accept=kept < i % 6))
            kept += 1
        assert kept == i % 6 + 1
    stats = r.engine.stats()
    assert stats.begun_drafts == stats.rounds - 1 == 19


def test_a_context_that_fills_up(tiny):
    r = tiny()
    plain = tiny(drafter=_capi.DRAFTER_NONE)
    room = 256 - len(PROMPT)
    run = plain.reference(room)
    text = [begin(r)]
    while r.engine.n_past < 256:
        text += turn(r, text[-1])[0]
    with pytest.raises(ContextFullError):
        turn(r, text[-1])
    assert text[:room] == run.tokens
    assert begun(r) > 0


def test_the_drafter_ends_with_a_draft_begun(tiny):
    r = tiny()
    text = text_of(r, begin(r), 20)
    assert r.engine.trim(len(PROMPT) + len(text) - 1)
    r.engine.propose(text[-1])
    r.engine.verify()
    r.detach()
    assert native.llama_memory_seq_pos_max(r.memory, 0) >= len(PROMPT)
    r.attach()
    assert text_of(r, begin(r), 40)[:40] == tiny(drafter=_capi.DRAFTER_NONE).reference(40).tokens


def test_each_request_begins_drafts_from_its_second_round_on(tiny):
    r = tiny()
    for request in range(4):
        text = [begin(r)]
        for _ in range(6):
            text += turn(r, text[-1])[0]
        assert begun(r) == 5 * (request + 1)


@MTP_ALONE
def test_a_guess_that_is_wrong_is_made_again_later(tiny):
    """Rounds that end in another token than the best: fewer and fewer begin; then all of them do again."""
    r, draw = tiny(n_ctx=512), random.Random(5)
    text = [begin(r)]
    for _ in range(20):
        text += turn(r, text[-1])[0]
    assert begun(r) == 19
    for _ in range(30):
        open_round(r, text[-1])
        tokens = []
        while r.engine.row() is not None:
            tokens.append(r.engine.next(r.sampler))
        text += [*tokens[:-1], draw.randrange(300, 4000)]  # in place of the best
    n = begun(r)
    assert n <= 21
    rounds = 0
    while begun(r) < n + 5:
        text += turn(r, text[-1])[0]
        rounds += 1
    assert 5 < rounds <= 5 + 65


@DFLASH_ALONE
def test_features_are_taken_behind_verifies_of_sampled_requests_too(tiny):
    """They do not depend on what comes next."""
    r, waits = tiny(draft_tokens=15), tiny(draft_tokens=15, begin_drafts=False)
    both = []
    for each in (r, waits):
        sampler = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
        for part in (
            native.llama_sampler_init_top_k(40),
            native.llama_sampler_init_temp(0.8),
            native.llama_sampler_init_dist(7),
        ):
            native.llama_sampler_chain_add(sampler, part)
        text = [begin(each)]
        each.engine.set_request(temperature=0.8, n_top=40)
        rounds = []
        while len(text) < 150:
            tokens, drafted = turn(each, text[-1], sampler)
            rounds.append((tokens, drafted))
            text += tokens
        both.append(rounds)
        native.llama_sampler_free(sampler)
    assert both[0] == both[1]
    assert (begun(r), begun(waits)) == (len(both[0]) - 1, 0)


def automatic(tiny, draft_tokens, times):
    """Make a rig whose engine drafts by costs, with these times."""
    r = tiny(engine=False, n_ctx=1024, draft_tokens=draft_tokens)
    r.settings |= {"length": _capi.LENGTH_AUTO, "curve": times}
    r.attach()
    return r


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_auto_waits_for_drafts_until_it_knows_their_time(tiny, draft_tokens):
    unknown = Curve((0.0,) * _capi.CURVE_SIZE, (0.0,) * _capi.CURVE_SIZE)
    r = automatic(tiny, draft_tokens, unknown)
    text = text_of(r, begin(r), 100)
    assert text[:100] == tiny(drafter=_capi.DRAFTER_NONE).reference(100).tokens
    stats, times = r.engine.stats(), r.engine.curve()
    assert (stats.ahead_rounds, stats.begun_drafts) == (0, 0)
    assert times.draft_us[draft_tokens] > 0
    assert times.verify_us[draft_tokens + 1] > 0


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_auto_times_one_of_32_drafts_that_stay_on_their_device(tiny, draft_tokens):
    """These times let all drafts pay. A timed draft begins with its round, which waits for it."""
    r = automatic(tiny, draft_tokens, curve({1: 1.0, 63: 63.0}, {1: 1e6, 64: 1e6}))
    text = text_of(r, begin(r), 300)
    assert text[:300] == tiny(drafter=_capi.DRAFTER_NONE, n_ctx=1024).reference(300).tokens
    stats = r.engine.stats()
    waits = stats.rounds - stats.ahead_rounds - stats.ngram_rounds - stats.paused_rounds
    timed = (stats.ahead_rounds + waits) // 32
    assert timed <= waits <= timed + 3, "timed ones, and a few of trials"
    assert stats.begun_drafts > 0


@MTP_ALONE
def test_a_token_that_a_schedule_chose_counts_as_best(tiny):
    """llama-server's --spec-synth-rates; a token that is refused changes nothing."""
    r = tiny()
    text = [begin(r)]
    for _ in range(10):
        open_round(r, text[-1])
        status = _capi.lib.dw_took_scheduled(r.engine._handle, r.n_vocab)
        assert status == _capi.ERR_ARGUMENT
        status = _capi.lib.dw_took_scheduled(r.engine._handle, 1000 + len(text))
        assert status == _capi.OK
        text.append(1000 + len(text))
        r.engine.commit()
    assert begun(r) == 9
