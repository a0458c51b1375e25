"""Files that are written whole. Test: tests/unit/test_atomic.py."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path


def replace(path: Path, text: str) -> None:
    """Write a file under another name, then rename it.

    Readers find the old text or the new one, after a crash too. Several processes may write the same file:
    the last one wins. Errors: OSError.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
