"""What a slot goes back to: a checkpoint of text that two prompts share, and a file that was cut short."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server
from tests.server.test_one_slot import seen

STORY = "Once upon a time there was a little girl who lived in a house. "
OTHERS = [*range(600, 650)]  # tokens that share nothing with those of `first`


@pytest.fixture(params=["plain", "mtp", "none"])
def one_slot(request: pytest.FixtureRequest, server: GetServer) -> Server:
    return server("-np", "1", "-c", "1024", "--spec-type", request.param)


@pytest.mark.parametrize("n_shared", [0, 1, 7])
def test_no_state_of_a_token_that_prompts_do_not_share(one_slot: Server, n_shared: int) -> None:
    """A checkpoint lies four tokens before a prompt's end, here one token behind what is shared."""
    shared = [*range(300, 300 + n_shared)]
    first = [*shared, 500, 501, 502, 503, 504]
    goes_back = [*shared, *OTHERS[:20], *range(700, 706)]
    body: dict[str, Any] = {"temperature": 0, "n_probs": 1, "id_slot": 0}
    for prompt in (first, [*shared, *OTHERS]):
        one_slot.post("/completion", {**body, "prompt": prompt, "n_predict": 1})
    reply = one_slot.post("/completion", {**body, "prompt": goes_back, "n_predict": 5})
    anew = one_slot.post("/completion", {**body, "prompt": goes_back, "n_predict": 5, "cache_prompt": False})
    assert seen(reply) == seen(anew)


@pytest.mark.parametrize("n_cut", [1, 2, 3, 100, 0.25, 0.9])
@pytest.mark.parametrize("folder", ["", "drafts"], ids=["slot", "drafts"])
def test_a_file_that_was_cut(server: GetServer, folder: str, n_cut: float) -> None:
    """A slot is not restored from it, and drafts begin anew; the server goes on in both cases."""
    slots = server("-np", "2", "-no-kvu", "-c", "1024", "--spec-type", "mtp")
    body = {"prompt": STORY * 3, "n_predict": 16, "temperature": 0, "n_probs": 2, "id_slot": 0}
    wanted = slots.post("/completion", {**body, "cache_prompt": False})
    slots.post("/slots/0?action=save", {"filename": "cut.bin"})
    path = slots.log.parent / "slots" / folder / "cut.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - int(n_cut if n_cut >= 1 else n_cut * len(whole))])
    reply = requests.post(f"{slots.url}/slots/1?action=restore", json={"filename": "cut.bin"}, timeout=60)
    assert reply.status_code == (200 if folder else 400), reply.text
    assert seen(slots.post("/completion", {**body, "id_slot": 1})) == seen(wanted)
