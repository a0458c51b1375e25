"""Eight slots, any of them idle: a seeded reply is the library's, whatever gaps are among those that work."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from draftwood import Llama

from tests.server.conftest import GetServer
from tests.server.process import MODEL, Server
from tests.server.test_one_slot import SAMPLED, seen

PROMPTS = [
    "The quick brown fox",
    "def add(a, b):\n    return",
    "1 2 3 4 5 6",
    "Once upon a time there was a little girl",
    "import os\n",
    '{"name": "',
    "# Title\n\nThe",
    "for i in range(",
]
N = len(PROMPTS)
SEEDS = 3  # for each prompt
SUBSETS = [[slot for slot in range(N) if pattern >> slot & 1] for pattern in range(1, 1 << N)]


def body(slot: int, seed: int) -> dict[str, Any]:
    n = 6 + (slot + seed) % 3  # some end before others: what is left is another pattern
    return {"prompt": PROMPTS[slot], "n_predict": n, "n_probs": 2, **SAMPLED, "seed": 1 + slot + 100 * seed}


Wanted = dict[tuple[int, int], Any]


@pytest.fixture(scope="module")
def wanted(server: GetServer) -> Wanted:
    """Replies of a server that drafts nothing to a client that is alone."""
    plain = server("-np", "1", "-c", "512", "--spec-type", "plain")
    pairs = [(slot, seed) for slot in range(N) for seed in range(SEEDS)]
    return {pair: seen(plain.post("/completion", {**body(*pair), "cache_prompt": False})) for pair in pairs}


@pytest.fixture(scope="module")
def llama() -> Iterator[Llama]:
    # flash_attn as llama-server chooses on a CPU
    made = Llama(
        MODEL, n_ctx=512, n_threads=1, n_threads_batch=1, flash_attn=True, speculation="off", verbose=False
    )
    yield made
    made.close()


def together(url: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Send all requests before a reply is read: clients on threads would come late and find no other."""
    clients = [HTTPConnection(url.removeprefix("http://"), timeout=240) for _ in bodies]
    try:
        for each in clients:
            each.connect()
        for each, request in zip(clients, bodies, strict=True):
            each.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        replies = [each.getresponse() for each in clients]
        texts = [each.read().decode() for each in replies]
        assert all(each.status == 200 for each in replies), texts
        return [json.loads(each) for each in texts]
    finally:
        for each in clients:
            each.close()


def busy(server: Server) -> float:
    """Return how many slots had a request while the server decoded, in the mean."""
    lines = [line.split() for line in server.get("/metrics").splitlines()]
    return next(float(words[1]) for words in lines if words[0] == "llamacpp:n_busy_slots_per_decode")


def test_texts_alone_are_the_librarys(wanted: Wanted, llama: Llama) -> None:
    texts = []
    for pair, reply in wanted.items():
        asked = body(*pair)
        sampling = {name: asked[name] for name in SAMPLED if name != "samplers"}
        own = llama.create_completion(
            asked["prompt"], max_tokens=asked["n_predict"], repeat_penalty=1.0, **sampling
        )
        assert reply[0] == own["choices"][0]["text"], pair
        texts.append(reply[0])
    assert len(set(texts)) > N * SEEDS // 2, "seeds and prompts give other texts"


@pytest.mark.parametrize(
    ("spec_type", "n_patterns"),
    [
        ("mtp", len(SUBSETS)),
        ("tree", len(SUBSETS) // 3),  # they take longer
        pytest.param("tree", len(SUBSETS), marks=pytest.mark.slow),
        pytest.param("auto", len(SUBSETS), marks=pytest.mark.slow),
    ],
)
def test_every_pattern_of_slots(server: GetServer, wanted: Wanted, spec_type: str, n_patterns: int) -> None:
    """All 255 of them or a part, in an order and with seeds that are drawn once."""
    slots = server("-np", str(N), "-no-kvu", "-c", str(512 * N), "--spec-type", spec_type)
    chance = random.Random(3)
    drafted = accepted = 0
    for subset in chance.sample(SUBSETS, n_patterns):
        pairs = [(slot, chance.randrange(SEEDS)) for slot in chance.sample(subset, len(subset))]
        # a prompt that is kept begins with a checkpoint, one that is not with an empty state
        requests = [
            {**body(*pair), "id_slot": pair[0], "cache_prompt": chance.random() < 0.5} for pair in pairs
        ]
        replies = together(slots.url, requests)
        for pair, reply in zip(pairs, replies, strict=True):
            assert reply["id_slot"] == pair[0]
            assert seen(reply) == wanted[pair], f"slot {pair[0]} of {sorted(subset)}, seed {pair[1]}"
            drafted += reply["timings"].get("draft_n", 0)
            accepted += reply["timings"].get("draft_n_accepted", 0)
    # one after another it would be 1; 4 if all came and went together
    assert busy(slots) > 2
    if spec_type != "auto":  # which need not draft on a loaded machine
        assert drafted > accepted > 2 * n_patterns
