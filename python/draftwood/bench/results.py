"""A results file: a JSON array with one document (report.py) a line, to which rows are only ever added.

Test: tests/unit/test_bench_results.py.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from draftwood import atomic
from draftwood.errors import OptionError

_HINT = "name a file in a folder that exists and may be written"
_END = "\n]\n"


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Errors: OptionError.
    """
    try:
        if path.exists():
            with path.open("ab"):
                pass
        else:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(
            f"{option} {path} cannot be written: {reason}; expected a file that can", hint=_HINT
        ) from error


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a results file; none if it does not exist.

    Errors: OptionError for a file that holds anything else.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} is no results file: {error}", hint="name a new file") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "schema" in row for row in rows):
        raise OptionError(
            f"{path} is no results file; expected a JSON array of objects with a schema",
            hint="name a new file",
        )
    return rows


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row at the end; what is there stays as it is, byte for byte."""
    line = json.dumps(row, allow_nan=False)
    before = "["
    if read(path):
        before = path.read_text(encoding="utf-8").rstrip().removesuffix("]").rstrip() + ","
    atomic.replace(path, f"{before}\n{line}{_END}")  # a crash must not take the older rows
