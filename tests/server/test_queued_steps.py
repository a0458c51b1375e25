"""Plain steps of a slot are queued before their token is known, as on a card: text stays as it is.

On a CPU a queued step is computed at once. Contract: src/server/slot_rounds.h, dw_params.queue_steps.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.server.process import Server
from tests.server.test_limits import until
from tests.server.test_one_slot import seen

PROMPTS = ["The quick brown fox", "def add(a, b):\n    return", "1 2 3 4 5 6 7 8 9 10 11 12"]
SLOTS = {"one": ("-np", "1"), "several": ("-np", "3", "--kv-unified")}


@pytest.fixture(scope="module", params=SLOTS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """A server whose steps wait, and one that queues them."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_SERVER_RESULTS", "top")
        for queues in "01":
            patch.setenv("DRAFTWOOD_QUEUE_STEPS", queues)
            folder = tmp_path_factory.mktemp(f"queue-{queues}")
            flags = (*SLOTS[request.param], "-c", "1536", "--spec-type", "plain", "--metrics")
            made.append(Server(folder / "server.log", *flags, "--slot-save-path", f"{folder}/").wait())
    yield made
    for each in made:
        each.close()


def counted(server: Server) -> tuple[int, int]:
    """Return how many queued steps were taken, and how many were dropped."""
    found = dict(re.findall(r"^llamacpp:(queued|dropped)_steps_total (\d+)$", server.get("/metrics"), re.M))
    return int(found["queued"]), int(found["dropped"])


def rest(server: Server) -> None:
    """Let each slot write so much that it queues steps again, whatever became of those before."""
    for slot in server.get("/slots"):
        server.complete(PROMPTS[1], n_predict=60, cache_prompt=False, id_slot=slot["id"])


def check(both: list[Server], *bodies: dict[str, Any], queued: int, dropped: int) -> list[Any]:
    """Send requests one after another to both; check replies, and what the second server counts."""
    before = counted(both[1])
    replies = [[each.post("/completion", {"temperature": 0, **body}) for body in bodies] for each in both]
    assert [seen(reply) for reply in replies[0]] == [seen(reply) for reply in replies[1]]
    assert counted(both[0]) == (0, 0)
    after = counted(both[1])
    assert (after[0] - before[0], after[1] - before[1]) == (queued, dropped)
    return replies[1]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_text_queues_all_steps_but_the_first(both, prompt):
    """The prompt gives the first token, and the step behind the last one is dropped."""
    body = {"prompt": prompt, "n_predict": 40, "cache_prompt": False}
    check(both, body, {**body, "n_probs": 3}, queued=2 * 38, dropped=2)


def test_a_conversation_goes_on_from_what_the_slot_holds(both):
    body = {"id_slot": 0, "n_predict": 20}
    (first,) = check(both, {**body, "prompt": PROMPTS[0], "cache_prompt": False}, queued=18, dropped=1)
    longer = PROMPTS[0] + first["content"] + " and then"
    (second,) = check(both, {**body, "prompt": longer}, queued=18, dropped=1)
    assert second["tokens_cached"] > first["tokens_cached"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_short_texts(both, n):
    body = {"prompt": PROMPTS[1], "n_predict": n, "cache_prompt": False}
    check(both, body, queued=max(0, n - 2), dropped=1 if n > 1 else 0)


def test_a_text_that_a_stop_word_ends(both):
    body: dict[str, Any] = {"prompt": PROMPTS[2], "n_predict": 40, "cache_prompt": False}
    whole = both[0].post("/completion", {"temperature": 0, **body})["content"]
    stops = {**body, "stop": [whole[len(whole) // 2 :][:6]]}
    for how in (stops, {**stops, "cache_prompt": True}, body):
        replies = [each.post("/completion", {"temperature": 0, **how}) for each in both]
        assert seen(replies[0]) == seen(replies[1])
        assert replies[0]["stop_type"] == ("limit" if how is body else "word")


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.8, "seed": 3},
        {"repeat_penalty": 1.3},
        {"grammar": "root ::= [a-z ]+"},
        {"logit_bias": [[300, 4]]},
        {"top_k": 0},
    ],
    ids=lambda each: next(iter(each)),
)
def test_who_may_not_take_the_best_token_waits(both, how):
    body = {"prompt": PROMPTS[0], "n_predict": 24, "cache_prompt": False}
    check(both, {**body, **how}, queued=0, dropped=0)


def test_a_step_whose_token_was_not_taken_is_dropped(both):
    """A bias that lowers the best token."""
    reply = both[0].complete(PROMPTS[0], n_predict=8, n_probs=1)
    best = [each["id"] for each in reply["completion_probabilities"]]
    body = {"prompt": PROMPTS[0], "n_predict": 24, "cache_prompt": False, "logit_bias": [[best[3], -20]]}
    before = counted(both[1])
    replies = [each.post("/completion", {"temperature": 0, **body}) for each in both]
    assert seen(replies[0]) == seen(replies[1])
    assert counted(both[1])[1] - before[1] > 1
    rest(both[1])


def test_slots_that_are_saved_and_restored(both):
    body = {"prompt": PROMPTS[0] * 4, "n_predict": 24, "id_slot": 0}
    check(both, {**body, "cache_prompt": False}, queued=22, dropped=1)
    for each in both:
        saved = each.post("/slots/0?action=save", {"filename": "text.bin"})
        each.post("/slots/0?action=erase", {})
        restored = each.post("/slots/0?action=restore", {"filename": "text.bin"})
        assert restored["n_restored"] == saved["n_saved"]
    check(both, body, queued=22, dropped=1)


def test_several_replies_of_one_prompt(both):
    """With one slot they follow each other."""
    replies = [each.complete(PROMPTS[:2], n_predict=24, cache_prompt=False) for each in both]
    assert [seen(one) for one in replies[0]] == [seen(one) for one in replies[1]]


def test_a_client_that_leaves_and_others_that_come(both):
    """Beside a text whose steps are queued: other prompts, a client that leaves, steps that are not taken."""
    waits, queues = both
    reply = waits.complete(PROMPTS[0], n_predict=8, n_probs=1)
    bias = [[each["id"], -20] for each in reply["completion_probabilities"][::3]]
    lowered = {"n_predict": 60, "cache_prompt": False, "logit_bias": bias}
    of_lowered = seen(waits.complete(PROMPTS[0], **lowered))
    wanted = {prompt: seen(waits.complete(prompt, n_predict=60, cache_prompt=False)) for prompt in PROMPTS}
    wrong = []

    def ask(prompt: str) -> None:
        for _ in range(4):
            if seen(queues.complete(prompt, n_predict=60, cache_prompt=False)) != wanted[prompt]:
                wrong.append(prompt)

    def miss() -> None:
        for _ in range(8):
            if seen(queues.complete(PROMPTS[0], **lowered)) != of_lowered:
                wrong.append("lowered")

    def leave() -> None:
        body = {"prompt": "Once upon a time", "n_predict": 400, "temperature": 0, "stream": True}
        for _ in range(6):
            with requests.post(f"{queues.url}/completion", json=body, stream=True, timeout=60) as reply:
                next(reply.iter_lines())

    threads = [threading.Thread(target=ask, args=(each,)) for each in PROMPTS]
    threads += [threading.Thread(target=leave), threading.Thread(target=miss)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert until(lambda: not any(each["is_processing"] for each in queues.get("/slots")))
    rest(queues)
    before = counted(queues)
    assert seen(queues.complete(PROMPTS[0], n_predict=60, cache_prompt=False)) == wanted[PROMPTS[0]]
    assert counted(queues)[0] - before[0] == 58
