#!/usr/bin/env python3
"""Measure decode of a model that is larger than memory, with chosen experts read ahead and without.

    sudo python bench/short_memory.py [--kind 35b-a3b] [--limit 1GiB] [--tokens 64] [--results FILE]

Each run is a process of its own in a memory cgroup of --limit bytes, page cache included; the model's pages
are dropped before it. It loads the model, evaluates a prompt, writes as many tokens to warm up, and is then
timed. Both sides take turns, in a new order each repeat; what is compared are the ratios within a repeat. The
texts must be equal. The default model has four layers of 35B-A3B with random weights, 3.2 GB.

A line a side; the last line is one JSON object, also added to --results. The disk's read_ahead_kb is in the
row: how many pages Linux reads around a missing one decides how slow the plain way is.
Test: tests/model/test_expert_readahead.py.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import click
from draftwood import Llama
from draftwood.bench import facts
from draftwood.bench import results as rows_of_results
from draftwood.bench.intervals import paired
from draftwood.engine.engine import build_info
from draftwood.load.experts import to_bytes
from memory_group import forget, inside, limited
from stock_cpu import KINDS, N_VOCAB, SYNTHETIC, model_of

SCHEMA = 1
SIDES = {"as llama.cpp reads": False, "read ahead": True}
N_PROMPT = 32


def run(model: Path, readahead: bool, n_tokens: int, seed: int) -> dict[str, Any]:
    """Return the text and the seconds of its second half, in this process."""
    llm = Llama(str(model), n_ctx=512, speculation="off", verbose=False, expert_readahead=readahead)
    chance = random.Random(seed)
    prompt = [chance.randrange(N_VOCAB) for _ in range(N_PROMPT)]
    llm.set_seed(seed)
    stream = llm.generate(prompt, temp=0.8, top_k=40, min_p=0.0)
    tokens = list(islice(stream, n_tokens))
    before, begin = llm.readahead_stats, time.perf_counter()
    tokens += islice(stream, n_tokens)
    seconds, stats = time.perf_counter() - begin, llm.readahead_stats
    n_read = stats.bytes_read - before.bytes_read if stats and before else None
    return {"tokens": tokens, "seconds": seconds, "bytes_read": n_read}


def turn(model: Path, readahead: bool, limit: int, n_tokens: int, seed: int) -> dict[str, Any]:
    """Return what `run` says, in a process with so much memory and none of the file in it."""
    forget(model)
    command = [sys.executable, __file__, "--model", str(model), "--side", str(int(readahead))]
    command += ["--tokens", str(n_tokens), "--seed", str(seed)]
    with limited(limit) as group:
        done = subprocess.run(inside(group, command), check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: Path, limit: int, n_tokens: int, repeats: int) -> dict[str, Any]:
    """Return tokens a second of both sides, their ratio, and what was read ahead."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    read = []
    for repeat in range(repeats):
        texts = []
        for side in random.Random(repeat).sample(sorted(SIDES), len(SIDES)):
            found = turn(model, SIDES[side], limit, n_tokens, repeat)
            seconds[side].append(found["seconds"])
            texts.append(found["tokens"])
            if SIDES[side]:
                read.append(found["bytes_read"] / n_tokens)
        if texts[0] != texts[1]:
            raise SystemExit(f"repeat {repeat}: the texts differ")
    ratio, _ = paired(*seconds.values())
    speeds = {side: round(n_tokens / statistics.median(took), 2) for side, took in seconds.items()}
    return {
        "tokens_per_second": speeds,
        "ratio": ratio.figures(),
        "bytes_read_a_token": round(statistics.median(read)),
    }


def disk_readahead(path: Path) -> int | None:
    """Return read_ahead_kb of the disk that a file lies on; None where the kernel does not say."""
    device = os.stat(path).st_dev
    base = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (base / "queue", base.resolve().parent / "queue"):
        if (queue / "read_ahead_kb").exists():
            return int((queue / "read_ahead_kb").read_text())
    return None


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--kind", type=click.Choice(KINDS), default=SYNTHETIC, show_default=True)
@click.option("--limit", default="1GiB", show_default=True, metavar="SIZE", help="Memory of a run.")
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Timed, after as many.")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
@click.option("--model", type=click.Path(path_type=Path), hidden=True)
@click.option("--side", type=int, hidden=True)
@click.option("--seed", type=int, hidden=True)
def main(kind: str, limit: str, tokens: int, repeats: int, results: Path | None,
         model: Path | None, side: int | None, seed: int | None) -> None:  # fmt: skip
    """Measure both sides and print the row."""
    if model is not None and side is not None and seed is not None:
        click.echo(json.dumps(run(model, bool(side), tokens, seed)))
        return
    if results:
        rows_of_results.check_writable("--results", results)
    path = model_of(kind)
    found = measure(path, to_bytes(limit, "--limit"), tokens, repeats)
    for name, speed in found["tokens_per_second"].items():
        click.echo(f"{name:20} {speed:8.2f} tok/s")
    row = {
        "schema": SCHEMA,
        **facts.machine(build_info()),
        **facts.commit(Path(__file__).parent, "short_memory.py"),
        "model": kind,
        "model_bytes": path.stat().st_size,
        "limit": to_bytes(limit, "--limit"),
        "read_ahead_kb": disk_readahead(path),
        "tokens": tokens,
        "repeats": repeats,
        **found,
    }
    click.echo(json.dumps(row))
    if results:
        rows_of_results.append(results, row)


if __name__ == "__main__":
    main()
