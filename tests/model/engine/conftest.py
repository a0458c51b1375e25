"""The engine's tests run on both ways back from rejected drafts: a state left alone, and snapshots of it.

Must not know: what any test expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draftwood.engine import _capi

from tests.model.engine.begun import make_tiny
from tests.model.engine.little_memory import build_shim
from tests.model.engine.story import BUDGET
from tests.model.rig import Rig, Run


@pytest.fixture(params=["tree", "snapshots"])
def rig(request: pytest.FixtureRequest, rig: Callable[..., Rig]) -> Callable[..., Rig]:
    """Make rigs as the outer fixture does, on one of the two ways; `rig.rollback` names it."""

    def make(preset: str = "moe-mtp", **settings: Any) -> Rig:
        if request.param == "snapshots":
            settings = {"n_rs_seq": settings.get("draft_tokens", 5), **settings}
        return rig(preset, **settings)

    make.rollback = request.param  # type: ignore[attr-defined]
    return make


@pytest.fixture(params=["mtp", "dflash"])
def tiny(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Make rigs of the trained model with either drafter."""
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(make_tiny(request.param, settings))
        return made[-1]

    yield make
    for r in made:
        r.close()


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    """The library that refuses memory (little_memory.py)."""
    return build_shim(tmp_path)


@pytest.fixture
def started(rig: Callable[..., Rig], run_of: Callable[..., Run]) -> tuple[Rig, Run]:
    """A rig that drafts with MTP and has the first token of the run."""
    r = rig(drafter=_capi.DRAFTER_MTP)
    r.start()
    return r, run_of("moe-mtp")


@pytest.fixture
def branching(rig: Callable[..., Rig], run_of: Callable[..., Run]) -> tuple[Rig, Run]:
    """A rig that drafts trees with MTP, and the run of its model."""
    return rig(drafter=_capi.DRAFTER_MTP, tree_budget=BUDGET), run_of("moe-mtp")
