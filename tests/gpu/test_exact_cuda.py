"""Text with drafting is text without on a card, token for token: bench/exact.py and exact_trees.py there.

Of models all of whose layers run as fused parts, with verifies of up to 16 rows: there a row's bits do not
depend on the rows beside it. A process a model and kind, four at a time. Must not know: how fast anything is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from draftwood._llama_cpp import llama_cpp
from draftwood.engine.engine import build_info

BENCH = Path(__file__).resolve().parents[2] / "bench"
BUDGETS = (1, 2, 3, 4, 6, 7, 8, 10, 12, 14, 16)
CHAINS = (
    "tiny-moe-F16",
    "tiny-moe-Q8_0",
    "moe-mtp",
    "dense-mtp",
    "q4k",
    "q3k",
    "planted-moe",
    "planted-dense",
)
TREES = ("tiny-moe-F16", "tiny-moe-Q8_0", "q4k", "q3k", "planted-moe", "planted-dense")
OVER_Q8 = ("tiny-moe-F16", "q4k", "planted-moe")
LEAST = 100_000  # tokens of all runs over keys and values of F16
LEAST_OVER_Q8 = 20_000
LIMIT = 500  # seconds of a run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


def run(script: str, model: str, *options: str) -> dict[str, int]:
    """Return the sums of a run, which ended without a fault."""
    command = [sys.executable, str(BENCH / script), "--gpu-layers", "-1", "--threads", "1", "--only", model]
    # scripts import their neighbours
    surroundings = {key: text for key, text in os.environ.items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=LIMIT, env=surroundings
    )
    assert done.returncode == 0, f"{script} {model}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    sums: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return sums


def sums_of(chains: Sequence[str], trees: Sequence[str], *options: str) -> dict[str, int]:
    """Return the sums of all runs; options of both scripts."""
    sys.path.append(str(BENCH))
    import models

    for model in chains:  # files are made once, and not by two processes at a time
        if model.startswith("tiny-moe-"):
            models.tiny_moe(model.removeprefix("tiny-moe-"))
        else:
            models.synthetic(model)
    budgets = ("--budgets", *map(str, BUDGETS))
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(run, "exact.py", model, *options) for model in chains]
        runs += [pool.submit(run, "exact_trees.py", model, *budgets, *options) for model in trees]
        found = [each.result() for each in runs]
    return {name: sum(sums[name] for sums in found) for name in ("tokens", "mismatches", "cells")}


@pytest.mark.timeout(4 * LIMIT)
def test_text_with_drafts_is_text_without(keep_figures):
    """Chains of up to 8 drafts, trees of 11 budgets, greedy and seeded; a sequence at a time."""
    found = sums_of(CHAINS, TREES)
    keep_figures(**found)
    assert found["mismatches"] == 0
    assert found["tokens"] >= LEAST


@pytest.mark.timeout(4 * LIMIT)
def test_text_over_a_quantised_cache_with_drafts_is_text_without(keep_figures):
    found = sums_of(OVER_Q8, OVER_Q8, "--cache", "Q8_0")
    keep_figures(**{f"{name} over Q8_0": n for name, n in found.items()})
    assert found["mismatches"] == 0
    assert found["tokens"] >= LEAST_OVER_Q8
