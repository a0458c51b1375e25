"""What this CPU has, and the compiler for programs that are built for one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest


def features() -> set[str]:
    """Return what /proc/cpuinfo names, of x86 and of Arm."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(" ".join(lines).split())


def compiler_for(needed: Iterable[str]) -> str:
    """Return the C++ compiler; skip without one, and where this CPU lacks any of `needed`."""
    lacking = sorted(set(needed) - features())
    if lacking:
        pytest.skip(f"this CPU has no {', '.join(lacking)}")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    return compiler
