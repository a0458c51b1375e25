"""What is said when memory runs out in mid-run and generation goes on. Test: tests/unit/test_shortage.py."""

from __future__ import annotations

from draftwood.stats import SpeculationStats
from draftwood.warn import warn

_HINT = "hint: a smaller n_ctx or n_ubatch, or fewer n_gpu_layers, leave more"


class Shortage:
    """Says each of its two kinds once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def tell(self, stats: SpeculationStats) -> None:
        """Warn of what is new in an engine's counters."""
        if stats.shared_rounds:
            self._warn("shared", "graphs of all sizes share one place from now on, and are built each time")
        if stats.row_limit:
            self._warn("limit", f"verifies have at most {stats.row_limit} rows from now on")

    def _warn(self, kind: str, found: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            warn(f"memory ran out: {found}\n\n{_HINT}")
