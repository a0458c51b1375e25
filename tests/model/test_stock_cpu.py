"""bench/stock_cpu.py: turns, ratios, and a stock side that is really stock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "bench" / "stock_worker.py"
TURN = json.dumps({"prompt": [5, 6, 7, 8], "tokens": 6}) + "\n"


def worker(side: str, model: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, WORKER, side, model, "128"],
        input=2 * TURN,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.parametrize("side", ["off", "auto"])
def test_a_worker_takes_turns(gguf, side):
    done = worker(side, gguf("moe-mtp"))
    assert done.returncode == 0, done.stderr
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(turn["tokens"]) for turn in turns] == [7, 7]
    assert turns[0]["tokens"] == turns[1]["tokens"]
    assert all(turn["prompt"] > 0 and turn["decode"] > 0 for turn in turns)


def test_draftwood_is_no_stock_side(gguf):
    """Where llama-cpp-python is not installed, `import llama_cpp` is draftwood."""
    done = worker("stock", gguf("moe-mtp"))
    assert done.returncode != 0
    assert "expected llama-cpp-python's own package" in done.stderr
