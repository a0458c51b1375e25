"""Plain decoding whose greedy steps are queued, on a CPU too: for tests.

A `Llama` queues steps on a card alone. On a CPU they are computed at once: nothing is gained, and text and
memory can be held against those of steps that wait.
Tests: tests/model/generate, tests/model/test_exact.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from draftwood import Llama
from draftwood.engine import _capi, drafting
from draftwood.engine.engine import Engine
from draftwood.load import steps


@contextmanager
def queued_steps() -> Iterator[None]:
    """Let every `Llama` that is made inside queue steps, without a drafter or in pauses of "auto"."""
    with (
        patch.object(steps, "on_one_card", lambda *_: True),
        patch.object(steps, "read_one_card", lambda *_: True),
        patch.object(drafting, "Engine", partial(Engine, results=_capi.RESULTS_TOP)),
    ):
        yield


class QueuedLlama(Llama):
    """A Llama made so."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        with queued_steps():
            super().__init__(*arguments, **settings)
