"""Warnings that point at who called the package, whatever of its functions lie between.

A frame counted by hand is wrong as soon as a call is wrapped. Test: tests/unit/test_warn.py.
"""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning at the first frame outside the package."""
    frame, levels = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] == __package__:
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, category, stacklevel=levels)
