"""The budget of memory beside llama.cpp's own: counted, limited, refused in words, given back."""

from __future__ import annotations

import pytest
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


@pytest.mark.parametrize(
    ("n_ctx", "n_seq_max", "kv_unified", "n_cells"),
    [
        pytest.param(512, 2, False, 256, id="two sequences with a cache each"),
        pytest.param(1024, 4, False, 256, id="four"),
        pytest.param(512, 2, True, 512, id="two sequences in one cache: each may fill it"),
    ],
)
def test_a_drafter_has_the_cells_of_one_sequence(rig, n_ctx, n_seq_max, kv_unified, n_cells):
    alone = rig(drafter=MTP, n_ctx=n_cells)
    beside_others = rig(drafter=MTP, n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=kv_unified)
    assert held(beside_others.engine)[0] == held(alone.engine)[0] > 0


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
