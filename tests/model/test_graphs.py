"""The graph store: verifies of alternating sizes reuse graphs and stay bit-equal to plain decoding."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from draftwood._llama_cpp import llama_cpp as native
from draftwood.engine import _capi

from tests.model.rig import PROMPT, check_plain, follow

HEADER = Path(__file__).resolve().parents[2] / "src" / "llama" / "graph_store.h"


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
    """A graph is there again exactly if it is one of the most recently used, beside the context's own."""
    run, sizes = run_of("moe-mtp"), [n for n in range(1, 18) if n != len(PROMPT)]
    room = int(re.search(r"max_kept = (\d+);", HEADER.read_text())[1]) - 1
    assert room < len(sizes)
    for n_rs_seq in (0, 16):
        r = rig("moe-mtp", drafter=_capi.DRAFTER_NONE, draft_tokens=16, n_rs_seq=n_rs_seq)
        r.start()
        chance, kept, builds = random.Random(n_rs_seq), [len(PROMPT)], 0
        for done in range(1, 171):
            size, before = chance.choice(sizes), n_reused(r)
            r.engine.propose_given(run.tokens[done - 1], [run.wrong(done)] * (size - 1))
            r.engine.verify()
            assert r.engine.next(r.sampler) == run.tokens[done]
            r.engine.commit()
            reused = n_reused(r) - before
            assert reused == (size in kept), f"round {done}: {size} rows after those of {kept}"
            kept = [*(n for n in kept if n != size), size][-room:]
            builds += not reused
        assert builds > 2 * len(sizes), "many were dropped and built again"
        check_plain(r, run, done + 1)
