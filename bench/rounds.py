"""The package's mean tokens per round (draftwood/bench/rounds.py) where draftwood is not installed.

Training machines have torch and this repository only, so the file is loaded by its path. Whatever runs the
engine imports draftwood.bench.rounds.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).resolve().parents[1] / "python" / "draftwood" / "bench" / "rounds.py"
_SPEC = importlib.util.spec_from_file_location("draftwood_rounds", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_module = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _module
_SPEC.loader.exec_module(_module)

Rounds = _module.Rounds
mean_tokens = _module.mean_tokens
