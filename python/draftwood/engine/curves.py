"""Cost curves of earlier runs, so that speculation="auto" need not measure at each load.

One small JSON file per model, drafter, settings and machine in the user's cache folder; where that cannot be
written they live as long as the process. Must not know: how a curve is measured or used
(src/round/cost_model.h).
Test: tests/unit/test_curves.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from draftwood import atomic
from draftwood.engine import _capi
from draftwood.engine.engine import Curve

_of_this_process: dict[str, Curve] = {}


def folder() -> Path:
    """Return where curves are kept: `DRAFTWOOD_CURVES`, or `draftwood/curves` in the user's cache folder."""
    if named := os.environ.get("DRAFTWOOD_CURVES"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftwood" / "curves"


def key(**what: Any) -> str:
    """Return the name of what a curve depends on; `what` must be JSON values."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def load(name: str) -> Curve | None:
    """Return the curve of an earlier run; None if there is none, or its file is damaged."""
    if name in _of_this_process:
        return _of_this_process[name]
    try:
        saved = json.loads((folder() / f"{name}.json").read_text())
        curve = Curve(*(tuple(map(float, saved[part])) for part in ("draft_us", "verify_us")))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # RuntimeError: no home folder
        return None
    sane = all(0.0 <= time < float("inf") for time in curve.draft_us + curve.verify_us)
    return curve if sane and len(curve.draft_us) == len(curve.verify_us) == _capi.CURVE_SIZE else None


def store(name: str, curve: Curve) -> None:
    """Keep a curve for later runs, or for this process where the folder cannot be written."""
    _of_this_process[name] = curve
    text = json.dumps({"draft_us": curve.draft_us, "verify_us": curve.verify_us})
    with contextlib.suppress(OSError, RuntimeError):
        where = folder()
        where.mkdir(parents=True, exist_ok=True)
        atomic.replace(where / f"{name}.json", text)
