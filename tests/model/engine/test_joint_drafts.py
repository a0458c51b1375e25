"""Drafts of several sequences made together: as each engine drafts alone, and texts as by plain decode.

Contract: dw_propose_all in src/include/draftwood.h.
"""

from __future__ import annotations

import random

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.errors import DraftwoodError

from bench.testing_api import propose_all, verify_all
from tests.model.engine.calls import MTP
from tests.model.engine.test_sequences import Text, close, texts
from tests.model.rig import PROMPT

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

PROMPTS = (PROMPT, (7, 8, 9), tuple(range(100, 140)), (5,) * 12)
SIZES = {"drafter": MTP, "n_seq_max": len(PROMPTS), "n_ctx": 256 * len(PROMPTS), "engine": False}


def propose_each(engines, last, most):
    return [each.propose(*asked) for each, *asked in zip(engines, last, most, strict=True)]


def written(made: list[Text], sampler, propose, n_rounds, subset, seed=4):
    """Write rounds of subsets of the texts, with drafts by `propose`; return every draft."""
    chance, drafts = random.Random(seed), []
    for _ in range(n_rounds):
        chosen = [made[i] for i in subset(chance) if made[i].done < 70]
        if not chosen:
            continue
        engines = [text.engine for text in chosen]
        counts = propose(
            engines,
            [text.run.tokens[text.done - 1] for text in chosen],
            [chance.choice([0, 1, 3, 5]) for _ in chosen],
        )
        drafts.append([each.draft() for each in engines])
        assert counts == [len(draft) for draft in drafts[-1]]
        verify_all(engines)
        for text in chosen:
            while text.engine.row() is not None:
                assert text.engine.next(sampler) == text.run.tokens[text.done]
                text.done += 1
    return drafts


def any_of(chance):
    """Some of the four, in any order: their ids have gaps."""
    return chance.sample(range(4), chance.randint(1, 4))


def check_counts(stats, together=True):
    assert all((each.joint_rounds > 10) == together for each in stats)
    assert sum(each.accepted for each in stats) > 20
    assert all(each.failed_drafts == 0 for each in stats)


@pytest.mark.parametrize("settings", [{}, {"draft_p_min": 0.3}], ids=str)
def test_together_as_alone(rig, settings):
    found = []
    for propose in (propose_each, propose_all):
        shared = rig("planted-moe", **SIZES, **settings)
        made = texts(shared, rig("planted-moe"), PROMPTS)
        found.append(written(made, shared.sampler, propose, 60, any_of))
        check_counts([text.engine.stats() for text in made], propose is propose_all)
        close(made)
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{"kv_unified": True}, {"draft_vocab": 64}], ids=str)
def test_where_drafts_may_differ(rig, settings):
    """In one cache sums have another order; a short head has the tokens used before. Texts are the same."""
    shared = rig("planted-moe", **SIZES, **settings)
    made = texts(shared, rig("planted-moe"), PROMPTS)
    written(made, shared.sampler, propose_all, 60, any_of)
    check_counts([text.engine.stats() for text in made])
    close(made)


@pytest.mark.parametrize("kv_unified", [False, True])
@pytest.mark.parametrize("most", [[5, 1, 5, 5], [1, 5, 0, 5], [5, 5, 1, 3], [0, 1, 5, 5]], ids=str)
def test_who_stops_early_changes_no_other_draft(rig, most, kv_unified):
    """Each goes on from its own hidden states, whoever has left the decodes before."""
    shared = rig("moe-mtp", **SIZES, kv_unified=kv_unified)  # what it drafts depends on these states alone
    made = texts(shared, rig("moe-mtp"), PROMPTS)
    engines, last = [text.engine for text in made], [text.run.tokens[0] for text in made]
    propose_all(engines, last, [5] * 4)
    whole = [each.draft() for each in engines]
    assert len({tuple(draft) for draft in whole}) == 4
    assert propose_all(engines, last, most) == most
    assert [each.draft() for each in engines] == [draft[:n] for draft, n in zip(whole, most, strict=True)]
    close(made)


def test_more_sequences_than_rows_of_a_decode(rig):
    n = 12
    sizes = {**SIZES, "n_seq_max": n, "n_ctx": 256 * n, "draft_tokens": 3}
    shared = rig("planted-moe", **sizes, n_ubatch=8, n_batch=64)
    prompts = [(i + 1, 2 * i + 5, 40 + i) for i in range(n)]
    made = texts(shared, rig("planted-moe"), prompts)
    engines, last = [text.engine for text in made], [text.run.tokens[0] for text in made]
    alone = []
    for engine, token in zip(engines, last, strict=True):
        engine.propose(token)
        alone.append(engine.draft())
    assert propose_all(engines, last, [3] * n) == [3] * n
    assert [each.draft() for each in engines] == alone
    assert all(each.stats().failed_drafts == 0 for each in engines)
    close(made)


def test_a_sequence_that_others_changed_leaves_the_rest_as_they_are(rig):
    shared = rig("planted-moe", **SIZES)
    made = texts(shared, rig("planted-moe"), PROMPTS[:2])
    a, b = (text.engine for text in made)
    last = [text.run.tokens[0] for text in made]
    assert a.propose(last[0], 5) == 5
    draft = a.draft()
    assert native.llama_memory_seq_rm(shared.memory, 1, -1, -1)
    with pytest.raises(DraftwoodError):
        propose_all([a, b], last, [5, 5])
    assert a.draft() == draft
    a.verify()
    close(made)


def test_with_those_who_draft_otherwise(rig):
    """Trees, n-grams, a drafter that knows nothing yet, one that chooses by times: none disturbs others."""
    shared = rig("planted-moe", **SIZES)
    alone = rig("planted-moe")
    made = texts(shared, alone, PROMPTS[:1])
    others = {
        1: {"tree_budget": 8},
        2: {"drafter": _capi.DRAFTER_NGRAM},
        3: {"length": _capi.LENGTH_AUTO},
    }
    for seq, settings in others.items():
        engine = Engine(shared.ctx, shared.params, **{**shared.settings, **settings}, seq_id=seq)
        run = alone.reference(80, PROMPTS[seq])
        engine.eval(PROMPTS[seq], 0)
        assert engine.next(shared.sampler) == run.tokens[0]
        made.append(Text(engine, run))
    written(made, shared.sampler, propose_all, 60, lambda chance: range(4))
    stats = [text.engine.stats() for text in made]
    assert stats[0].accepted > 10
    assert stats[1].tree_rounds > 5
    assert stats[1].joint_rounds == stats[2].joint_rounds == 0
    assert all(text.done >= 60 for text in made)
    close(made)


def test_one_without_a_hidden_state_is_cold(rig):
    shared = rig("planted-moe", **SIZES)
    made = texts(shared, rig("planted-moe"), PROMPTS[:2])
    fresh = Engine(shared.ctx, shared.params, **shared.settings, seq_id=2)
    last = [made[0].run.tokens[0], made[1].run.tokens[0], 9]
    engines = [made[0].engine, made[1].engine, fresh]
    counts = propose_all(engines, last, [5, 5, 5])
    assert counts == [5, 5, 0]
    verify_all(engines)
    close([*made, Text(fresh, made[0].run)])


def test_at_the_end_of_the_context(rig):
    """Drafts end where a sequence has no room; the others go on."""
    shared = rig("planted-moe", **{**SIZES, "n_ctx": 1024})
    made = texts(shared, rig("planted-moe"), PROMPTS[:2])
    n_ctx = 256
    text = [*made[0].run.prompt, *made[0].run.tokens]
    for at in range(0, n_ctx - 3, 100):
        made[0].engine.eval((text * 4)[at : min(at + 100, n_ctx - 3)], at)
    engines = [text.engine for text in made]
    assert propose_all(engines, [7, made[1].run.tokens[0]], [5, 5]) == [2, 5]
    verify_all(engines)
    close(made)


def test_refusals_change_nothing(rig):
    shared, other = rig("planted-moe", **SIZES), rig("planted-moe", **SIZES)
    made = texts(shared, rig("planted-moe"), PROMPTS[:2])
    stranger = texts(other, rig("planted-moe"), PROMPTS[:1])
    a, b = (text.engine for text in made)
    last = [text.run.tokens[0] for text in made]
    assert a.propose(last[0], 5) == 5
    draft = a.draft()
    for engines, tokens, text in (
        ([a, a], last, "engines of one llama_context, each once"),
        ([a, stranger[0].engine], last, "engines of one llama_context, each once"),
        ([a, b], [last[0], -1], "token -1; expected 0 to"),
        ([], [], "0 engines; expected 1 or more"),
    ):
        with pytest.raises(DraftwoodError, match=text):
            propose_all(engines, tokens, [5] * len(engines))
        assert a.draft() == draft
    a.verify()
    close([*made, *stranger])
