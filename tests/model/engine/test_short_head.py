"""Drafts from a head with the rows of few tokens: which they can be, and that they are the best of these."""

from __future__ import annotations

import random

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine._capi import RESULTS_TOP
from draftwood.engine.engine import Engine
from draftwood.errors import OptionError

from bench.testing_api import limit_memory, recent_vocab
from tests.model.engine.calls import MTP
from tests.model.engine.test_node_names import Watch
from tests.model.rig import PROMPT

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

FEW = 64
RESULTS = {"logits": 0, "top": RESULTS_TOP}
BUDGETS = {"chain": 0, "tree": 24}


def prompts(n, *, below):
    draw = random.Random(n)
    return [[draw.randrange(1, below) for _ in range(40)] for _ in range(n)]


def draft(r, prompt, n=5):
    """Return the tree that is drafted behind a prompt, which ends in the token that is drafted from."""
    r.engine.reset()
    r.engine.eval(prompt[:-1], 0)
    r.engine.propose(prompt[-1], n)
    return r.engine.tree()


def control_tokens(r):
    """Return those that a short head has from the start."""
    vocab = native.llama_model_get_vocab(r.model)
    wanted = native.LLAMA_TOKEN_ATTR_CONTROL | native.LLAMA_TOKEN_ATTR_USER_DEFINED
    return [token for token in range(r.n_vocab) if native.llama_vocab_get_attr(vocab, token) & wanted]


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_drafts_are_of_the_tokens_that_it_has(rig, budget, results):
    short = rig(drafter=MTP, draft_vocab=FEW, tree_budget=budget, results=results)
    seen = control_tokens(short)
    drafted = set()
    for prompt in prompts(8, below=short.n_vocab):
        seen += prompt[:-1]
        held = set(recent_vocab(FEW, short.n_vocab, seen)[1])
        found = draft(short, prompt).tokens[1:]
        assert set(found) <= held
        drafted |= set(found)
    assert len(drafted) > 5
    assert max(drafted) >= FEW  # others than the vocabulary's first
    assert short.engine.stats().draft_vocab == FEW


def test_control_tokens_have_places_from_the_start(rig):
    """They lie at the end. Random weights draft neither them nor the tokens whose places they have."""
    r = rig(drafter=MTP, draft_vocab=FEW, tree_budget=64)
    wanted = control_tokens(r)
    assert len(wanted) == 3
    assert min(wanted) >= FEW
    r.engine.reset()
    r.engine.eval([1, 2, 3], 0)
    drafted = set()
    for last in range(4, FEW - 8):  # tokens that it has: nothing is replaced
        r.engine.propose(last, 1)
        drafted |= set(r.engine.tree().tokens[1:])
    assert len(drafted) > 50
    assert drafted <= set(recent_vocab(FEW, r.n_vocab, wanted)[1])


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("preset", ["moe-mtp", "q4k", "tied-mtp", "mtp-heads"])
def test_it_drafts_what_the_whole_head_drafts_if_it_has_that(rig, preset, results):
    """From rows that took another's place, too. Heads: the model's, embeddings, the block's."""
    whole = rig(preset, drafter=MTP, results=results)
    size = whole.n_vocab // 2 + 1
    short = rig(preset, drafter=MTP, draft_vocab=size, results=results)
    seen = control_tokens(short)
    n_first, n_later = 0, 0
    for prompt in prompts(24, below=whole.n_vocab):
        seen += prompt[:-1]
        held = recent_vocab(size, whole.n_vocab, seen)[1]
        expected, found = draft(whole, prompt).tokens[1:], draft(short, prompt).tokens[1:]
        for token, drafted in zip(expected, found, strict=True):
            if token not in held:
                break
            assert drafted == token
            n_first, n_later = n_first + (token < size), n_later + (token >= size)
    assert n_first >= 5
    assert n_later >= 5


def test_a_draft_made_ahead_is_the_draft(rig):
    """Its tokens go from row to row where they are computed, and the host reads them later."""
    ahead, r = (rig(drafter=MTP, draft_vocab=FEW, results=RESULTS[how]) for how in ("top", "logits"))
    for prompt in prompts(8, below=r.n_vocab):
        assert draft(ahead, prompt).tokens == draft(r, prompt).tokens


def test_log_probabilities_are_of_its_tokens(rig):
    """They add up to one over what it has."""
    short = rig(drafter=MTP, draft_vocab=FEW, tree_budget=64)
    found = draft(short, prompts(1, below=short.n_vocab)[0], 1)
    whole = draft(rig(drafter=MTP, tree_budget=64), prompts(1, below=short.n_vocab)[0], 1)
    assert len(found.tokens) == len(whole.tokens)
    more = {t: p for t, p in zip(whole.tokens, whole.log_probs, strict=True) if t in found.tokens[1:]}
    assert more
    assert all(found.log_probs[found.tokens.index(t)] > p for t, p in more.items())


def test_the_whole_head_is_not_computed(rig):
    """Neither in the first graph nor in one that was kept."""
    watch = Watch()
    r = rig(drafter=MTP, draft_vocab=FEW, cb_eval=watch.callback)
    first = prompts(1, below=r.n_vocab)[0]
    for _ in range(3):
        r.engine.reset()
        r.engine.eval(first[:-1], 0)
        watch.times.clear()
        assert r.engine.propose(first[-1], 3) == 3
        assert watch.times["dw_few_logits"] == 3
        assert watch.times["result_output"] == 0


@pytest.mark.parametrize("draft_vocab", [0, 10**6])
def test_a_small_vocabulary_is_read_whole(rig, draft_vocab):
    watch = Watch()
    r = rig(drafter=MTP, draft_vocab=draft_vocab, cb_eval=watch.callback)
    r.start()
    watch.times.clear()
    r.engine.propose(7, 2)
    assert watch.times["result_output"] == 2
    assert watch.times["dw_few_logits"] == 0
    assert r.engine.stats().draft_vocab == 0


def test_its_rows_count_as_the_drafters_memory(rig):
    whole, short = rig(drafter=MTP), rig(drafter=MTP, draft_vocab=FEW)
    more = short.engine.stats().drafter_bytes - whole.engine.stats().drafter_bytes
    assert 0 < more < FEW * 64 * 1024
    assert more % FEW == 0


@pytest.mark.parametrize(("spare", "expected"), [(-1, 0), (0, FEW)])
def test_without_memory_for_it_the_whole_head_drafts(rig, spare, expected):
    """Of another kind than the first sequence's, so that it has a context of its own."""
    two = {"drafter": MTP, "n_seq_max": 2, "n_ctx": 512}
    short = rig(**two, draft_vocab=FEW).engine.stats().drafter_bytes
    r = rig(**two)
    whole = r.engine.stats().drafter_bytes
    limit_memory(r.engine, drafter=whole + short + spare)
    second = Engine(r.ctx, r.params, **{**r.settings, "draft_vocab": FEW}, seq_id=1)
    assert second.stats().draft_vocab == expected
    second.eval(list(PROMPT), 0)
    assert second.propose(7, 3) == 3
    second.close()


@pytest.mark.parametrize("preset", ["planted-moe", "planted-dense"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_text_is_that_of_the_model(rig, run_of, preset, budget):
    run = run_of(preset)
    r = rig(preset, drafter=MTP, draft_vocab=FEW, tree_budget=budget)
    tokens = [r.start()]
    while len(tokens) < len(run.tokens):
        r.engine.propose(tokens[-1])
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.sample()[0])
        r.engine.commit()
    assert tokens[: len(run.tokens)] == run.tokens
    stats = r.engine.stats()
    assert stats.draft_vocab == FEW
    assert stats.accepted > 0


@pytest.mark.parametrize("draft_vocab", [-1, 1, FEW - 1])
def test_too_few_tokens_are_refused(rig, draft_vocab):
    r = rig(engine=False)
    r.settings |= {"drafter": MTP, "draft_vocab": draft_vocab}
    with pytest.raises(OptionError) as caught:
        r.attach()
    said = f"draft_vocab is {draft_vocab}; expected 0 (by the vocabulary) or at least 64 tokens"
    assert said in caught.value.message
