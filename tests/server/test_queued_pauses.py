"""Slots of `--spec-type auto` queue plain steps in pauses: text stays as it is, and /metrics counts them.

Drafts of random weights are never right, so "auto" pauses on any machine. Contract: src/server/slot_rounds.h,
cost_model::plain_step_comes(). Must not know: why a round drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from synth_gguf import PRESETS, write

from tests.server.process import Server
from tests.server.test_one_slot import PROMPTS, seen
from tests.server.test_queued_steps import SLOTS, counted

TOKENS = 300


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("random") / "moe-mtp.gguf"
    write(PRESETS["moe-mtp"], path)
    return str(path)


@pytest.fixture(params=SLOTS)
def both(request: pytest.FixtureRequest, tmp_path: Path, random_weights: str) -> Iterator[list[Server]]:
    """Plain steps that wait, and "auto" whose steps are queued."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWOOD_SERVER_RESULTS", "top")
        for queues, kind in enumerate(("plain", "auto")):
            patch.setenv("DRAFTWOOD_QUEUE_STEPS", str(queues))
            flags = (*SLOTS[request.param], "-c", "1536", "--spec-type", kind, "--metrics")
            made.append(Server(tmp_path / f"{kind}.log", *flags, model=random_weights).wait())
    yield made
    for each in made:
        each.close()


def test_pauses_of_auto_queue_steps(both: list[Server]) -> None:
    waits, auto = both
    for prompt in PROMPTS[:2]:
        body = {"n_predict": TOKENS, "n_probs": 3, "cache_prompt": False, "ignore_eos": True}
        before = counted(auto)[0]
        reply = auto.complete(prompt, **body)
        assert seen(reply) == seen(waits.complete(prompt, **body))
        assert reply["tokens_predicted"] == TOKENS
        assert counted(auto)[0] - before > 0.3 * TOKENS
    assert counted(waits) == (0, 0)
    assert "slots draft as --spec-type auto" in auto.words()
