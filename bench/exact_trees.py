"""Hold text with draft trees against plain decode: every budget, drafter, model and temperature.

    make exact        (or: python bench/exact_trees.py [--only NAME] [--budgets N ...] [--drafters NAME ...])

A cell is a model, a drafter, a budget and a temperature. Drafters: MTP, DFlash (tiny-moe), n-grams, and an
oracle that knows the plain text and gives random trees of exactly `budget` nodes, in which it plants a wanted
accepted length, each followed by 20 plain rounds. Its cells must reach every length from 0 to
min(8, budget - 1) at least 5 times, as the engine counts, and verify trees; so must those of the drafters
from 8 nodes on. For random weights n-grams draft in texts of three tokens only, which repeat themselves.
Nothing is excused. A line of output is a cell as JSON, the last one the sums; the exit status is 1 if a token
differs or something of the above is missing.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftwood import Llama
from draftwood.bench.facts import machine
from draftwood.bench.results import append, check_writable, read
from draftwood.engine.engine import build_info
from oracle import PLAIN_AFTER, TreeOracleLlama, followed
from same_text import (
    CACHES,
    LONGEST,
    N_PROMPTS,
    SEED,
    TEMPERATURES,
    TEXT,
    Model,
    Tally,
    accepted_lengths,
    generate,
    load,
    settings,
)

import models

SCHEMA = 1
BUDGETS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)
ON_TWO_THREADS = (3, 12, 16, 48)
"""Budgets whose verifies run on two threads, or on one where that is faster. All else is on one: beside other
programs many times as fast."""
DRAFTERS = ("mtp", "ngram", "dflash", "oracle")
BRANCHES_FROM = 8
"""Budget from which a drafter has to branch: the most probable of fewer nodes may always be a chain."""
# of exact.py's shapes: moe-mtp and dense-mtp are those of the planted ones, whose drafts are accepted
RANDOM_SHAPES = ("odd", "gqa", "q4k", "q3k", "mix", "planted-moe", "planted-dense")
TIMES = 5
"""How often the oracle's cells reach each accepted length."""


def depth_of(budget: int) -> int:
    """Return the longest path that is accepted in trees of `budget` nodes."""
    return min(LONGEST, budget - 1)


def planned_lengths(budget: int, least: int, dice: random.Random) -> list[list[int]]:
    """Return which lengths are accepted in turn in each text: all of them TIMES times, in `least` tokens."""
    wanted: list[int] = []
    while len(wanted) < TIMES * (depth_of(budget) + 1) or tokens_of(wanted) < least:
        lengths = list(range(depth_of(budget) + 1))
        wanted += dice.sample(lengths, len(lengths))
    texts: list[list[int]] = [[]]
    for length in wanted:
        if tokens_of([*texts[-1], length]) > TEXT:
            texts.append([])
        texts[-1].append(length)
    assert len(texts) <= N_PROMPTS
    return texts


def tokens_of(lengths: Sequence[int]) -> int:
    """Return how many tokens such a text has; the first comes from the prompt's own evaluation."""
    return 1 + sum(length + 1 + PLAIN_AFTER for length in lengths)


def differing(found: Sequence[int], plain: Sequence[int], n_tokens: int) -> int:
    """Return how many of the first n_tokens are not those of plain decode."""
    return sum(a != b for a, b in zip(found, plain[:n_tokens], strict=True))


def oracle_texts(
    llm: TreeOracleLlama, model: Model, budget: int, temperature: float
) -> tuple[int, int, Counter[int]]:
    """Return tokens, mismatches, and how often each length was accepted with plain rounds behind."""
    n_all = wrong = 0
    reached: Counter[int] = Counter()
    texts = planned_lengths(budget, model.least, random.Random(budget))
    for i, (prompt, lengths) in enumerate(zip(model.prompts, texts, strict=False)):
        plain, n_tokens = model.plain[temperature][i], tokens_of(lengths)
        llm.plan_trees(plain, len(prompt), lengths, budget, seed=SEED + i)
        found = generate(llm, prompt, n_tokens, model.sampling[temperature])
        n_all, wrong = n_all + n_tokens, wrong + differing(found, plain, n_tokens)
        reached += followed(llm.rounds(), budget)
    return n_all, wrong, reached


def drafter_texts(llm: Llama, model: Model, temperature: float) -> tuple[int, int, Counter[int]]:
    """Return tokens, mismatches, and how often each length was accepted."""
    n_tokens, wrong = model.least // N_PROMPTS + 1, 0
    for prompt, plain in zip(model.prompts, model.plain[temperature], strict=True):
        found = generate(llm, prompt, n_tokens, model.sampling[temperature])
        wrong += differing(found, plain, n_tokens)
    return n_tokens * N_PROMPTS, wrong, accepted_lengths(llm)


def fault_of(cell: dict[str, Any]) -> str:
    """Return what a cell has not shown; empty where it has shown everything."""
    budget, drafter, reached = cell["budget"], cell["drafter"], cell["accepted_lengths"]
    lengths = range(depth_of(budget) + 1) if drafter == "oracle" else ()
    missing = [length for length in lengths if reached.get(str(length), 0) < TIMES]
    if missing:
        return f"accepted lengths that did not occur {TIMES} times: {', '.join(map(str, missing))}"
    if budget > 1 and not cell["drafted"]:
        return "nothing was drafted"
    if budget >= (3 if drafter == "oracle" else BRANCHES_FROM) and not cell["tree_rounds"]:
        return "no tree was verified"
    return ""


def run_cells(model: Model, drafter: str, budget: int, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a cell for each temperature; common: `settings`."""
    kind = TreeOracleLlama if drafter == "oracle" else Llama
    llm = kind(
        str(model.path),
        speculation="mtp" if drafter == "oracle" else drafter,
        drafter=models.DFLASH if drafter == "dflash" else None,
        draft_tokens=LONGEST,
        tree_budget=max(budget, 2) if drafter == "oracle" else budget,  # with one, nothing is drafted at all
        **common,
    )
    for temperature in TEMPERATURES:
        llm.reset_speculation_stats()
        if isinstance(llm, TreeOracleLlama):
            n_tokens, wrong, reached = oracle_texts(llm, model, budget, temperature)
        else:
            n_tokens, wrong, reached = drafter_texts(llm, model, temperature)
        stats = llm.speculation_stats
        assert stats is not None
        yield {
            "model": model.name,
            "drafter": drafter,
            "budget": budget,
            "temperature": temperature,
            "threads": common["n_threads_batch"],
            "tokens": n_tokens,
            "mismatches": wrong,
            "excused": 0,
            "rounds": stats.rounds,
            "tree_rounds": stats.tree_rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accepted_lengths": {str(length): reached[length] for length in sorted(reached)},
            "tokens_per_round": round(stats.tokens_per_round, 3),
        }
    llm.close()


def cells_of(name: str, path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the cells of one model."""
    made = partial(settings, args.threads or 1, gpu_layers=args.gpu_layers, cache=args.cache)
    model = load(name, path, made())
    for drafter in args.drafters:
        if drafter == "dflash" and not model.trained:
            continue  # its drafter was trained for tiny-moe
        texts = model
        if drafter == "ngram" and not model.trained:
            texts = load(name, path, made(), few=True)
        for budget in args.budgets:
            n_verify = args.threads or (2 if budget in ON_TWO_THREADS else 1)
            yield from run_cells(texts, drafter, budget, made(n_verify))


def note_of(cell: dict[str, Any]) -> str:
    """Return why a cell without trees is none the less whole; empty for one that has them."""
    if cell["tree_rounds"]:
        return ""
    return (
        "no room for a branch" if cell["budget"] < 3 else "the most probable tree was a chain in every round"
    )


def row_of_run(tally: Tally, cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a results file gets of a run."""
    return {
        "schema": SCHEMA,
        **machine(build_info()),
        "command": shlex.join(["python", "bench/exact_trees.py", *sys.argv[1:]]),
        "tokens": tally.tokens,
        "mismatches": tally.mismatches,
        "excused": 0,
        "cells": list(cells),
    }


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, help="default: 1, of some verifies 2")
    parser.add_argument("--only", default="", help="run only the models whose name holds this")
    parser.add_argument("--budgets", type=int, nargs="*", default=BUDGETS)
    parser.add_argument("--drafters", choices=DRAFTERS, nargs="*", default=DRAFTERS)
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on a card; -1: all")
    parser.add_argument("--cache", choices=CACHES, default="F16", help="type of keys and values")
    parser.add_argument("--results", type=Path, help="add the cells to this file, as a row")
    return parser.parse_args()


def main() -> int:
    """Run everything and print the verdict."""
    args = parsed()
    makers: dict[str, Callable[[], Path]] = {}
    for kind in ("F16", *models.QUANTISED):
        makers[f"tiny-moe-{kind}"] = partial(models.tiny_moe, kind)
    for shape in RANDOM_SHAPES:
        makers[shape] = partial(models.synthetic, shape)
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        check_writable("--results", args.results)
        read(args.results)
    tally, cells, faults = Tally(), [], []
    for name, make in makers.items():
        if args.only not in name:
            continue
        for cell in cells_of(name, make(), args):
            fault = fault_of(cell)
            cell["note"] = fault or note_of(cell)
            print(json.dumps(cell), flush=True)
            cells.append(cell)
            if fault:
                faults.append(
                    f"{name}, {cell['drafter']}, {cell['budget']} nodes, {cell['temperature']}: {fault}"
                )
            lengths = Counter({int(length): n for length, n in cell["accepted_lengths"].items()})
            tally.add(cell["tokens"], cell["mismatches"], lengths)
    if args.results:
        append(args.results, row_of_run(tally, cells))
    return tally.print_verdict(faults)


if __name__ == "__main__":
    sys.exit(main())
