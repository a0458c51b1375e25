"""A server on a card: each of several clients gets the reply that it gets alone, drafts or none.

All slots' rows of a verify fit into one graph of fused layers, whose rows have the bits of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

from tests.server.process import Server
from tests.server.test_one_slot import seen
from tests.server.test_slots import BODIES, drafts

ON_CARD = ("-ngl", "99", "-fa", "on", "-no-kvu")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[object]]:
    log: Path = tmp_path_factory.mktemp("alone") / "log"
    server = Server(log, *ON_CARD, "-np", "1", "-c", "512", "--spec-type", "plain")
    try:
        server.wait()
        # what is kept of an earlier prompt would change how many rows a prompt has
        yield [seen(server.post("/completion", {**each, "cache_prompt": False})) for each in BODIES]
    finally:
        server.close()


@pytest.mark.parametrize("n_slots", [4, 8])
@pytest.mark.parametrize("kind", ["plain", "mtp", "tree", "auto"])
def test_clients_get_what_each_gets_alone(tmp_path, alone, kind, n_slots):
    order = [i for i in range(len(BODIES)) for _ in range(3)]
    random.Random(n_slots).shuffle(order)
    slots = ("-np", str(n_slots), "-c", str(512 * n_slots))
    server = Server(tmp_path / "log", *ON_CARD, *slots, "--spec-type", kind)
    try:
        server.wait()
        with ThreadPoolExecutor(n_slots) as clients:
            bodies = [{**BODIES[i], "cache_prompt": False} for i in order]
            replies = list(clients.map(lambda each: server.post("/completion", each), bodies))
    finally:
        server.close()
    differ = [i for i, reply in zip(order, replies, strict=True) if seen(reply) != alone[i]]
    assert not differ, f"{len(differ)} of {len(order)}: {sorted(set(differ))}"
    assert drafts(replies)[1] > 0 or kind in ("plain", "auto")
