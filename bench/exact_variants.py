"""Run exact.py and exact_trees.py on each CPU variant of a wheel, in parts side by side.

    make wheel; pip install build/dist/draftwood-*.whl; python bench/exact_variants.py [--variant haswell]...

A part is a model with chains, or a budget with trees, in a process of its own with DRAFTWOOD_CPU set. All of
a variant's parts are summed: a token that differs, a part that fails, or an accepted length that never
occurred makes the exit status 1. The last line is one JSON object, also added to --results.
Meant for machines with many cores: on two it takes hours. Test: tests/model/test_exact.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import exact
import exact_trees
from draftwood.bench import results as rows
from draftwood.load import cpu
from draftwood.load.cores import usable_cores
from same_text import LONGEST

import models

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))  # last: what lies there must not shadow what is installed

from bench.gpu import stamp  # noqa: E402

CHAINS, TREES = "chains", "trees"
KINDS = ("F16", *models.QUANTISED)
NAMES = (*(f"tiny-moe-{kind}" for kind in KINDS), *exact.RANDOM_SHAPES)
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a script with arguments on a variant."""

    variant: str
    kind: str
    arguments: tuple[str, ...]

    def run(self) -> dict[str, Any]:
        """Return its sums, and `failed` with the end of its output if it has none or found a fault."""
        script = HERE / ("exact.py" if self.kind == CHAINS else "exact_trees.py")
        environment = {**os.environ, cpu.CHOICE: self.variant, "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [sys.executable, script, *self.arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            found = {}
        if done.returncode != 0 or "tokens" not in found:
            found["failed"] = (done.stdout + done.stderr)[-2000:]
        print(f"{self.variant} {self.kind} {' '.join(self.arguments)}: {json.dumps(found)}", flush=True)
        return found


def make_models() -> None:
    """Make all models: parts side by side would write the same files."""
    for kind in KINDS:
        models.tiny_moe(kind)
    for shape in exact.RANDOM_SHAPES:
        models.synthetic(shape)


def parts_of(variant: str, names: Sequence[str], budgets: Sequence[int]) -> list[Part]:
    """Return the parts of a variant, the longest first."""
    trees = [Part(variant, TREES, ("--budgets", str(budget))) for budget in sorted(budgets, reverse=True)]
    return [*trees, *(Part(variant, CHAINS, ("--threads", "1", "--only", name)) for name in names)]


def grouped(
    parts: Sequence[Part], found: Sequence[dict[str, Any]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return what was found by variant and kind."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part, each in zip(parts, found, strict=True):
        groups.setdefault((part.variant, part.kind), []).append(each)
    return groups


def summed(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens, mismatches, cells and accepted lengths of all parts."""
    sums: Counter[str] = Counter()
    lengths: Counter[str] = Counter()
    for each in found:
        sums.update({name: each.get(name, 0) for name in ("tokens", "mismatches", "excused", "cells")})
        lengths.update(each.get("accepted_lengths", {}))
    return {**sums, "accepted_lengths": {str(n): lengths[str(n)] for n in range(LONGEST + 1)}}


def faults_of(variant: str, kind: str, found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a variant's parts of a kind."""
    total = summed(found)
    missing = [n for n, times in total["accepted_lengths"].items() if times == 0]
    lines = [f"{variant}, {kind}: {each['failed']}" for each in found if "failed" in each]
    if total["mismatches"]:
        lines.append(f"{variant}, {kind}: {total['mismatches']} tokens differ")
    if missing:
        lines.append(f"{variant}, {kind}: accepted lengths that never occurred: {', '.join(missing)}")
    return lines


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--variant", "variants", multiple=True, help="All that run here, unless some are named.")
@click.option("--jobs", type=click.IntRange(min=1), default=usable_cores, help="Processes at once.")
@click.option("--only", type=click.Choice(NAMES), help="Chains of this model alone.")
@click.option("--budget", "budgets", type=click.IntRange(1, 64), multiple=True, default=exact_trees.BUDGETS)
@click.option("--results", type=click.Path(path_type=Path, dir_okay=False), help="File to add the row to.")
def main(
    variants: tuple[str, ...], jobs: int, only: str | None, budgets: tuple[int, ...], results: Path | None
) -> None:
    """Run all parts and print the row."""
    if results:
        rows.check_writable("--results", results)
    origin = stamp.origin()  # of what starts now
    runs = [name for name, score in cpu.variants().items() if score > 0]
    variants = tuple(dict.fromkeys(variants))
    unknown = sorted(set(variants) - set(runs))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}; expected some of {', '.join(runs)}")
    make_models()
    names = (only,) if only else NAMES
    parts = [part for name in variants or runs for part in parts_of(name, names, budgets)]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(Part.run, parts))
    sums: dict[str, dict[str, Any]] = {}
    faults = []
    for (variant, kind), mine in grouped(parts, found).items():
        sums.setdefault(variant, {})[kind] = summed(mine)
        faults += faults_of(variant, kind, mine)
    row = {"schema": SCHEMA, **origin, "variants": sums, "faults": faults}
    if results:
        rows.append(results, row)
    print(*faults, json.dumps(row), sep="\n")
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
