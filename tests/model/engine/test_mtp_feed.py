"""How the MTP block takes what was kept: keys and values alone, and drafts as if it had computed all."""

from __future__ import annotations

import random

import pytest

from tests.model.engine.calls import MTP
from tests.model.engine.test_node_names import Watch

pytestmark = pytest.mark.parametrize("rig", ["tree"], indirect=True)

N = 40
AFTER_KEYS = {"mtp_attn_out", "mtp_ffn_out", "mtp_shared_head_norm"}


def blocks(names):
    """Return names without the layer's number."""
    return {name.rpartition("-")[0] if name.rpartition("-")[2].isdigit() else name for name in names}


@pytest.fixture(params=range(4))
def prompt(request):
    draw = random.Random(request.param)
    return [draw.randrange(1, 250) for _ in range(N)]


def one_by_one(r, prompt):
    """Leave the prompt in the memory; each of its pairs entered the block with a draft of its own."""
    r.engine.reset()
    r.engine.eval(prompt[:1], 0)
    for token in prompt[1:-1]:
        assert r.engine.propose(token, 1) == 1
        r.engine.verify()
        r.engine.next(r.sampler)
        r.engine.commit()


def test_drafts_are_those_of_a_block_that_computed_everything(rig, prompt):
    whole, single = rig(drafter=MTP), rig(drafter=MTP)
    whole.engine.reset()
    whole.engine.eval(prompt[:-1], 0)
    one_by_one(single, prompt)
    for r in (whole, single):
        assert r.engine.propose(prompt[-1]) == 5
    assert whole.engine.draft() == single.engine.draft()


@pytest.mark.parametrize("waiting", [2, 3, 20])
def test_pairs_that_wait_are_fed_together(rig, prompt, waiting):
    """Rounds of other drafters leave pairs behind; the next draft takes them in one batch."""
    some, single = rig(drafter=MTP), rig(drafter=MTP)
    n = N - 1 - waiting
    one_by_one(some, prompt[: n + 1])
    some.engine.eval(prompt[n:-1], n)
    one_by_one(single, prompt)
    for r in (some, single):
        assert r.engine.propose(prompt[-1]) == 5
    assert some.engine.draft() == single.engine.draft()


@pytest.mark.parametrize(("waiting", "decodes"), [(0, 1), (1, 1), (2, 2), (9, 2)])
def test_the_pair_that_an_accepted_draft_leaves_goes_in_with_the_next(rig, prompt, waiting, decodes):
    """More of them go before, for keys and values alone."""
    watch = Watch()
    r = rig(drafter=MTP, cb_eval=watch.callback)
    n = N - 1 - waiting
    one_by_one(r, prompt[: n + 1])
    if waiting > 0:
        r.engine.eval(prompt[n:-1], n)
    watch.times.clear()
    assert r.engine.propose(prompt[-1], 1) == 1
    assert {times for name, times in watch.times.items() if name.startswith("mtp_eh_proj")} == {decodes}


def test_a_prompt_leaves_the_blocks_attention_and_experts_out(rig, prompt):
    watch = Watch()
    r = rig(drafter=MTP, cb_eval=watch.callback, n_ctx=512, n_ubatch=512)
    r.engine.reset()
    watch.ops.clear()
    r.engine.eval(prompt * 7, 0)  # more than may wait for a draft
    seen = blocks(watch.ops)
    assert "mtp_eh_proj" in seen, seen
    assert not AFTER_KEYS & seen
    r.engine.propose(prompt[0])
    assert blocks(watch.ops) >= AFTER_KEYS
