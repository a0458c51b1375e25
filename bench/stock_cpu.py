"""Measure draftwood on a CPU beside the stock llama-cpp-python of the pinned version, both at their defaults.

    python bench/stock_cpu.py [--kind F16|Q8_0|Q4_K_M|35b-a3b]... [--repeats N] [--prompt N] [--results FILE]

Three processes have the model in memory and take turns on the same prompt, in a new order each time: the
stock package, draftwood with drafting off, draftwood with "auto". A turn is a prompt of its own, evaluated
from nothing, and then tokens one after another. What is compared are the ratios within a repeat, so what else
the machine does falls on all three. The stock package is installed once into build/stock-env, which takes as
long as its build does; --stock names the Python of an environment that has it.

A line a kind; the last line is one JSON object, also added to --results. Must not know: ops, drafters.
Test: tests/model/test_stock_cpu.py.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from draftwood.bench import facts
from draftwood.bench import results as rows
from draftwood.bench.intervals import LEAST_PAIRS, paired
from draftwood.engine.engine import build_info
from stock_worker import STOCK
from turns import Worker

from models import synthetic_of, tiny_moe

ROOT = Path(__file__).resolve().parent.parent
WORKER = ROOT / "bench" / "stock_worker.py"
ENVIRONMENT = ROOT / "build" / "stock-env"
OFF, AUTO = "off", "auto"
SIDES = (STOCK, OFF, AUTO)
SYNTHETIC = "35b-a3b"
KINDS = ("F16", "Q8_0", "Q4_K_M", SYNTHETIC)
N_VOCAB = 380  # ids below it are tokens of all these models
SCHEMA = 1


def stock_python() -> Path:
    """Return the Python of an environment with the stock package of the pinned version, made if need be."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "installed").exists():
        sys.path.insert(0, str(ROOT / "_build"))
        from pin import load_lock

        lock = load_lock(ROOT)
        print(f"installing {lock.name} {lock.version} into {ENVIRONMENT.relative_to(ROOT)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        built = ROOT / "build" / "stock"  # where tests/compat keep a wheel they built
        wheels = ["--find-links", built] if built.exists() else []
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *wheels, f"{lock.name}=={lock.version}"], check=True
        )
        (ENVIRONMENT / "installed").touch()
    return python


def compare(python: Path | str, model: Path, prompts: list[list[int]], n_tokens: int) -> dict[str, Any]:
    """Return speeds and ratios of one model; a prompt is a repeat, the first one warms up."""
    n_ctx = 64 * -(-(len(prompts[0]) + n_tokens + 64) // 64)
    pythons = {STOCK: python, OFF: sys.executable, AUTO: sys.executable}
    workers = {side: Worker([pythons[side], WORKER, side, model, str(n_ctx)]) for side in SIDES}
    seconds: dict[str, dict[str, list[float]]] = {side: {"prompt": [], "decode": []} for side in SIDES}
    equal = True
    try:
        for i, prompt in enumerate(prompts):
            order = random.Random(i).sample(SIDES, len(SIDES))
            turns = {side: workers[side].turn(prompt=prompt, tokens=n_tokens) for side in order}
            equal = equal and turns[OFF]["tokens"] == turns[AUTO]["tokens"]
            for side in SIDES if i > 0 else ():
                for what, times in seconds[side].items():
                    times.append(turns[side][what])
    finally:
        for worker in workers.values():
            worker.close()
    found: dict[str, Any] = {"same_text": equal}
    for what, n in (("prompt", len(prompts[0])), ("decode", n_tokens)):
        found[what] = {side: round(n / statistics.median(seconds[side][what]), 1) for side in SIDES}
        for side in (OFF, AUTO):
            over, _ = paired(seconds[STOCK][what], seconds[side][what])
            found[what][f"{side}/stock"] = over.figures()
    return found


def said(kind: str, found: dict[str, Any]) -> str:
    """Return a kind's line: tokens a second, and ratios with their 95 % intervals."""
    words = [f"{kind:8}"]
    for what in ("prompt", "decode"):
        speeds = found[what]
        words.append(f"{what} {speeds[STOCK]:7.1f} tok/s")
        for side in (OFF, AUTO):
            ratio, low, high = speeds[f"{side}/stock"]
            words.append(f"{side} {ratio:.2f} [{low:.2f}, {high:.2f}]")
    return "  ".join(words)


def model_of(kind: str) -> Path:
    """Return tiny-moe's file of that type, or four layers of 35B-A3B with random weights."""
    if kind != SYNTHETIC:
        return tiny_moe(kind)
    from synth_gguf import PRESETS  # in tools/, which models.py puts on the path

    return synthetic_of(f"{kind}-4", replace(PRESETS[kind], layers=4))


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--kind", "kinds", type=click.Choice(KINDS), multiple=True, help="All, unless some are named.")
@click.option("--repeats", type=click.IntRange(min=LEAST_PAIRS), default=LEAST_PAIRS, show_default=True)
@click.option("--prompt", "n_prompt", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--tokens", "n_tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--stock", "python", type=click.Path(exists=True, dir_okay=False), help="Python with the stock package."
)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(
    kinds: tuple[str, ...],
    repeats: int,
    n_prompt: int,
    n_tokens: int,
    python: str | None,
    results: Path | None,
) -> None:
    """Measure each kind and print the row."""
    if results:
        rows.check_writable("--results", results)
    stock = python or stock_python()
    found = {}
    for kind in kinds or KINDS:
        chance = random.Random(kind)
        prompts = [[chance.randrange(10, N_VOCAB) for _ in range(n_prompt)] for _ in range(1 + repeats)]
        found[kind] = compare(stock, model_of(kind), prompts, n_tokens)
        print(said(kind, found[kind]), flush=True)
    asked = {"prompt": n_prompt, "tokens": n_tokens, "repeats": repeats}
    row = {"schema": SCHEMA, **facts.machine(build_info()), **asked, "kinds": found}
    if results:
        rows.append(results, row)
    print(json.dumps(row))
    if not all(each["same_text"] for each in found.values()):
        raise SystemExit("texts with drafting and without differ")


if __name__ == "__main__":
    main()
