"""The budget of memory beside llama.cpp's own: counted, limited, refused in words, given back."""

from __future__ import annotations

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from bench.testing_api import limit_memory
from tests.model.engine.calls import MTP, NONE, error_of, lib, new, params
from tests.model.rig import check_plain, follow


def held(engine: Engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats.drafter_bytes, stats.graph_bytes, stats.tree_bytes


def rounds(r, run, done: int, n: int) -> int:
    """Run n rounds of changing sizes that accept one draft token each."""
    for i in range(n):
        done = follow(r, run, done, 1, depth=1 + i % 5)
    return done


def test_what_an_engine_holds_is_counted_and_given_back(rig, run_of):
    run, r = run_of("moe-mtp"), rig(drafter=MTP, tree_budget=16)
    r.start()
    rounds(r, run, 1, 8)
    with_drafter = held(r.engine)
    assert with_drafter[0] > 0
    assert with_drafter[1] > 0
    assert (with_drafter[2] > 0) == (rig.rollback == "tree")
    r.detach()
    r.settings |= {"drafter": NONE, "tree_budget": 0}
    r.attach()
    assert held(r.engine) == (0, 0, 0)


@pytest.mark.parametrize("kv_unified", [False, True], ids=["caches", "cache"])
def test_drafters_of_a_context_share_theirs(rig, run_of, kv_unified):
    """Who comes and goes changes nothing for the others; the last one gives the memory back."""
    run = run_of("planted-moe")
    r = rig("planted-moe", drafter=MTP, n_ctx=1024, n_seq_max=3, kv_unified=kv_unified)
    alone = held(r.engine)[0]
    others = [Engine(r.ctx, r.params, **r.settings, seq_id=seq) for seq in (1, 2)]
    assert held(r.engine)[0] == alone > 0
    plain, prompts = rig("planted-moe"), [(7, 8, 9), tuple(range(100, 140))]
    runs = [run, *(plain.reference(60, prompt) for prompt in prompts)]
    for engine, own in zip((r.engine, *others), runs, strict=True):
        engine.eval(own.prompt, 0)
        assert engine.next(r.sampler) == own.tokens[0]
    expected = [
        drafts_of(engine, own, r.sampler, 6) for engine, own in zip((r.engine, *others), runs, strict=True)
    ]
    assert len({repr(drafts) for drafts in expected}) == 3
    others[0].close()
    again = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    again.eval(runs[1].prompt, 0)
    assert again.next(r.sampler) == runs[1].tokens[0]
    assert drafts_of(again, runs[1], r.sampler, 6) == expected[1]
    for engine in (again, others[1]):
        engine.close()
    assert held(r.engine)[0] == alone
    r.detach()
    r.settings["drafter"] = NONE
    assert held(r.attach())[0] == 0


def test_an_engine_that_goes_leaves_its_cells_to_others(rig):
    """In one cache: a drafter's context is as full as its target's."""
    r = rig("planted-moe", drafter=MTP, n_ctx=256, n_seq_max=2, kv_unified=True)
    other = Engine(r.ctx, r.params, **r.settings, seq_id=1)
    text = [(7 * i * i + 3) % 300 + 1 for i in range(200)]
    for at in range(0, 200, 100):
        r.engine.eval(text[at : at + 100], at)
    r.engine.propose(5)
    r.detach()
    assert native.llama_memory_seq_rm(r.memory, 0, -1, -1)
    for at in range(0, 200, 100):
        other.eval(text[at : at + 100], at)
    assert other.propose(5) == 5
    assert other.stats().failed_drafts == other.stats().cold_rounds == 0
    other.close()


def drafts_of(engine, run, sampler, n):
    """Return the drafts of n rounds after run.tokens[0], whose text must be the run's."""
    drafts, done = [], 1
    for _ in range(n):
        engine.propose(run.tokens[done - 1])
        drafts.append(engine.draft())
        engine.verify()
        while engine.row() is not None:
            assert engine.next(sampler) == run.tokens[done]
            done += 1
    engine.commit()
    return drafts


def test_graphs_beyond_the_limit_go(rig, run_of):
    """Least recently used first; the graph in use stays, whatever it takes, and the text is the same."""
    run, r = run_of("moe-mtp"), rig(drafter=NONE)
    r.start()
    done = rounds(r, run, 1, 10)
    before = held(r.engine)[1]
    limit = before // 2
    limit_memory(r.engine, graphs=limit)
    done = rounds(r, run, done, 10)
    assert 0 < held(r.engine)[1] <= limit
    limit_memory(r.engine, graphs=0)
    done = rounds(r, run, done, 10)
    assert held(r.engine)[1] < limit
    check_plain(r, run, done)


def test_an_engine_of_larger_trees_is_refused_too(rig, run_of):
    """Beside one of smaller trees, whose room would not do."""
    if rig.rollback != "tree":
        pytest.skip("snapshots keep no state factors")
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, n_seq_max=2, n_ctx=512, tree_budget=8)
    r.start()
    limit_memory(r.engine, trees=held(r.engine)[2])
    wanted = params(drafter=MTP, draft_tokens=5, seq_id=1, exact_rows=64, tree_budget=32)
    assert "bytes for" in error_of(new(r, wanted)[0], _capi.ERR_MEMORY)
    check_plain(r, run, 1, n=5)
    limit_memory(r.engine)
    status, second = new(r, wanted)
    assert status == _capi.OK
    lib.dw_engine_free(second)


@pytest.mark.parametrize("what", ["drafter", "trees"])
def test_an_engine_without_room_is_refused(rig, run_of, what):
    """DW_ERR_MEMORY says who holds how much; the engine beside it goes on."""
    if what == "trees" and rig.rollback != "tree":
        pytest.skip("snapshots keep no state factors")
    run = run_of("moe-mtp")
    r = rig(drafter=MTP, n_seq_max=2, engine=False)
    r.settings["drafter"] = NONE
    r.attach()
    r.start()
    limit_memory(r.engine, **{what: 1000})
    wanted = params(drafter=MTP, draft_tokens=5, seq_id=1, exact_rows=64)
    text = error_of(new(r, wanted)[0], _capi.ERR_MEMORY)
    assert "bytes for" in text
    assert "0 of 1000 are held" in text
    check_plain(r, run, 1, n=5)
    limit_memory(r.engine)
    status, second = new(r, wanted)
    assert status == _capi.OK
    lib.dw_engine_free(second)
