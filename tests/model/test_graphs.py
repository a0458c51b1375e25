"""src/hooks/graphs.*: verifies of alternating sizes reuse graphs and stay bit-equal to plain decoding."""

from __future__ import annotations

import pytest
from draftwood import _capi
from draftwood._llama_cpp import llama_cpp as native

from tests.model.rig import check_plain, follow


def n_reused(r) -> int:
    return native.llama_perf_context(r.ctx).n_reused


@pytest.mark.parametrize("preset", ["moe-mtp", "dense-mtp"])
def test_alternating_sizes_reuse_their_graphs(rig, run_of, preset):
    run = run_of(preset)
    r = rig(preset, drafter=_capi.DRAFTER_NONE)
    r.start()
    done, sizes = 1, (2, 4, 1, 5)
    for size in sizes:  # each size builds its graph once
        done = follow(r, run, done, 1, depth=size)
    before, rounds = n_reused(r), 0
    while done < 100:
        done = follow(r, run, done, 1, depth=sizes[rounds % len(sizes)])
        rounds += 1
    assert n_reused(r) - before == rounds
    check_plain(r, run, done)


def test_more_sizes_than_are_kept(rig, run_of):
    run = run_of("moe-mtp")
    r = rig("moe-mtp", drafter=_capi.DRAFTER_NONE, draft_tokens=16, n_rs_seq=16)
    r.start()
    done = 1
    for size in (*range(17), *range(16, -1, -1)):
        before = n_reused(r)
        r.engine.propose_given(run.tokens[done - 1], [run.wrong(done)] * size)
        r.engine.verify()
        assert r.engine.next(r.sampler) == run.tokens[done]
        r.engine.commit()
        done += 1
        assert n_reused(r) in (before, before + 1)
    check_plain(r, run, done)
