"""llama-server's flags as a user gave them.

Must not know: what becomes of them. Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

# names from common/arg.cpp at the pin
DRAFTER_FILE_FLAGS = ("--spec-draft-model", "-md", "--model-draft")
# with one of these the drafter's file is one of a repository
DRAFTER_SOURCE_FLAGS = ("--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft")
DRAFTER_SOURCE_VARIABLES = ("LLAMA_ARG_SPEC_DRAFT_HF_REPO",)
# a model file that is not there yet may come from one of these
SOURCE_FLAGS = frozenset(("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo"))
SOURCE_VARIABLES = ("LLAMA_ARG_MODEL_URL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_DOCKER_REPO")


def name_of(argument: str) -> str:
    """Return a flag as llama-server reads it: --spec_type is --spec-type."""
    return argument.replace("_", "-") if argument.startswith("--") else argument


def given(arguments: list[str], flags: Iterable[str], variables: Iterable[str]) -> bool:
    """Tell whether one of these flags is given, or one of these environment variables is set."""
    return any(name_of(each) in flags for each in arguments) or any(map(os.environ.get, variables))


def value(arguments: list[str], flags: Iterable[str], default: str | None) -> str | None:
    """Return the value of the last of these flags."""
    return ([default] + [value for flag, value in pairwise(arguments) if name_of(flag) in flags])[-1]


def named_value(arguments: list[str], flags: Iterable[str], variable: str) -> tuple[str, str | None]:
    """Return the last of these flags as it was given, and its value; else the variable and its value."""
    found = named_values(arguments, flags, "")
    return found[-1] if found else (variable, os.environ.get(variable) or None)


def named_values(arguments: list[str], flags: Iterable[str], variable: str) -> list[tuple[str, str]]:
    """Return names and values: of the variable if it is set, then of each of these flags as it was given."""
    of_variable = os.environ.get(variable)
    first = [(variable, of_variable)] if of_variable else []
    return first + [(flag, value) for flag, value in pairwise(arguments) if name_of(flag) in flags]


def number(arguments: list[str], flags: Iterable[str], variable: str, default: int) -> int:
    """Return the number that the last of these flags has, else the variable's; `default` for no number."""
    try:
        return int(value(arguments, flags, os.environ.get(variable)) or default)
    except ValueError:
        return default


def slots(arguments: list[str]) -> int:
    """Return how many slots are asked for; -1 where llama-server decides."""
    return number(arguments, ("-np", "--parallel"), "LLAMA_ARG_N_PARALLEL", -1)


def config_files() -> list[Path]:
    """Return where llama-server looks for flags, a model's among them (common/arg.cpp at the pin)."""
    own = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(folder) / "llama.cpp" / "config.ini" for folder in ("/etc", own)]
