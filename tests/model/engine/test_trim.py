"""dw_trim, dw_rewind, dw_reset: exact or refused, never another position's state."""

from __future__ import annotations

import pytest

from tests.model.engine.calls import HYBRIDS, MTP, last_error
from tests.model.rig import PROMPT, check_next, check_plain, follow


@pytest.mark.parametrize("n_prompt", [1, 3, 5, 6, 7, 20, 64])
@pytest.mark.parametrize("preset", HYBRIDS)
def test_trim_is_exact_or_refused(rig, run_of, preset, n_prompt):
    """After each possible trim the next rows equal plain ones; what snapshots do not reach is refused."""
    run = run_of(preset)
    text = [*run.prompt, *run.tokens]
    r = rig(preset, drafter=MTP)
    for back in range(1, n_prompt + 1):
        r.engine.reset()
        r.engine.eval(text[:12], 0)
        r.engine.eval(text[12 : 12 + n_prompt], 12)
        keep = 12 + n_prompt - back
        reach = min(5, n_prompt - 1) if rig.rollback == "snapshots" else 0
        if back > reach:
            assert not r.engine.trim(keep), f"back {back} of {n_prompt}"
            assert r.held == r.engine.n_past == 12 + n_prompt
            continue
        assert r.engine.trim(keep), f"back {back} of {n_prompt}"
        assert r.held == r.engine.n_past == keep
        check_plain(r, run, keep - len(run.prompt) + 1)


def test_trim_after_a_round(rig, run_of):
    run = run_of("moe-mtp")
    r = rig(drafter=MTP)
    for accept in range(6):
        for back in range(1, 8):
            r.start()
            done = follow(r, run, 1, accept)
            end = r.held
            if r.engine.trim(end - back):
                check_plain(r, run, done - back)
            else:
                assert r.held == end
                check_plain(r, run, done)


def test_trim_to_where_it_stands_keeps_the_row(rig, run_of):
    run = run_of("moe-mtp")
    r = rig()
    r.engine.eval(PROMPT, 0)
    assert r.engine.trim(len(PROMPT))
    assert r.sample()[0] == run.tokens[0]


def test_trim_to_nothing_is_a_reset(rig, run_of):
    r = rig(drafter=MTP)
    r.start()
    assert r.engine.trim(0)
    assert r.held == r.engine.n_past == 0
    assert r.start() == run_of("moe-mtp").tokens[0]


def test_snapshots_older_than_the_last_decode_are_refused(started):
    """llama_memory_seq_rm would take them and restore another position's state."""
    r, run = started
    check_plain(r, run, 1, 3)
    end = r.held
    assert not r.engine.trim(end - 1)
    assert "cannot go back from 15 to 14" in last_error()
    check_plain(r, run, 4)


def test_rewind(started):
    r, run = started
    assert r.engine.rewind()
    check_next(r, run, 0)
    for accept in range(6):
        r.start()
        done = follow(r, run, 1, accept)
        last, emitted = r.engine.last_row(), r.engine.stats().emitted
        assert r.engine.row() is None
        assert r.engine.rewind()
        assert r.engine.row() == (last, r.engine.n_past)
        assert r.engine.stats().emitted == emitted
        check_next(r, run, done - 1)
        assert r.engine.row() is None
        check_plain(r, run, done)


def test_rewind_refuses_what_is_gone(rig):
    r = rig(drafter=MTP)
    assert not r.engine.rewind()
    assert r.engine.last_row() is None
    r.start()
    r.engine.propose_given(1, [2, 3])
    r.engine.verify()
    assert not r.engine.rewind(), "a round is open"
    assert r.engine.last_row() is None
    r.engine.commit()
    r.raw_decode([5])
    assert not r.engine.rewind(), "another decode's logits"
    assert r.engine.last_row() is None
