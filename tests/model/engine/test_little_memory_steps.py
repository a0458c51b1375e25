"""Plain steps, prompts and several sequences without memory: what llama.cpp set aside, or a failed decode."""

from __future__ import annotations

import pytest

from tests.model.engine.little_memory import NEEDS, run

pytestmark = NEEDS

PLAIN_SCRIPT = """
drafter = {"none": _capi.DRAFTER_NONE, "mtp": _capi.DRAFTER_MTP}[sys.argv[2]]
n_rs_seq, first = int(sys.argv[3]), int(sys.argv[4])
r = Rig(sys.argv[1], drafter=drafter, draft_tokens=4, n_ctx=4096, n_ubatch=64, n_rs_seq=n_rs_seq)
def text(least):
    tokens = [r.start(range(3, 50))]
    while len(tokens) < 24:
        if len(tokens) == first:
            refuse(least)
        wrong = [tokens[-1]] * 3 if n_rs_seq and len(tokens) < first else []
        r.engine.propose_given(tokens[-1], wrong)
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.sample()[0])
        r.engine.commit()
    return tokens
r.start(range(2, 60))  # as large an output buffer as any decode of these texts needs
if first == 0:
    refuse(4 << 10)
little = text(4 << 10)
refuse(ALL)
found = [little, text(ALL)]
"""


@pytest.mark.parametrize(
    ("preset", "drafter", "n_rs_seq", "first"),
    [
        *((*kind, first) for kind in (("moe-mtp", "none", 0), ("moe-mtp", "mtp", 0)) for first in (0, 1)),
        *(("dense-plain", "none", 0, first) for first in (0, 1)),
        *(("moe-mtp", "none", 4, first) for first in (0, 1, 3)),
    ],
)
def test_small_decodes_without_memory_take_what_is_set_aside(gguf, shim, preset, drafter, n_rs_seq, first):
    """A prompt with an output, or the first step behind it, has a graph of its own where there is memory.

    With snapshots the first one behind a refused draft is taken back to where its state is an older one.
    """
    little, much = run(PLAIN_SCRIPT, shim, gguf(preset), drafter, n_rs_seq, first)
    assert little == much


TWO = """
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_NONE, n_ctx=4096, n_ubatch=64, n_seq_max=2, engine=False)
engines = [Engine(r.ctx, r.params, **r.settings, seq_id=i) for i in range(2)]
def text(order, over, lengths=(60, 60)):
    last = [0, 0]
    for i in order:
        engines[i].reset()
    for i in order:
        engines[i].eval(list(range(2 + i, lengths[i])), 0)
        last[i] = engines[i].next(r.sampler)
    tokens = list(last)
    refuse(over)
    for _ in range(12):
        for each, token in zip(engines, last):
            each.propose_given(token, [])
        verify_all(engines)
        last = [each.next(r.sampler) for each in engines]
        tokens += last
        for each in engines:
            each.commit()
    return tokens
for each in engines:
    each.eval(list(range(2, 60)), 0)
"""
TOGETHER_SCRIPT = (
    TWO
    + """
refuse(64 << 10)
little = text((0, 1), 64 << 10)
refuse(ALL)
found = [little, text((0, 1), ALL)]
"""
)


def test_steps_of_several_sequences_do_too(gguf, shim):
    little, much = run(TOGETHER_SCRIPT, shim, gguf("moe-mtp"))
    assert little == much


APART_SCRIPT = (
    TWO
    + """
apart = dict(order=(1, 0), lengths=(60, 53))
little = text(over=64 << 10, **apart)
refuse(ALL)
found = [little, text(over=ALL, **apart)]
"""
)


def test_steps_that_move_states_do_too(gguf, shim):
    """llama.cpp has exchanged the cells of states when the graph that moves them finds no memory."""
    little, much = run(APART_SCRIPT, shim, gguf("moe-mtp"))
    assert little == much


GROW_SCRIPT = """
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_GIVEN, draft_tokens=5, n_ctx=4096, n_ubatch=64, tree_budget=8,
        n_seq_max=2, engine=False)
engines = [Engine(r.ctx, r.params, **r.settings, seq_id=i) for i in range(2)]
last = []
for i, each in enumerate(engines):
    each.eval(list(range(2 + i, 50)), 0)
    last.append(each.next(r.sampler))
refuse(4 << 10)
for each, token in zip(engines, last):
    each.propose_given(token, [5, 6, 7, 8, 9])
verify_all(engines)
found = [each.row()[1] for each in engines]
"""


def test_verifies_together_without_memory_for_a_larger_tree_state(gguf, shim):
    """All take a plain step."""
    assert run(GROW_SCRIPT, shim, gguf("moe-mtp")) == [49, 48]


RAW_SCRIPT = """
from draftwood._llama_cpp import llama_cpp as native
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_NONE, draft_tokens=8, n_ctx=4096, n_ubatch=64)
r.start(range(2, 60))
if sys.argv[2] == "refuse":
    refuse(256 << 10)
r.engine.reset()
r.engine.eval(list(range(3, 30)), 0)
r.engine.propose_given(r.engine.next(r.sampler), [5, 6, 7])
r.engine.verify()
r.engine.next(r.sampler)
r.engine.commit()
refuse(ALL)
n_past = r.engine.n_past
r.detach()
batch = native.llama_batch_init(4, 0, 1)
batch.n_tokens = 4
for i in range(4):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 9 + i, n_past + i, 1, 1
    batch.seq_id[i][0] = 0
assert native.llama_decode(r.ctx, batch) == 0
found = [r.logits(i).tolist() for i in range(4)]
"""


def test_nothing_of_an_engine_that_is_gone_is_used(gguf, shim):
    """A verify's graph in the context's own place works on tensors that went with the engine."""
    path = gguf("moe-mtp")
    assert run(RAW_SCRIPT, shim, path, "refuse") == run(RAW_SCRIPT, shim, path, "", refuses=False)


PROMPT_SCRIPT = """
r = Rig(sys.argv[1], n_ctx=4096, n_ubatch=64)
def text(refusals):
    r.start()
    found = "nothing"
    if refusals:
        refuse(64 << 10)  # nor for what it has to hand over
        try:
            r.engine.eval(list(range(60)), r.engine.n_past, all_logits=True)
        except DecodeError as error:
            found = error.message
        refuse(ALL)
    r.engine.eval([7, 8, 9], r.engine.n_past)
    return found, r.engine.next(r.sampler), r.logits(-1).tolist()
found = [text(True), text(False)]
"""


def test_a_prompt_without_memory_is_a_failed_decode(gguf, shim):
    """Nothing smaller can be tried for it. The context is as before, and goes on from there."""
    (found, *little), (nothing, *much) = run(PROMPT_SCRIPT, shim, gguf("moe-mtp"))
    assert "no memory for the graph of 60 tokens" in found
    assert nothing == "nothing"
    assert little == much


QUEUED_SCRIPT = """
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_NONE, n_ctx=4096, n_ubatch=64, results=_capi.RESULTS_TOP,
        queue_steps=True, n_seq_max=2, kv_unified=True)
r.engine.set_request(n_top=1)
def text(n_before):
    tokens = [r.start(range(3, 50))]
    while len(tokens) < 24:
        if len(tokens) == n_before:
            refuse(4 << 10)
        r.engine.trim(r.engine.n_past)
        r.engine.propose(tokens[-1])
        r.engine.verify()
        tokens.append(r.engine.next(r.sampler))
    r.engine.commit()
    return tokens
r.start(range(2, 60))  # as large an output buffer as any decode of these texts needs
r.engine.set_request(n_top=0)
r.engine.propose_given(5, [])
r.engine.verify()  # makes the graph of a step; the one behind it has none
r.engine.set_request(n_top=1)
little = text(1)
stats = r.engine.stats()
found = [little, stats.queued_steps, stats.shared_rounds]
refuse(ALL)
found.append(text(-1))
"""


def test_without_memory_for_a_second_graph_steps_wait(gguf, shim):
    """And the first one's stays: graphs do not take turns from then on."""
    little, n_queued, n_shared, much = run(QUEUED_SCRIPT, shim, gguf("moe-mtp"))
    assert little == much
    assert n_queued == n_shared == 0
