"""The prompt cache: a text whose slot was given to another comes back from host memory, and drafts go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import GetServer
from tests.server.process import DRAFTER, Server
from tests.server.test_one_slot import SAMPLED, seen
from tests.server.test_slots import STORY, drafts

TYPES = [("mtp",), ("tree",), ("dflash", "-md", DRAFTER)]
ONE = ("-np", "1", "-c", "1024")
NO_CACHE = ("-cram", "0")
A = STORY * 8
B = "import os\nimport sys\n\n\ndef main(argv):\n    return 0\n\n" * 5
TURN = " But then she"
# hot texts leave the story, and then it does not matter what a drafter knows of it
HOW = {"greedy": {"temperature": 0}, "seeded": {**SAMPLED, "temperature": 0.3}}


@pytest.fixture(params=TYPES, ids=lambda each: each[0])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ("--spec-type", *request.param)


@pytest.fixture(params=HOW.values(), ids=HOW)
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"n_predict": 48, "n_probs": 2, **request.param}


@pytest.fixture
def plain(server: GetServer) -> Server:
    return server(*ONE, *NO_CACHE, "--spec-type", "plain")


def rate(reply: Any) -> float:
    drafted, accepted = drafts([reply])
    return accepted / drafted


def turns(server: Server, how: dict[str, Any]) -> list[Any]:
    """Return the replies to A, to B, and to A with its reply and one turn more."""
    first = server.complete(A, **how)
    other = server.complete(B, **how)
    return [first, other, server.complete(A + first["content"] + TURN, **how)]


def test_a_text_goes_on_where_it_was(server: GetServer, plain: Server, flags: Any, how: Any) -> None:
    """Without the drafter's part half as many of its drafts are accepted."""
    cached, anew = (turns(server(*ONE, *cache, *flags), how) for cache in ((), NO_CACHE))
    assert [seen(each) for each in cached] == [seen(each) for each in turns(plain, how)]
    assert [seen(each) for each in cached] == [seen(each) for each in anew]
    assert anew[2]["timings"]["cache_n"] == 0, "without the cache nothing is left of a text that was replaced"
    n_prompt = cached[0]["tokens_evaluated"]
    assert cached[2]["timings"]["cache_n"] > n_prompt + how["n_predict"] // 2 > 100, "its reply, too"
    assert rate(cached[2]) > 0.8 * rate(anew[2])


def test_a_text_goes_back_to_its_checkpoint(server: GetServer, plain: Server, flags: Any, how: Any) -> None:
    """Its checkpoints lie in the cache, too: another turn in place of the reply begins at one of them."""
    slot = server(*ONE, *flags)
    turns(slot, how)
    slot.complete(B, **how)
    again = slot.complete(A + TURN, **how)
    anew = server(*ONE, *NO_CACHE, *flags).complete(A + TURN, **how, cache_prompt=False)
    n_prompt = again["tokens_evaluated"]
    assert n_prompt > again["timings"]["cache_n"] > 100 > anew["timings"]["cache_n"]
    assert seen(again) == seen(anew) == seen(plain.complete(A + TURN, **how, cache_prompt=False))
    assert rate(again) > 0.8 * rate(anew)


BEGINNINGS = [STORY * 5, B, "1 2 3 4 5 6 7 8 9 " * 6, '{"name": "a", "items": [1, 2, 3]},\n' * 6]


def chat(server: Server, text: str, how: dict[str, Any]) -> list[Any]:
    """Return the replies of three turns."""
    replies = []
    for _ in range(3):
        replies.append(server.complete(text, **how))
        text += replies[-1]["content"] + " and"
    return replies


def test_more_chats_than_slots(server: GetServer, plain: Server, flags: Any, how: Any) -> None:
    """A text comes back to the slot that is free, which need not be the one that it was in."""
    how = {**how, "n_predict": 16}
    slots = server("-np", "2", "-no-kvu", "-c", "2048", *flags)
    with ThreadPoolExecutor(len(BEGINNINGS)) as clients:
        found = list(clients.map(lambda each: chat(slots, each, how), BEGINNINGS))
    wanted = [chat(plain, each, {**how, "cache_prompt": False}) for each in BEGINNINGS]
    assert [[seen(each) for each in replies] for replies in found] == [
        [seen(each) for each in replies] for replies in wanted
    ]
    later = [each for replies in found for each in replies[1:]]
    assert all(each["timings"]["cache_n"] > 0 for each in later)
    assert drafts(later)[1] > 0
