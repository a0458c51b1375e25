"""Samplers that are given the best tokens of a row, as on a card, choose what they choose among all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import GetServer
from tests.server.process import Server

PROMPTS = ["The quick brown fox", "def add(a, b):\n    return", "1 2 3 4 5 6 7 8 9 10 11 12"]
FEW = {
    "greedy": {"temperature": 0.0},
    "default": {"temperature": 0.8, "seed": 5},
    "one": {"temperature": 1.5, "seed": 9, "top_k": 1},
    "most": {"temperature": 1.2, "seed": 3, "top_k": 64, "min_p": 0.0, "top_p": 1.0},
    "no end": {"temperature": 0.8, "seed": 7, "ignore_eos": True},
    "lowered": {"temperature": 0.9, "seed": 4, "logit_bias": [[i, -3] for i in range(256, 300)]},
    "forbidden": {"temperature": 0.0, "logit_bias": [[i, False] for i in range(32, 256)]},
    "all but a few": {"temperature": 0.9, "seed": 4, "logit_bias": [[i, -2.5] for i in range(0, 4096, 2)]},
}
ALL = {
    "no top-k": {"temperature": 1.0, "seed": 4, "top_k": 0},
    "a larger top-k": {"temperature": 1.0, "seed": 4, "top_k": 65},
    "penalties": {"temperature": 0.7, "seed": 6, "repeat_penalty": 1.3},
    "raised": {"temperature": 0.0, "logit_bias": [[300, 4]]},
    "another order": {
        "temperature": 0.9,
        "seed": 8,
        "samplers": ["min_p", "top_k", "temperature"],
        "min_p": 0.02,
    },
    "grammar": {"temperature": 0.8, "seed": 2, "grammar": "root ::= [a-z ]+"},
    "mirostat": {"temperature": 0.8, "seed": 2, "mirostat": 2},
}
SAID = "samplers are given the best 64 tokens of a row"


@pytest.fixture(scope="module", params=["plain", "mtp", "tree"])
def best(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_SERVER_RESULTS", "top")
        log = tmp_path_factory.mktemp("best") / "server.log"
        made = Server(log, "-np", "1", "-c", "512", "--spec-type", request.param).wait()
    yield made
    made.close()


@pytest.fixture
def all_logits(server: GetServer) -> Server:
    return server("-np", "1", "-c", "512", "--spec-type", "plain")


def text(server: Server, prompt: str, **body: Any) -> Any:
    return server.complete(prompt, n_predict=32, cache_prompt=False, **body)["content"]


@pytest.mark.parametrize("sampling", ALL.values(), ids=ALL)
def test_who_needs_all_logits_gets_them(best, all_logits, sampling):
    said = SAID in best.words()
    for prompt in PROMPTS:
        assert text(best, prompt, **sampling) == text(all_logits, prompt, **sampling)
    assert (SAID in best.words()) == said


@pytest.mark.parametrize("sampling", FEW.values(), ids=FEW)
def test_the_best_tokens_give_the_same_text(best, all_logits, sampling):
    for prompt in PROMPTS:
        assert text(best, prompt, **sampling) == text(all_logits, prompt, **sampling)
    assert SAID in best.words()
    assert SAID not in all_logits.words()


def test_probabilities_are_of_all_tokens(best, all_logits):
    body = {"temperature": 0.8, "seed": 5, "n_probs": 5}
    replies = [
        each.complete(PROMPTS[0], n_predict=16, cache_prompt=False, **body)["completion_probabilities"]
        for each in (best, all_logits)
    ]
    assert replies[0] == replies[1]
