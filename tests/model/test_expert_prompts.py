"""bench/expert_prompts.py: three sides of a prompt, here on a CPU, whose pool has no room to copy ahead."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from expert_prompts import SIDES, measure, sides


def test_three_sides_of_a_prompt(gguf):
    path = Path(gguf("moe-mtp", experts=16, top_k=3))
    llms = sides(path, n_tokens=160, ubatch=128, part=0.5, n_gpu_layers=0)
    try:
        found = measure(llms, n_tokens=160, repeats=6)
    finally:
        for llm in llms.values():
            llm.close()
    assert tuple(found["tokens_per_second"]) == SIDES
    assert found["other_first_tokens"] == 0
    assert found["bytes_missed"] > 0
    for name in ("of_resident", "of_stock"):
        median, low, high = found[name]
        assert 0 < low <= median <= high
