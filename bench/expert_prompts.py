#!/usr/bin/env python3
"""Measure prompts of a model whose experts lie in host memory but for a few, on a card.

    python bench/expert_prompts.py MODEL [--tokens 4096] [--ubatch 2048] [--part 0.105] [--results FILE]

Three `Llama`s take turns, each prompt once: all experts on the card; a pool that holds --part of their bytes,
the room for copies ahead included; llama.cpp's own way with experts of whole layers in host memory
(n_cpu_moe), as many bytes on the card, and its own kernels (exact=False). Prompts are random tokens, new ones
each repeat. What is compared are the ratios within a repeat. The first token of all three is compared, too:
quantised prompts are not bit-equal (docs/experts.md), so unequal ones are counted and not refused.

A line a side; the last line is one JSON object, also added to --results.
Test: tests/model/test_expert_prompts.py.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from draftwood import Llama
from draftwood.bench import results as rows_of_results
from draftwood.bench.intervals import paired
from draftwood.engine.engine import probe_model

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: what lies there must not shadow what is installed
from bench.gpu.stamp import origin  # noqa: E402

SCHEMA = 1
SIDES = ("resident", "pool", "stock")


def sides(model: Path, n_tokens: int, ubatch: int, part: float, n_gpu_layers: int) -> dict[str, Llama]:
    """Return a `Llama` for each side, with a context for the prompt and one token."""
    info = probe_model(str(model))
    common: dict[str, Any] = {
        "n_ctx": n_tokens + 64,
        "n_batch": ubatch,
        "n_ubatch": ubatch,
        "n_gpu_layers": n_gpu_layers,
        "flash_attn": True,
        "speculation": "off",
        "verbose": False,
    }
    on_host = info.n_expert_layers - round(part * info.n_expert_layers)
    own: dict[str, dict[str, Any]] = {
        "resident": {},
        "pool": {"expert_vram": int(part * info.expert_bytes)},
        "stock": {"n_cpu_moe": info.n_layers - info.n_expert_layers + on_host, "exact": False},
    }
    return {side: Llama(str(model), **common, **own[side]) for side in SIDES}


def timed(llm: Llama, prompt: Sequence[int]) -> tuple[int, float]:
    """Return the first token after the prompt, and the seconds until it was there."""
    llm.reset()
    begin = time.perf_counter()
    stream = llm.generate(list(prompt), temp=0.0)
    first = next(stream)
    took = time.perf_counter() - begin
    stream.close()
    return first, took


def measure(llms: dict[str, Llama], n_tokens: int, repeats: int) -> dict[str, Any]:
    """Return tokens a second of each side, and the ratios of the pool's with their intervals."""
    n_vocab = llms["resident"].n_vocab()
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    n_other = 0
    for repeat in range(repeats + 1):  # the first one warms up
        chance = random.Random(f"prompt {repeat}")
        prompt = [chance.randrange(n_vocab) for _ in range(n_tokens)]
        firsts = {}
        for side in chance.sample(SIDES, len(SIDES)):
            firsts[side], took = timed(llms[side], prompt)
            if repeat > 0:
                seconds[side].append(took)
        n_other += firsts["pool"] != firsts["resident"]
    medians = {side: statistics.median(took) for side, took in seconds.items()}
    of_resident, _ = paired(seconds["resident"], seconds["pool"])
    of_stock, _ = paired(seconds["stock"], seconds["pool"])
    stats = llms["pool"].expert_stats
    assert stats is not None
    return {
        "tokens_per_second": {side: round(n_tokens / took, 1) for side, took in medians.items()},
        "of_resident": of_resident.figures(),
        "of_stock": of_stock.figures(),
        "other_first_tokens": n_other,
        "device_bytes": stats.device_bytes,
        "stage_bytes": stats.stage_bytes,
        "bytes_missed": stats.bytes_missed // (repeats + 1),
    }


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Of a prompt.")
@click.option("--ubatch", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--part", type=click.FloatRange(0.0, 1.0, min_open=True, max_open=True), default=0.105,
              show_default=True, help="Of the experts' bytes that the card holds.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True)
@click.option("--n-gpu-layers", type=int, default=-1, show_default=True)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(
    model: Path, tokens: int, ubatch: int, part: float, repeats: int, n_gpu_layers: int, results: Path | None
) -> None:
    """Measure the three sides and print the row."""
    if results:
        rows_of_results.check_writable("--results", results)
    llms = sides(model, tokens, ubatch, part, n_gpu_layers)
    found = measure(llms, tokens, repeats)
    for side, speed in found["tokens_per_second"].items():
        click.echo(f"{side:8} {speed:10.1f} tok/s")
    row = {
        "schema": SCHEMA,
        **origin(),
        "model": model.name,
        "tokens": tokens,
        "ubatch": ubatch,
        "part": part,
        "repeats": repeats,
        **found,
    }
    if results:
        rows_of_results.append(results, row)
    click.echo(json.dumps(row))
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
