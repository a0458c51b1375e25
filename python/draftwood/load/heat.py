"""Which experts were used most, in a file from one run to the next: expert_heat=.

Must not know: devices, sizes. Tests: tests/unit/test_heat.py, tests/model/test_api_experts.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from draftwood import atomic
from draftwood.engine.engine import ModelInfo
from draftwood.engine.experts import ExpertPool
from draftwood.errors import OptionError
from draftwood.load.experts import pooled
from draftwood.warn import warn

_SCHEMA = 1
_WRITES_HEAT = "draftwood run MODEL --expert-vram SIZE --expert-heat FILE writes one of MODEL"


def path_of(given: Any) -> str | None:
    """Return the path of a heat file. Errors: OptionError for what is no path."""
    if given is None:
        return None
    try:
        path = os.fsdecode(given)
    except TypeError:
        path = "\0"
    if not path or "\0" in path:
        raise OptionError(f"expert_heat is {given!r}; expected a path", hint='expert_heat="model.heat.json"')
    return path


def check_path(path: str | None) -> None:
    """Refuse a path that no heat file can be written to, before anything is learnt. Errors: OptionError."""
    if path is None:
        return
    folder = Path(path).parent
    if os.path.isdir(path):
        found = "is a folder"
    elif not os.path.isdir(folder):
        found = f"is in {folder}, which is no folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = f"is in {folder}, which cannot be written"
    else:
        return
    raise OptionError(
        f"expert_heat {path} {found}; expected a file in a folder that can be written",
        hint="make the folder, or take another path",
    )


def require(path: str | None, info: ModelInfo) -> dict[int, list[int]]:
    """Return heat as `read` does, of a file that must be one of this model. Errors: OptionError."""
    if path is None:
        return {}
    if not os.path.exists(path):
        raise OptionError(f"found no file {path}; expected a heat file", hint=_WRITES_HEAT)
    heat = _fitting(path, info)
    if heat is None:
        raise OptionError(_misfit(path, info), hint=_WRITES_HEAT)
    return heat


def read(path: str | None, info: ModelInfo) -> dict[int, list[int]]:
    """Return heat u32[n_experts] by layer; {} where the file is not there. A file that does not fit warns."""
    if path is None or not os.path.exists(path):
        return {}
    heat = _fitting(path, info)
    if heat is None:
        warn(f"{_misfit(path, info)}; the pool begins with the first ones, and the file stays as it is")
    return heat or {}


def parse(path: str | Path) -> dict[int, list[int]] | None:
    """Return what a heat file holds, by layer; None for any other file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        heat = {int(layer): [int(value) for value in values] for layer, values in found["heat"].items()}
        return heat if found["schema"] == _SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _fitting(path: str, info: ModelInfo) -> dict[int, list[int]] | None:
    """Return what a heat file of this model holds; None for any other file."""
    heat = parse(path)
    fits = heat is not None and all(
        0 <= layer < info.n_layers
        and len(values) == info.n_experts
        and all(0 <= value < 1 << 32 for value in values)
        for layer, values in heat.items()
    )
    return heat if fits else None


def _misfit(path: str, info: ModelInfo) -> str:
    return f"{path} is no heat file of a model with {info.n_layers} layers of {info.n_experts} experts"


def write(path: str, pool: ExpertPool, info: ModelInfo) -> None:
    """Write what the pool has learnt, unless that is nothing or the file is another's. A failure warns."""
    heat = {str(number): layer.heat for number, layer in pooled(pool, info).items()}
    if not any(map(any, heat.values())) or (os.path.exists(path) and _fitting(path, info) is None):
        return
    try:
        text = json.dumps({"schema": _SCHEMA, "n_experts": info.n_experts, "heat": heat})
        atomic.replace(Path(path), text)
    except OSError as error:
        warn(f"{path} could not be written ({error.strerror}); what was learnt of experts is lost")
