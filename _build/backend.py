"""PEP 517 backend: scikit-build-core, after the pinned source has been fetched, checked and patched.

Knows nothing of llama.cpp itself: `source.py` gives a patched tree, `pyfiles.py` stages
llama-cpp-python's Python files, and CMake gets both paths. Test: tests/compat/test_wheel.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import os
import shutil

import pyfiles
import source
from applier import PatchError
from scikit_build_core import build as _skbuild
from scikit_build_core.build import (  # noqa: F401  (hooks that need no source)
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent

Settings = dict[str, Any]


def require_compiler() -> None:
    """Stop in words where no C++ compiler can be found: CMake says it in forty lines."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    if not any(shutil.which(name.split()[0]) for name in names):
        raise SystemExit(
            f"error: found no C++ compiler ({', '.join(names)}); expected one that knows C++17.\n\n"
            "hint: apt-get install g++   (dnf install gcc-c++; or set CXX to its path)"
        )


def with_source(config_settings: Settings | None) -> Settings:
    """Return `config_settings` with the CMake paths of the patched source and the staged Python files.

    Errors: SystemExit with a message when there is no compiler, the sdist cannot be found or has a wrong hash, a
    patch does not apply, or the Python files are not those of the pin.
    """
    require_compiler()
    staged = ROOT / "build" / "stage" / "_llama_cpp"
    try:
        tree = source.ensure_source(ROOT)
        pyfiles.stage(tree.path, staged)
    except (source.SourceError, PatchError, pyfiles.StageError) as error:
        raise SystemExit(f"error: {error}") from None  # in words: a traceback would bury them
    settings = dict(config_settings or {})
    settings["cmake.define.DRAFTWOOD_SDIST_DIR"] = str(tree.path)
    settings["cmake.define.DRAFTWOOD_STAGED_PYTHON"] = str(staged)
    settings["cmake.define.DRAFTWOOD_SERIES_HASH"] = tree.hash
    settings["cmake.define.DRAFTWOOD_PIN_VERSION"] = tree.lock.version
    settings["cmake.define.DRAFTWOOD_PIN_COMMIT"] = tree.lock.commit
    return settings


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel (PEP 517)."""
    return str(_skbuild.build_wheel(wheel_directory, with_source(config_settings), metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the editable wheel (PEP 660)."""
    return str(_skbuild.build_editable(wheel_directory, with_source(config_settings), metadata_directory))
