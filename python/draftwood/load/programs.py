"""The programs of the package, such as llama-server. Must not know: the library.

Test: tests/unit/test_cli.py.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path


def program(name: str) -> Path:
    """Return where a bundled program is, or would be."""
    suffix = ".exe" if sys.platform == "win32" else ""
    return Path(str(resources.files("draftwood") / "bin" / f"{name}{suffix}"))
