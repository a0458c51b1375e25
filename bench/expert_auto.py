#!/usr/bin/env python3
"""Measure speculation="auto" beside plain decode over pools of experts, at prescribed acceptance.

    python bench/expert_auto.py MODEL [--part 0.65]... [--acceptance 0.3]... [--pairs 6] [--results FILE]

For each --part of the experts' bytes the model is loaded once: a plain `Llama`, and one that drafts with its
MTP block if "auto" thinks that it pays, share weights and pool. The latter is made anew for each
--acceptance, the chance that one more draft of a round is kept, and first writes a text that does not count.

A pair is two new texts, 64 random tokens and then --rounds rounds, which both sides write: the one first in
one text, the other in the other, since the second finds more of the text's experts in slots. Before each of
them plain decode writes another text, the same for both.

The ratio is of tokens a second over both texts, auto's over plain's. Counters are those of all counted
segments; bytes are a token's. Acceptance is by schedule (bench/gpu/schedule.py), so the text means nothing.

A line a cell; the last line is one JSON object, also added to --results.
Test: tests/model/test_expert_auto.py.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from draftwood.bench import results as rows_of_results
from draftwood.bench.intervals import paired

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: what lies there must not shadow what is installed
from bench.gpu.cases import Case, check  # noqa: E402
from bench.gpu.ours import POOLED, Ours, shared_weights  # noqa: E402
from bench.gpu.stamp import origin  # noqa: E402

SCHEMA = 1
PARTS = (0.65, 0.50, 0.25, 0.03)
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9)
OTHER_TEXTS = 500  # seeds from here on
ROUNDS = ("rounds", "drafted", "accepted", "paused_rounds", "failed_drafts")


def case_of(part: float, acceptance: float, n_rounds: int, **more: Any) -> Case:
    """Return what both sides of a cell run: up to 5 drafts a round."""
    return check(Case(
        name=f"auto at {part}", model="", drafter="mtp", nodes=6, auto=True, experts=part,
        rates=tuple(acceptance**j for j in range(1, 6)), rounds=n_rounds, **{"prompt": 64, **more},
    ))  # fmt: skip


def cells(ours: Ours, cases: Sequence[Case], pairs: int) -> list[dict[str, Any]]:
    """Return a cell for each of the cases, which differ in their acceptance, and print it."""
    begin = time.perf_counter()
    ours.open_pool(max(cases, key=lambda case: case.schedule))  # with room for the longest text
    ours.plain(0)  # captures graphs
    loaded = time.perf_counter() - begin
    found = []
    for i, case in enumerate(cases):
        with ours.change(case):
            cell = _cell(ours, pairs, 1000 * (i + 1))
        cell["acceptance"] = case.schedule[0]
        found.append({"part": case.experts, "loaded_s": round(loaded, 1), **cell})
        click.echo(_line(found[-1]))
    ours.close()
    return found


def _cell(ours: Ours, pairs: int, seed: int) -> dict[str, Any]:
    turns = {"plain": ours.plain, "auto": ours.candidate}
    seconds: dict[str, list[float]] = {name: [0.0] * pairs for name in turns}  # a token, of a pair's texts
    counts: dict[str, Counter[str]] = {name: Counter() for name in turns}
    turns["auto"](seed)
    for pair in range(pairs):
        for text, order in ((2 * pair, list(turns)), (2 * pair + 1, list(turns)[::-1])):
            for name in order:
                ours.plain(seed + OTHER_TEXTS + text)
                found = turns[name](seed + 1 + text)
                seconds[name][pair] += found["seconds"] / found["tokens"] / 2
                counts[name].update(tokens=found["tokens"])
                counts[name].update({key: found["stats"][key] for key in ROUNDS})
                counts[name].update({key: found["experts"][key] for key in POOLED})
    ratio, ratios = paired(seconds["plain"], seconds["auto"])
    sides = {name: _side(seconds[name], counts[name]) for name in turns}
    return {"ratio": ratio.figures(), "ratios": [round(each, 3) for each in ratios], **sides}


def _side(seconds: Sequence[float], counts: Counter[str]) -> dict[str, Any]:
    chosen = counts["hits"] + counts["misses"]
    return {
        "tok_s": round(1 / statistics.median(seconds), 2),
        **{key: counts[key] for key in ("tokens", *ROUNDS, *POOLED[1:4], *POOLED[5:])},
        "hit_rate": round(counts["hits"] / chosen, 4) if chosen else None,
        "bytes_missed": counts["bytes_missed"] // counts["tokens"],
    }


def _line(cell: dict[str, Any]) -> str:
    median, low, high = cell["ratio"]
    auto = cell["auto"]
    return (
        f"{cell['part']:.2f} of bytes, acceptance {cell['acceptance']:.1f}: {median:.3f} [{low}, {high}], "
        f"{cell['plain']['tok_s']:.1f} and {auto['tok_s']:.1f} tok/s, "
        f"{auto['rounds'] - auto['paused_rounds']} of {auto['rounds']} rounds drafted, "
        f"{cell['plain']['bytes_missed'] / 1e6:.1f} and {auto['bytes_missed'] / 1e6:.1f} MB a token"
    )


@click.command(help=(__doc__ or "").splitlines()[0])
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--part", "parts", multiple=True, default=PARTS, show_default=True,
              type=click.FloatRange(0.0, 1.0, max_open=True),
              help="Of the experts' bytes that the card holds.")  # fmt: skip
@click.option("--acceptance", "acceptances", multiple=True, default=ACCEPTANCES, show_default=True,
              type=click.FloatRange(0.0, 1.0), help="Of a draft behind accepted ones.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=64, show_default=True, help="Of a counted text.")
@click.option("--pairs", type=click.IntRange(1), default=6, show_default=True)
@click.option("--n-gpu-layers", type=int, default=-1, show_default=True)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(
    model: Path,
    parts: tuple[float, ...],
    acceptances: tuple[float, ...],
    rounds: int,
    pairs: int,
    n_gpu_layers: int,
    results: Path | None,
) -> None:
    """Measure all cells and print the row."""
    if results:
        rows_of_results.check_writable("--results", results)
    of_run = origin()
    found = []
    with tempfile.TemporaryDirectory() as curves, shared_weights():
        os.environ["DRAFTWOOD_CURVES"] = curves  # "auto" measures for itself
        ours = Ours(str(model), None)
        for part in parts:
            cases = [
                case_of(part, acceptance, rounds, n_gpu_layers=n_gpu_layers) for acceptance in acceptances
            ]
            found += cells(ours, cases, pairs)
    row = {
        "schema": SCHEMA,
        **of_run,
        "model": model.name,
        "rounds": rounds,
        "pairs": pairs,
        "cells": found,
    }
    if results:
        rows_of_results.append(results, row)
    click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
