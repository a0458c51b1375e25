"""--spec-synth-rates and --spec-synth-len with our types: a benchmark's drafts are accepted by a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import GetServer
from tests.server.process import DRAFTER, Server

SLOTS = ("-np", "2", "-c", "2048")


def length(server: Server, prompt: str = "import os", n: int = 200) -> float:
    """Mean tokens of a round, as the server counts them."""
    timings = server.complete(prompt, n_predict=n, ignore_eos=True, cache_prompt=False)["timings"]
    assert timings["predicted_n"] == n
    return (n - 1) / (n - 1 - timings["draft_n_accepted"])


@pytest.mark.parametrize(
    ("rates", "mean"), [("0,0,0", 1.0), ("1,0,0", 2.0), ("1,1,1", 4.0), ("0.9,0.6,0.5", 3.0)]
)
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_rounds_keep_what_the_rates_say(tmp_path: Path, kind: str, rates: str, mean: float) -> None:
    drafter = ("-md", DRAFTER) if kind == "dflash" else ()
    flags = ("--spec-type", kind, "--spec-draft-n-max", "3", "--spec-synth-rates", rates)
    server = Server(tmp_path / "log", *SLOTS, *drafter, *flags)
    try:
        server.wait()
        assert length(server) == pytest.approx(mean, rel=0.12 if "." in rates else 0.02)
        assert "the text is not the model's" in server.words()
    finally:
        server.close()


def test_a_draft_that_would_end_the_text_is_not_kept(tmp_path: Path) -> None:
    """Text that is kept by a schedule soon drafts the end, which ignore_eos keeps the model from sampling."""
    flags = ("--spec-type", "mtp", "--spec-draft-n-max", "3", "--spec-synth-rates", "1,0,0")
    server = Server(tmp_path / "log", *SLOTS, *flags)
    try:
        server.wait()
        for prompt in ("import os", "The", "{"):
            assert 1.8 < length(server, prompt, 900) <= 2.01
    finally:
        server.close()


def test_a_length_is_a_schedule_too(tmp_path: Path) -> None:
    server = Server(
        tmp_path / "log", *SLOTS, "--spec-type", "mtp", "--spec-draft-n-max", "5", "--spec-synth-len", "4"
    )
    try:
        assert length(server.wait()) == pytest.approx(4.0, rel=0.15)
    finally:
        server.close()


def test_without_a_schedule_the_model_decides(server: GetServer) -> None:
    drafts, plain = (server(*SLOTS, "--spec-type", kind) for kind in ("mtp", "plain"))
    assert drafts.complete("import os")["content"] == plain.complete("import os")["content"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("mtp", "--spec-draft-n-max", "3", "--spec-synth-rates", "1,1"), "must contain 3 values, got 2"),
        (("mtp", "--spec-draft-n-max", "1", "--spec-synth-rates", "1.5"), "within [0, 1]"),
        (("mtp", "--spec-draft-n-max", "2", "--spec-synth-len", "9"), "within [1, 3]"),
    ],
)
def test_schedules_that_cannot_be(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    server = Server(tmp_path / "log", *SLOTS, "--spec-type", *flags)
    try:
        assert server.process.wait(60) != 0
    finally:
        server.close()
    assert words in server.words()


def test_trees_and_auto_are_not_scheduled(tmp_path: Path) -> None:
    flags = ("--spec-type", "tree", "--spec-draft-n-max", "3", "--spec-synth-rates", "1,1,1")
    server = Server(tmp_path / "log", *SLOTS, *flags)
    try:
        server.wait()
        assert "have no effect with --spec-type tree" in server.words()
    finally:
        server.close()
