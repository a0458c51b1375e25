"""bench/verify_cpu.py: turns of verifies along the model's own text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from verify_cpu import Verifies, measure

PROMPT = [5, 6, 7, 8, 9, 10]


def test_ratios_of_each_size(gguf):
    found = measure(Path(gguf("moe-mtp")), (2, 4), 9, 2)
    assert set(found) == {"step_ms", "2", "4"}
    for size in ("2", "4"):
        median, low, high = found[size]
        assert 0 < low <= median <= high


def test_a_verify_has_the_rows_that_were_asked_for(gguf):
    verifies = Verifies(Path(gguf("moe-mtp")), 7, 128, 1)
    try:
        text = verifies.text(PROMPT, 16)
        verifies._engine.stats_reset()
        seconds = verifies.run(PROMPT, text, [1, 4, 8, 2])
        stats = verifies._engine.stats()
        assert len(seconds) == 4
        assert (stats.rounds, stats.drafted, stats.accepted) == (4, 11, 11)
        with pytest.raises(RuntimeError, match="plain decode said"):
            verifies.run(PROMPT, [text[0] + 1, *text[1:]], [1, 1])
    finally:
        verifies.close()
