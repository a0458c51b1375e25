"""Drafts from a head with the rows of few tokens: which they can be, and that they are the best of these."""

from __future__ import annotations

import random

import pytest
from draftwood.errors import OptionError

from bench.testing_api import RESULTS_TOP, recent_vocab
from tests.model.engine.calls import MTP
from tests.model.engine.test_node_names import Watch

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


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_drafts_are_of_the_newest_tokens(rig, budget, results):
    short = rig(drafter=MTP, draft_vocab=FEW, tree_budget=budget, results=results)
    seen: list[int] = []
    drafted = set()
    for prompt in prompts(8, below=short.n_vocab):
        seen += prompt[:-1]
        held = set(recent_vocab(FEW, short.n_vocab, seen)[1])
        found = draft(short, prompt).tokens[1:]
        assert set(found) <= held
        drafted |= set(found)
    assert len(drafted) > 5
    assert max(drafted) >= FEW  # others than the vocabulary's first


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_a_head_of_nearly_all_drafts_what_the_whole_one_drafts(rig, budget, results):
    whole = rig(drafter=MTP, tree_budget=budget, results=results)
    short = rig(drafter=MTP, draft_vocab=whole.n_vocab - 1, tree_budget=budget, results=results)
    last = whole.n_vocab - 1
    n_equal = 0
    for prompt in prompts(6, below=last):
        expected, found = draft(whole, prompt), draft(short, prompt)
        if last not in expected.tokens[1:]:
            n_equal += 1
            assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
            assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-2)  # less one token's share
    assert n_equal >= 4


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
        assert watch.ops["result_output"] == "NONE"


@pytest.mark.parametrize("draft_vocab", [0, 10**6])
def test_a_small_vocabulary_is_read_whole(rig, draft_vocab):
    watch = Watch()
    r = rig(drafter=MTP, draft_vocab=draft_vocab, cb_eval=watch.callback)
    r.start()
    watch.times.clear()
    r.engine.propose(7, 2)
    assert watch.times["result_output"] == 2
    assert watch.ops["result_output"] == "MUL_MAT"
    assert watch.times["dw_few_logits"] == 0


def test_its_rows_count_as_the_drafters_memory(rig):
    whole, short = rig(drafter=MTP), rig(drafter=MTP, draft_vocab=FEW)
    more = short.engine.stats().drafter_bytes - whole.engine.stats().drafter_bytes
    assert 0 < more < FEW * 64 * 1024
    assert more % FEW == 0


@pytest.mark.parametrize("preset", ["planted-moe", "q4k", "tied-mtp", "mtp-heads"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_text_is_that_of_the_model(rig, run_of, preset, budget):
    """Its own head or the model's, one that is its embeddings, quantised or not."""
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
    assert r.engine.stats().drafted > 0


@pytest.mark.parametrize("draft_vocab", [-1, 1, FEW - 1])
def test_too_few_tokens_are_refused(rig, draft_vocab):
    r = rig(engine=False)
    r.settings |= {"drafter": MTP, "draft_vocab": draft_vocab}
    with pytest.raises(OptionError) as caught:
        r.attach()
    said = f"draft_vocab is {draft_vocab}; expected 0 (by the vocabulary) or at least 64 tokens"
    assert said in caught.value.message
