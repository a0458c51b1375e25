"""A verify whose graph finds no memory: the round goes on, with fewer rows if need be, with the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.engine.little_memory import NEEDS, run
from tests.model.rig import PROMPT

TINY = Path(__file__).resolve().parents[3] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
SCRIPT = """
path, spare, first = sys.argv[1], *map(int, sys.argv[2:4])
r = Rig(path, drafter=_capi.DRAFTER_MTP, tree_budget=64, draft_tokens=8, n_ctx=4096, n_ubatch=64)
tokens, rounds = [r.start()], 0
while len(tokens) < 48:
    if spare and rounds == first:
        refuse(spare << 10)
    rounds += 1
    r.engine.propose(tokens[-1])
    r.engine.verify()
    while r.engine.row() is not None:
        tokens.append(r.sample()[0])
    r.engine.commit()
stats = r.engine.stats()
found = dict(tokens=tokens[:48], limit=stats.row_limit, shared=stats.shared_rounds, rounds=rounds,
             accepted=stats.accepted)
"""

pytestmark = NEEDS


def rounds(shim, path, spare: int = 0, first: int = 0) -> dict:
    """Return text and counters of rounds, blocks over `spare` KiB refused (0: none) from round `first` on."""
    found = run(SCRIPT, shim, path, spare, first, refuses=spare > 0)
    assert 0 < found["shared"] <= found["rounds"] - first if spare else found["shared"] == 0
    return found


def test_rounds_go_on_in_the_memory_set_aside(gguf, shim):
    """No verify has memory for a graph of its own; what llama.cpp holds for prompts has room for 64 rows."""
    path = gguf("moe-mtp")
    expected = rounds(shim, path)
    assert expected["limit"] == 0
    for spare in (1024, 512, 256):
        found = rounds(shim, path, spare)
        assert (found["tokens"], found["limit"]) == (expected["tokens"], 0)


def test_rounds_go_on_with_fewer_rows(gguf, shim):
    """What a verify hands over has no room either."""
    path = gguf("moe-mtp")
    found = rounds(shim, path, 128)
    assert found["tokens"] == rounds(shim, path)["tokens"]
    assert 1 < found["limit"] < 64


COMMIT_SCRIPT = """
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_GIVEN, tree_budget=8, n_ctx=4096, n_ubatch=64)
r.engine.propose_given(r.start(), [5, 6, 7])
r.engine.verify()
first = r.sample()[0]
refuse(4 << 10)
r.engine.commit()
found = [first, r.engine.n_past]
"""


def test_a_commit_takes_no_memory(gguf, shim):
    """There is nothing to fall back to then: what it needs, the verify took."""
    assert run(COMMIT_SCRIPT, shim, gguf("moe-mtp"), refuses=False)[1] == len(PROMPT) + 1


@pytest.mark.parametrize("spare", [64, 16, 4])
@pytest.mark.parametrize("first", [1, 3])
def test_drafts_without_memory_for_more_are_those_that_fit(shim, spare, first):
    """The drafter's graphs find none, round after round; its context's own are there, and drafts as good."""
    found, expected = rounds(shim, TINY, spare, first), rounds(shim, TINY)
    assert found["tokens"] == expected["tokens"]
    assert expected["accepted"] > 24
    assert found["accepted"] >= 0.9 * expected["accepted"]


CHAIN_SCRIPT = """
path, spare, n_rs_seq, n_draft = sys.argv[1], *map(int, sys.argv[2:5])
r = Rig(path, drafter=_capi.DRAFTER_GIVEN, draft_tokens=n_draft, n_ctx=4096, n_ubatch=64, n_rs_seq=n_rs_seq)
found = []
for over in (spare << 10, ALL):
    tokens = [r.start(range(3, 50))]
    refuse(over)
    while len(tokens) < 12:
        r.engine.propose_given(tokens[-1], [5] * n_draft)
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.sample()[0])
        r.engine.commit()
    found.append([tokens, r.engine.stats().row_limit])
    r.engine.reset()
"""


@pytest.mark.parametrize(("preset", "n_rs_seq"), [("moe-mtp", 62), ("dense-plain", 62)])
def test_chains_without_tree_ops_are_shortened_too(gguf, shim, preset, n_rs_seq):
    """A context with snapshots has no tree state, whose verifies write nothing that counts."""
    (little, limit), (much, _) = run(CHAIN_SCRIPT, shim, gguf(preset), 64, n_rs_seq, 62)
    assert little == much
    assert 0 < limit < 63


SOME_SNAPSHOTS = """
n_rs_seq, n_draft, over = map(int, sys.argv[2:5])
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_GIVEN, draft_tokens=5, n_ctx=4096, n_ubatch=64, n_rs_seq=n_rs_seq,
        tree_budget=8)
def text(over):
    tokens = [r.start(range(3, 50))]
    for k in range(24):
        if k == 1:
            refuse(over)
        r.engine.propose_given(tokens[-1], [5, 6, 7, 8, 9][:n_draft] if k else [5, 6])
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.sample()[0])
        r.engine.commit()
    return tokens[:24]
r.start(range(2, 60))
found = [text(over), text(ALL)]
"""


@pytest.mark.parametrize(("n_rs_seq", "n_draft", "over"), [(2, 1, 4 << 10), (4, 3, 64 << 10)])
def test_a_verify_undone_reads_its_state_not_a_snapshot(gguf, shim, n_rs_seq, n_draft, over):
    """With fewer snapshots than draft tokens trees are verified; llama.cpp itself went back by a snapshot."""
    little, much = run(SOME_SNAPSHOTS, shim, gguf("moe-mtp"), n_rs_seq, n_draft, over)
    assert little == much
