"""PEP 517 backend: scikit-build-core, after the pinned source has been fetched, checked and patched.

Knows nothing of llama.cpp itself: `source.py` gives a patched tree, `pyfiles.py` stages
llama-cpp-python's Python files, and CMake gets both paths. Test: tests/compat/test_wheel.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyfiles
import source
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


def with_source(config_settings: Settings | None) -> Settings:
    """Return `config_settings` with the CMake paths of the patched source and the staged Python files.

    Errors: source.SourceError when the sdist cannot be found, has a wrong hash, or a patch does not apply.
    """
    tree = source.ensure_source(ROOT)
    staged = ROOT / "build" / "stage" / "_llama_cpp"
    pyfiles.stage(tree.path, staged)
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
