"""PEP 517 backend: scikit-build-core, after the pinned source has been fetched, checked and patched.

Knows nothing of llama.cpp itself: `source.py` gives a patched tree, `pyfiles.py` stages
llama-cpp-python's Python files, and CMake gets both paths.
Tests: tests/unit/test_build_backend.py, tests/compat/test_wheel.py.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import build_output
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


# language: its environment variable, and what CMake would find by itself
_COMPILERS = {"C": ("CC", ("cc", "gcc", "clang")), "C++": ("CXX", ("c++", "g++", "clang++"))}


def require_compiler(config_settings: Settings | None = None) -> None:
    """Stop in words where a compiler is missing: CMake says it in forty lines.

    Compilers named to CMake itself (toolchain file, CMAKE_ARGS, `config_settings`) are left to it.
    Test: tests/unit/test_build_backend.py.
    """
    options = f"{os.environ.get('CMAKE_ARGS')} {config_settings}"
    if "CMAKE_TOOLCHAIN_FILE" in os.environ or re.search("CMAKE_(TOOLCHAIN_FILE|CXX_COMPILER)", options):
        return
    for language, (variable, names) in _COMPILERS.items():
        named = os.environ.get(variable, "").split()[:1]
        if any(shutil.which(name) for name in named or names):
            continue
        if named:
            found = f"{variable} is `{named[0]}`, which is not there"
            hint = f"correct {variable}, or unset it"
        else:
            found = f"found none of {', '.join(names)} on the PATH"
            hint = f"apt-get install g++   (dnf install gcc-c++; or set {variable} to its path)"
        raise SystemExit(f"error: {found}; expected a {language} compiler, GCC or Clang\n\nhint: {hint}")


def with_source(config_settings: Settings | None) -> Settings:
    """Return `config_settings` with the CMake paths of the patched source and the staged Python files.

    Errors: SystemExit with a message when there is no compiler, the sdist cannot be found or has a wrong
    hash, a patch does not apply, or the Python files are not those of the pin.
    """
    require_compiler(config_settings)
    staged = ROOT / "build" / "stage" / "_llama_cpp"
    try:
        tree = source.ensure_source(ROOT)
        pyfiles.stage(tree.path, staged)
    except (source.SourceError, PatchError, pyfiles.StageError) as error:
        raise SystemExit(f"error: {error}") from None  # in words: a traceback would bury them
    settings = dict(config_settings or {})
    settings["cmake.define.DRAFTWOOD_SDIST_DIR"] = str(tree.path)
    settings["cmake.define.DRAFTWOOD_STAGED_PYTHON"] = str(staged)
    # said each time: CMake's cache, in a folder that both kinds of build share, would keep the last answer
    settings.setdefault("cmake.define.DRAFTWOOD_PORTABLE", "OFF")
    settings.setdefault("cmake.define.GGML_CUDA", "OFF")  # CMAKE_ARGS comes later, and wins
    return settings


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel (PEP 517)."""
    settings = with_source(config_settings)
    with build_output.watched("draftwood", ROOT / "src"):
        return str(_skbuild.build_wheel(wheel_directory, settings, metadata_directory))


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the editable wheel (PEP 660)."""
    settings = with_source(config_settings)
    with build_output.watched("draftwood", ROOT / "src"):
        return str(_skbuild.build_editable(wheel_directory, settings, metadata_directory))
