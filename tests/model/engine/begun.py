"""Texts whose drafts begin behind verifies, for the tests of them. Must not know: what any test expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from draftwood.engine import _capi
from draftwood.engine.engine import Engine

from tests.model.engine.calls import MTP
from tests.model.engine.test_joint_dflash import DFLASH
from tests.model.rig import PROMPT, Rig

TINY = Path(__file__).parents[3] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
BEGINS: dict[str, Any] = {"drafter": MTP, "results": _capi.RESULTS_TOP}
MTP_ALONE = pytest.mark.parametrize("tiny", ["mtp"], indirect=True)
DFLASH_ALONE = pytest.mark.parametrize("tiny", ["dflash"], indirect=True)


def make_tiny(drafter: str, settings: dict[str, Any]) -> Rig:
    """Make a rig of the trained model, whose drafts are accepted at times."""
    r = Rig(TINY, **{**BEGINS, "draft_tokens": 5, **settings, "engine": False})
    if "drafter" not in settings and drafter == "dflash":
        r.settings |= DFLASH
    if settings.get("engine", True):
        r.attach()
    return r


def begin(r: Rig, prompt: Sequence[int] = PROMPT) -> int:
    """Start a greedy text."""
    token = r.start(prompt)
    r.engine.set_request(n_top=1)
    return token


def open_round(r: Rig, last: int) -> None:
    """Draft and verify as `Llama` does."""
    assert r.engine.trim(r.engine.n_past)
    r.engine.propose(last)
    r.engine.verify()


def turn(r: Rig, last: int, sampler: Any = None) -> tuple[list[int], list[int]]:
    """Take a round; return its tokens and what was drafted."""
    open_round(r, last)
    tokens: list[int] = []
    walk(r.engine, tokens, sampler or r.sampler)
    return tokens, list(r.engine.tree().tokens[1:])


def text_of(r: Rig, last: int, n: int) -> list[int]:
    """Return the tokens of whole rounds, n of them or more, the first of them `last`."""
    tokens = [last]
    while len(tokens) < n:
        tokens += turn(r, tokens[-1])[0]
    return tokens


def begun(r: Rig) -> int:
    """Return how many drafts began behind a verify."""
    return r.engine.stats().begun_drafts


def engines_of(r: Rig) -> list[Engine]:
    """Make an engine for each of two sequences."""
    return [Engine(r.ctx, r.params, **{**r.settings, "seq_id": i}) for i in range(2)]


def start(engine: Engine, sampler: Any, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Start a greedy text of one of several engines; return its first token."""
    engine.reset()
    engine.eval(prompt, 0)
    engine.set_request(n_top=1)
    return [engine.next(sampler)]


def walk(engine: Engine, text: list[int], sampler: Any) -> None:
    """Add the tokens of the round that was verified."""
    while engine.row() is not None:
        text.append(engine.next(sampler))


def take_round(engine: Engine, text: list[int], sampler: Any) -> None:
    """Add the tokens of a round of this engine alone."""
    engine.commit()
    engine.propose(text[-1])
    engine.verify()
    walk(engine, text, sampler)
