"""Slots that draft beside slots that must not, and slots that share a cache, as in `draftwood serve`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from tests.model.processes import ask, ready, serving
from tests.server.conftest import GetServer
from tests.server.process import MODEL
from tests.server.test_gaps import busy, together
from tests.server.test_one_slot import SAMPLED, seen
from tests.server.test_slots import BODIES, STORY, drafts

N = 4
SLOTS = ("-np", str(N), "-no-kvu", "-c", str(256 * N))
PAIRS = [*combinations(range(N), 2)]
SPLITS = [ids for n in range(1, N) for ids in combinations(range(N), n)]
HOW: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": SAMPLED}
TEXTS = ["The quick brown fox", "def add(a, b):\n    return", "1 2 3 4 5 6", "import os\n"]

Check = Callable[[list[dict[str, Any]], list[Any]], None]


@pytest.fixture(scope="module")
def check(server: GetServer) -> Check:
    """Check that each reply is the one of a client alone, with its probabilities."""
    alone = server("-np", "1", "-c", "256", "--spec-type", "plain")
    known: dict[str, Any] = {}

    def compare(bodies: list[dict[str, Any]], replies: list[Any]) -> None:
        for each, reply in zip(bodies, replies, strict=True):
            assert reply["id_slot"] == each["id_slot"]
            single = {**each, "id_slot": 0, "cache_prompt": False}
            if str(single) not in known:
                known[str(single)] = seen(alone.post("/completion", single))
            assert seen(reply) == known[str(single)]

    return compare


def body(i: int, how: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"prompt": TEXTS[i], "n_predict": 40, "n_probs": 2, **how, "seed": 5 + i, "id_slot": i, **changes}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("spec_type", ["mtp", "tree"])
def test_slots_that_must_not_draft_beside_slots_that_do(
    server: GetServer, check: Check, spec_type: str, how: dict[str, Any]
) -> None:
    """No request turns drafts off, but none is made where one token is left to sample. Each split of four."""
    slots = server(*SLOTS, "--spec-type", spec_type)
    for ids in SPLITS:
        long = [body(slot, how) for slot in ids]
        # they wait for their slot, so that others draft beside most of them
        short = [
            body(slot, how, n_predict=2, prompt=TEXTS[slot] + " a" * i)
            for i in range(6)
            for slot in range(N)
            if slot not in ids
        ]
        replies = together(slots.url, [*long, *short])
        check([*long, *short], replies)
        assert drafts(replies[: len(ids)])[1] > 0
        assert drafts(replies[len(ids) :]) == (0, 0)
    assert busy(slots) > 2, "of four slots"


@pytest.mark.parametrize("spec_type", ["mtp", "tree"])
def test_slots_whose_context_ends_beside_slots_that_draft(
    server: GetServer, check: Check, spec_type: str
) -> None:
    """The last two tokens of a context are plain steps, and then there is none."""
    slots = server(*SLOTS, "--spec-type", spec_type)
    for ends in PAIRS:
        bodies = [
            body(slot, SAMPLED, prompt=STORY * 9 + " a" * slot, n_predict=600, ignore_eos=True)
            if slot in ends
            else body(slot, SAMPLED)
            for slot in range(N)
        ]
        replies = together(slots.url, bodies)
        check(bodies, replies)
        assert [each["truncated"] for each in replies] == [slot in ends for slot in range(N)]
        assert all(drafts([each])[1] > 0 for each in replies)


def test_texts_without_a_repetition_beside_texts_with_one(server: GetServer, check: Check) -> None:
    """N-grams draft for the latter only."""
    slots = server(*SLOTS, "--spec-type", "ngram")
    hot = {**HOW["seeded"], "temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for ids in SPLITS:
        repeating = [body(slot, HOW["greedy"], prompt=STORY * 4) for slot in ids]
        others = [body(slot, hot) for slot in range(N) if slot not in ids]
        replies = together(slots.url, [*repeating, *others])
        check([*repeating, *others], replies)
        assert all(drafts([each])[1] > 0 for each in replies[: len(ids)])
        assert drafts(replies[len(ids) :]) == (0, 0)


@pytest.mark.parametrize("flags", [(), ("--speculation", "tree")], ids=["default", "tree"])
def test_one_cache_for_all(flags: tuple[str, ...]) -> None:
    """Each slot has pages of its own: replies are those of a single client."""
    bodies = [{**each, "n_probs": 5, "seed": 1 + i} for i, each in enumerate([*BODIES, *BODIES])]
    with serving(MODEL, *flags, n_ctx=2048, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        slots = ask(f"{address}/slots")
        assert [each["n_ctx"] for each in slots] == [2048] * 4
        wanted = [ask(f"{address}/completion", each) for each in bodies]
        replies = together(address, bodies)
    assert {each["id_slot"] for each in replies} == {0, 1, 2, 3}
    for each, reply, single in zip(bodies, replies, wanted, strict=True):
        assert not reply["truncated"]
        assert reply["stop_type"] == "eos" or reply["tokens_predicted"] == each["n_predict"]
        assert seen(reply) == seen(single)
    if flags:  # auto need not draft on a loaded machine
        assert drafts(replies)[1] > 0
