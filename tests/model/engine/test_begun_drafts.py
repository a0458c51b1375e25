"""Drafts that begin behind a verify whose tokens nobody knows yet: same text, drafts as from the whole text.

On a CPU such a draft is computed at once: what is tested is which rows and pairs are whose.
Contract: dw_params.begin_drafts, src/drafters/mtp_ahead.cpp.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Curve, Engine
from draftwood.errors import ContextFullError

from bench.testing_api import next_scheduled, propose_all, verify_all
from tests.model.engine.calls import MTP
from tests.model.engine.queued import ON_TREES
from tests.model.engine.test_joint_dflash import DFLASH
from tests.model.rig import PROMPT, Rig
from tests.unit.cost_curves import curve

TINY = Path(__file__).parents[3] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
BEGINS = {"drafter": MTP, "results": _capi.RESULTS_TOP}
MTP_ALONE = pytest.mark.parametrize("tiny", ["mtp"], indirect=True)


@pytest.fixture(params=["mtp", "dflash"])
def tiny(request):
    """Make rigs of the trained model, whose drafts are accepted at times."""
    made = []

    def make(**settings):
        r = Rig(TINY, **{**BEGINS, "draft_tokens": 5, **settings, "engine": False})
        made.append(r)
        if "drafter" not in settings and request.param == "dflash":
            r.settings |= DFLASH
        if settings.get("engine", True):
            r.attach()
        return r

    yield make
    for r in made:
        r.close()


def begin(r, prompt=PROMPT):
    token = r.start(prompt)
    r.engine.set_request(n_top=1)
    return token


def turn(r, last, sampler=None):
    """Take a round as `Llama` does; return its tokens and what was drafted."""
    assert r.engine.trim(r.engine.n_past)
    r.engine.propose(last)
    r.engine.verify()
    tokens = []
    while r.engine.row() is not None:
        tokens.append(r.engine.next(sampler or r.sampler))
    return tokens, list(r.engine.tree().tokens[1:])


def text_of(r, last, n):
    """Return the tokens of whole rounds, n of them or more, the first of them `last`."""
    tokens = [last]
    while len(tokens) < n:
        tokens += turn(r, tokens[-1])[0]
    return tokens


def begun(r):
    return r.engine.stats().begun_drafts


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
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(text[-1])
        r.engine.verify()
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
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(text[-1])
        r.engine.verify()
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


@pytest.mark.parametrize("unified", [False, True], ids=["", "unified"])
def test_sequences_that_are_verified_alone_and_together(tiny, unified):
    """Begun alone, gone on together: each text is its own."""
    r = tiny(engine=False, n_seq_max=2, n_ctx=512, kv_unified=unified)
    plain = tiny(drafter=_capi.DRAFTER_NONE, n_ctx=256)
    prompts = [PROMPT, PROMPT[::-1]]
    engines = [Engine(r.ctx, r.params, **{**r.settings, "seq_id": i}) for i in range(2)]
    runs = [plain.reference(60, prompt).tokens for prompt in prompts]
    texts = []
    for engine, prompt in zip(engines, prompts, strict=True):
        engine.reset()
        engine.eval(prompt, 0)
        texts.append([engine.next(r.sampler)])
        engine.set_request(n_top=1)

    def walk(i):
        while engines[i].row() is not None:
            texts[i].append(engines[i].next(r.sampler))

    draw = random.Random(3)
    for _ in range(40):
        who = draw.choice([0, 0, 0, 1, 1, 1, None])
        if who is None:
            for engine in engines:
                engine.commit()
            propose_all(engines, [text[-1] for text in texts], [5, 5])
            verify_all(engines)
            walk(0)
            walk(1)
        else:
            engines[who].commit()
            engines[who].propose(texts[who][-1])
            engines[who].verify()
            walk(who)
    for i, engine in enumerate(engines):
        n = min(60, len(texts[i]))
        assert n > 20
        assert texts[i][:n] == runs[i][:n]
        assert engine.stats().begun_drafts > 0
        engine.close()


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


@pytest.mark.parametrize("n", [8, 96], ids=["waits", "fed"])
def test_another_sequence_reads_a_prompt_meanwhile(tiny, n):
    """The block's newest decode is then of the other sequence, and of a long prompt without results."""
    r, plain = tiny(engine=False, n_seq_max=2, n_ctx=1024), tiny(drafter=_capi.DRAFTER_NONE, n_ctx=512)
    alone, other = (Engine(r.ctx, r.params, **{**r.settings, "seq_id": i}) for i in range(2))
    run = plain.reference(150).tokens
    draw = random.Random(4)
    for engine in (alone, other):
        engine.reset()
        engine.set_request(n_top=1)
    alone.eval(PROMPT, 0)
    text = [alone.next(r.sampler)]
    while len(text) < 140:
        alone.commit()
        alone.propose(text[-1])
        alone.verify()
        while alone.row() is not None:
            text.append(alone.next(r.sampler))
        if len(text) % 3 == 0 and other.n_past + n < 480:
            other.eval([draw.randrange(300, 4000) for _ in range(n)], other.n_past)
    assert text[:140] == run[:140]
    stats = alone.stats()
    assert stats.failed_drafts == stats.cold_rounds == 0
    assert stats.begun_drafts == stats.rounds - 1
    alone.close()
    other.close()


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
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(text[-1])
        r.engine.verify()
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


@pytest.mark.parametrize("tiny", ["dflash"], indirect=True)
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


def test_a_full_cache_of_two_sequences(tiny):
    """Near its end nothing begins, since others need the cells; behind a reset it does again."""
    r = tiny(engine=False, n_seq_max=2, n_ctx=256, kv_unified=True)
    engines = [Engine(r.ctx, r.params, **{**r.settings, "seq_id": i}) for i in range(2)]
    before = 0
    for _ in range(2):
        texts = []
        for engine in engines:
            engine.reset()
            engine.eval(PROMPT, 0)
            engine.set_request(n_top=1)
            texts.append([engine.next(r.sampler)])
        full = False
        while not full:
            for engine, text in zip(engines, texts, strict=True):
                try:
                    engine.commit()
                    engine.propose(text[-1])
                    engine.verify()
                    while engine.row() is not None:
                        text.append(engine.next(r.sampler))
                except ContextFullError:
                    full = True
        begun_now = sum(engine.stats().begun_drafts for engine in engines)
        assert begun_now > before + 10
        before = begun_now
    assert [engine.stats().failed_drafts for engine in engines] == [0, 0]
    for engine in engines:
        engine.close()


@MTP_ALONE
def test_a_token_that_a_schedule_chose_counts_as_best(tiny):
    """llama-server's --spec-synth-rates; a token that is refused changes nothing."""
    r = tiny()
    text = [begin(r)]
    for _ in range(10):
        assert r.engine.trim(r.engine.n_past)
        r.engine.propose(text[-1])
        r.engine.verify()
        status = _capi.lib.dw_took_scheduled(r.engine._handle, r.n_vocab)
        assert status == _capi.ERR_ARGUMENT
        status = _capi.lib.dw_took_scheduled(r.engine._handle, 1000 + len(text))
        assert status == _capi.OK
        text.append(1000 + len(text))
        r.engine.commit()
    assert begun(r) == 9
