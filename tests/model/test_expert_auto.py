"""bench/expert_auto.py: "auto" and plain decode over one pool, here on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from expert_auto import case_of, cells

from bench.gpu.files import TINY
from bench.gpu.ours import Ours, shared_weights


def test_cells_of_a_pool(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRAFTWOOD_CURVES", str(tmp_path))
    with shared_weights():
        ours = Ours(str(TINY / "tiny-moe-f16.gguf"), None)
        small = {"n_rounds": 16, "n_gpu_layers": 0, "threads": 1, "prompt": 8}
        cases = [case_of(0.5, acceptance, **small) for acceptance in (0.0, 0.9)]
        found = cells(ours, cases, pairs=6)
    assert [cell["acceptance"] for cell in found] == [0.0, 0.9]
    for cell in found:
        median, low, high = cell["ratio"]
        assert 0 < low <= median <= high
        plain, auto = cell["plain"], cell["auto"]
        assert plain["tokens"] == 2 * 6 * 16
        assert plain["misses"] > 0
        assert plain["bytes_missed"] > 0
        assert auto["rounds"] == 2 * 6 * 16
    rejected, kept = (cell["auto"] for cell in found)
    assert rejected["accepted"] == 0
    assert rejected["tokens"] == rejected["rounds"]
    assert kept["tokens"] == kept["rounds"] + kept["accepted"]
    assert len(capsys.readouterr().out.splitlines()) == 2
