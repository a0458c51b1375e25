"""Several slots: each reply is the one that a client gets alone, whoever else is served."""

from __future__ import annotations

import random
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server
from tests.server.test_one_slot import SAMPLED, seen

STORY = "Once upon a time there was a little girl who lived in a house. "
PROMPTS = ["The quick brown fox", "def add(a, b):\n    return", "1 2 3 4 5 6", STORY * 12, "import os\n"]
SLOTS = ("-np", "4", "-no-kvu", "-c", "2048")
SHARED = ("-np", "4", "-kvu", "-c", "2048")  # one cache for all


def body(i: int, how: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[i],
        "n_predict": 24 + 7 * i,
        "temperature": 0,
        "n_probs": 2,
        **how,
        "seed": 5 + i,
    }


BODIES = [body(i, how) for how in ({}, SAMPLED) for i in range(len(PROMPTS))]


KINDS = {"mtp": SLOTS, "tree": SLOTS, "auto": SLOTS, "mtp, one cache": SHARED, "tree, one cache": SHARED}


@pytest.fixture(params=KINDS)
def slots(request: pytest.FixtureRequest, server: GetServer) -> Server:
    return server(*KINDS[request.param], "--spec-type", request.param.partition(",")[0])


@pytest.fixture
def alone(server: GetServer) -> Server:
    return server("-np", "1", "-c", "512", "--spec-type", "plain")


def drafts(replies: list[Any]) -> tuple[int, int]:
    names = ("draft_n", "draft_n_accepted")
    drafted, accepted = (sum(each["timings"].get(name, 0) for each in replies) for name in names)
    return drafted, accepted


@pytest.mark.parametrize("n_clients", [1, 2, 4, 6])
def test_clients_get_what_each_gets_alone(slots: Server, alone: Server, n_clients: int) -> None:
    order = [each for each in BODIES for _ in range(2)]
    random.Random(n_clients).shuffle(order)
    with ThreadPoolExecutor(n_clients) as clients:
        replies = list(clients.map(lambda each: slots.post("/completion", each), order))
    for each, reply in zip(order, replies, strict=True):
        assert seen(reply) == seen(alone.post("/completion", {**each, "cache_prompt": False}))
    drafted, accepted = drafts(replies)
    assert drafted >= accepted
    assert accepted > 0 or slots.spec_type == "auto"  # which need not draft on a loaded machine


@pytest.mark.parametrize("ids", list(combinations(range(4), 2)), ids=str)
def test_any_two_slots_work_together(slots: Server, alone: Server, ids: tuple[int, int]) -> None:
    bodies = [{**BODIES[i], "id_slot": slot} for i, slot in enumerate(ids)]
    with ThreadPoolExecutor(2) as clients:
        replies = list(clients.map(lambda each: slots.post("/completion", each), bodies))
    assert [each["id_slot"] for each in replies] == list(ids)
    for each, reply in zip(bodies, replies, strict=True):
        assert seen(reply) == seen(alone.post("/completion", {**each, "id_slot": -1, "cache_prompt": False}))


def test_two_choices_of_one_prompt(slots: Server, server: GetServer) -> None:
    plain = server(*SLOTS, "--spec-type", "plain")
    both = [
        each.post(
            "/v1/completions", {"prompt": STORY, "max_tokens": 32, "n": 2, "temperature": 0.9, "seed": 11}
        )
        for each in (slots, plain)
    ]
    texts = [[choice["text"] for choice in reply["choices"]] for reply in both]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2


@pytest.mark.parametrize("n_clients", [2, 3])
def test_choices_of_prompts_beside_other_slots(slots: Server, server: GetServer, n_clients: int) -> None:
    """A prompt's copies wait for its last part: the batch goes on in parts when others generate."""
    many = [
        {"prompt": STORY * 3 + str(i), "max_tokens": 24, "n": 2, "temperature": 0.9, "seed": 11 + i}
        for i in range(n_clients)
    ]
    plain = server(*SLOTS, "--spec-type", "plain")
    wanted = [[c["text"] for c in plain.post("/v1/completions", each)["choices"]] for each in many]
    with ThreadPoolExecutor(n_clients + 1) as clients:
        other = clients.submit(slots.post, "/completion", {**BODIES[3], "n_predict": 200})
        found = list(clients.map(lambda each: slots.post("/v1/completions", each), many))
        assert other.result()["tokens_predicted"] > 1
    assert [[choice["text"] for choice in each["choices"]] for each in found] == wanted


def idle(server: Server) -> bool:
    return not any(slot["is_processing"] for slot in server.get("/slots"))


def test_a_client_that_goes_away_leaves_the_others_alone(slots: Server, alone: Server) -> None:
    long = {"prompt": STORY, "n_predict": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    with ThreadPoolExecutor(2) as clients:
        other = clients.submit(slots.post, "/completion", BODIES[0])
        for n_lines in (1, 3, 8):
            with requests.post(f"{slots.url}/completion", json=long, stream=True, timeout=60) as gone:
                for _ in zip(range(n_lines), gone.iter_lines(), strict=False):
                    pass
        reply = other.result()
    assert seen(reply) == seen(alone.post("/completion", {**BODIES[0], "cache_prompt": False}))
    end = time.monotonic() + 60
    while not idle(slots) and time.monotonic() < end:
        time.sleep(0.05)
    assert idle(slots)
    assert seen(slots.post("/completion", BODIES[5])) == seen(alone.post("/completion", BODIES[5]))


def test_a_saved_slot_goes_on_elsewhere(slots: Server, alone: Server) -> None:
    start = {"prompt": STORY * 3, "n_predict": 16, "temperature": 0, "id_slot": 1}
    first = slots.post("/completion", start)
    saved = slots.post("/slots/1?action=save", {"filename": "chat.bin"})
    slots.post("/slots/1?action=erase", {})
    slots.post("/completion", {**BODIES[0], "id_slot": 3})
    restored = slots.post("/slots/3?action=restore", {"filename": "chat.bin"})
    assert restored["n_restored"] == saved["n_saved"] > 16
    longer = {**start, "prompt": STORY * 3 + first["content"] + " And then", "n_predict": 40}
    reply = slots.post("/completion", {**longer, "id_slot": 3})
    assert (
        reply["content"]
        == alone.post("/completion", {**longer, "id_slot": -1, "cache_prompt": False})["content"]
    )
    assert reply["timings"]["cache_n"] > 0


def test_a_slots_file_is_nobody_elses(slots: Server) -> None:
    for slot, name in ((1, "a.draft"), (0, "a")):
        slots.post("/completion", {**BODIES[0], "id_slot": slot})
        slots.post(f"/slots/{slot}?action=save", {"filename": name})
    for name in ("a.draft", "a"):
        assert slots.post("/slots/2?action=restore", {"filename": name})["n_restored"] > 0


def with_text_of(longer: bytes, shorter: bytes) -> bytes:
    """Return a slot's file with the tokens of one and the memory of another."""
    head = struct.Struct("<III")  # magic, version, tokens
    ends = [head.size + 4 * head.unpack_from(each)[2] for each in (longer, shorter)]
    return longer[: ends[0]] + shorter[ends[1] :]


@pytest.mark.parametrize("flags", [(), ("-ub", "32")], ids=["one batch", "several"])
@pytest.mark.parametrize("n_others", [0, 2])
@pytest.mark.parametrize("spec_type", ["mtp", "tree", "auto"])
def test_a_slot_whose_memory_lacks_a_part_of_its_text_evaluates_it_anew(
    server: GetServer, alone: Server, spec_type: str, n_others: int, flags: tuple[str, ...]
) -> None:
    """By a damaged file: no other request moves a slot's memory behind the server's back."""
    slots = server(*SLOTS, "--spec-type", spec_type, *flags)
    folder = slots.log.parent / "slots"
    texts = (STORY * 4, STORY * 4 + "One day she went to the park with her mother.")
    for prompt, name in zip(texts, ("short", "long"), strict=True):
        slots.post("/completion", {"prompt": prompt, "n_predict": 1, "id_slot": 2, "cache_prompt": False})
        slots.post("/slots/2?action=save", {"filename": name})
    short, long = ((folder / name).read_bytes() for name in ("short", "long"))
    (folder / "mixed").write_bytes(with_text_of(long, short))
    n_restored = slots.post("/slots/2?action=restore", {"filename": "mixed"})["n_restored"]
    n_anew = slots.words().count("tokens anew")
    turn = {"prompt": f"{texts[1]} There", "n_predict": 40, "temperature": 0, "n_probs": 2}
    bodies = [{**turn, "id_slot": 2}, *({**BODIES[i], "id_slot": i} for i in range(n_others))]
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda each: slots.post("/completion", each), bodies))
    assert replies[0]["timings"]["cache_n"] == n_restored, "the server took all of it for evaluated"
    assert slots.words().count("tokens anew") == n_anew + 1
    longer = {**turn, "prompt": turn["prompt"] + replies[0]["content"] + " Then", "id_slot": 2}
    replies.append(slots.post("/completion", longer))
    assert replies[-1]["timings"]["cache_n"] > n_restored, "the slot goes on from there"
    assert slots.words().count("tokens anew") == n_anew + 1
    for each, reply in zip([*bodies, longer], replies, strict=True):
        assert seen(reply) == seen(alone.post("/completion", {**each, "id_slot": -1, "cache_prompt": False}))


def test_saves_and_restores_under_load_have_their_turn(slots: Server) -> None:
    with ThreadPoolExecutor(8) as clients:
        texts = [clients.submit(slots.post, "/completion", BODIES[i % 5]) for i in range(24)]
        saves = [
            clients.submit(slots.post, f"/slots/{i % 4}?action=save", {"filename": f"{i}.bin"})
            for i in range(12)
        ]
        assert all(each.result()["n_saved"] >= 0 for each in saves)
        assert all(each.result()["tokens_predicted"] > 0 for each in texts)


def test_metrics_count_drafts(slots: Server) -> None:
    before = metrics(slots)
    replies = [slots.complete(each, n_predict=48) for each in PROMPTS]
    after = metrics(slots)
    drafted, accepted = drafts(replies)
    assert after["draft"] - before["draft"] == drafted
    assert after["accepted"] - before["accepted"] == accepted
    assert accepted > 0 or slots.spec_type == "auto"  # which need not draft on a loaded machine


def metrics(server: Server) -> dict[str, float]:
    lines = [line.split() for line in server.get("/metrics").splitlines() if not line.startswith("#")]
    values = {words[0].partition(":")[2]: float(words[-1]) for words in lines}
    return {each: values[f"spec_decode_num_{each}_tokens_total"] for each in ("draft", "accepted")}


def rate(reply: Any) -> float:
    drafted, accepted = drafts([reply])
    return accepted / drafted


def test_a_restored_slot_drafts_as_well_as_the_saved_one(server: GetServer) -> None:
    mtp = server(*SLOTS, "--spec-type", "mtp")
    start = {"prompt": STORY * 8, "n_predict": 40, "temperature": 0}
    first = mtp.post("/completion", {**start, "id_slot": 0})
    mtp.post("/slots/0?action=save", {"filename": "story.bin"})
    turn = {**start, "prompt": STORY * 8 + first["content"] + " The next day she"}
    here = mtp.post("/completion", {**turn, "id_slot": 0})
    mtp.post("/slots/2?action=restore", {"filename": "story.bin"})
    there = mtp.post("/completion", {**turn, "id_slot": 2})
    assert there["content"] == here["content"]
    assert rate(there) > 0.9 * rate(here)


def test_the_next_turn_drafts_as_well_as_a_text_evaluated_anew(server: GetServer) -> None:
    mtp = server(*SLOTS, "--spec-type", "mtp")
    wanted = {"prompt": STORY * 8 + " But then", "n_predict": 40, "temperature": 0, "id_slot": 1}
    mtp.post("/completion", {**wanted, "prompt": STORY * 8})
    turn = mtp.post("/completion", wanted)
    anew = mtp.post("/completion", {**wanted, "cache_prompt": False})
    assert turn["timings"]["cache_n"] > 100 > anew["timings"]["cache_n"]
    assert turn["content"] == anew["content"]
    assert rate(turn) > 0.9 * rate(anew)
