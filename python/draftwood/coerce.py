"""Whole numbers and bools of any type, NumPy's too, as Python's own: these are JSON values.

Must not know: arguments by name. Test: tests/unit/test_coerce.py.
"""

from __future__ import annotations

import operator
from typing import Any

_BOOLS = {True: True, False: False}


def as_int(value: Any) -> int | None:
    """Return a whole number as an int; None for a bool and anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_bool(value: Any) -> bool | None:
    """Return a bool, or a number equal to 1 or 0, as a bool; None for anything else."""
    try:
        return _BOOLS.get(value)
    except TypeError:  # without a hash
        return None
