#!/usr/bin/env python3
"""Measure draftwood on a GPU at 35B-A3B shapes beside stock llama-server, at prescribed acceptance.

    python bench/run.py run models floor memory cases      there; again until it says that nothing is left
    python bench/run.py run real profile
    python bench/run.py test FOLDER on memcheck            there: tests/gpu in parts, a row each
    python bench/run.py collect FOLDER                     here: rows into bench/results/gpu-<card>.json ...

Stages end before a command on a lent machine would (--minutes) and go on from --work; the first failure ends
them. What was found is copied to --out as one file. Cases are bench/cases/*.toml. On a CPU, for the tests:
`run models cases --model tiny-moe --set n_gpu_layers=0 --set rounds=8 ...`. The parts are in bench/gpu/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # last: what lies there must not shadow what is installed

from draftwood.bench import results  # noqa: E402
from draftwood.errors import DraftwoodError  # noqa: E402

from bench.gpu import cases, floor, profiling, rows, stages, stamp, suite  # noqa: E402
from bench.gpu.work import NAME, BenchError, Clock, Work, read  # noqa: E402

RESULTS = ROOT / "bench" / "results"
MORE = 3  # exit status: call it again
_FOLDER = click.Path(file_okay=False, path_type=Path)


class _Group(click.Group):
    """Commands whose errors are a line and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DraftwoodError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, help=(__doc__ or "").split("\n\n")[0])
def main() -> None:
    """Hold the commands."""


@main.command("run")
@click.argument("names", metavar="STAGE...", nargs=-1, required=True, type=click.Choice(list(stages.STAGES)))
@click.option("--case", "wanted", multiple=True, help="Only this case; may be repeated.")
@click.option("--work", type=_FOLDER, default=Path("/tmp/draftwood-bench"), show_default=True,
              help="Models, logs, and what was found.")  # fmt: skip
@click.option("--out", type=_FOLDER, help="Where to copy what was found.")
@click.option("--minutes", type=click.FloatRange(0.1), default=9.0, show_default=True)
@click.option("--model", help="Another model for all cases: tiny-moe, a preset, a GGUF.")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Change a field of all cases.")
@click.option(
    "--real", "real", default="", help="More options of the `draftwood bench` that stage real runs."
)
def run(names: tuple[str, ...], wanted: tuple[str, ...], work: Path, out: Path | None, minutes: float,
        model: str | None, settings: tuple[str, ...], real: str) -> None:  # fmt: skip
    """Run stages, in this order, until they are done or the time is up (exit status 3)."""
    plan = stages.Plan(_chosen(cases.read(settings=settings, model=model), wanted), real, click.echo)
    here, clock = Work(work, out), Clock(minutes)
    for name in names:
        if not stages.run(name, here, clock, plan):
            click.echo(f"{name}: time is up; call it again with the same folder")
            sys.exit(MORE)
    click.echo("nothing left to do")


def _chosen(known: dict[str, cases.Case], wanted: tuple[str, ...]) -> list[cases.Case]:
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise BenchError(
            f"found --case {unknown[0]}; expected one of {', '.join(known)}",
            hint="without it all run",
        )
    return [case for name, case in known.items() if not wanted or name in wanted]


@main.command("test")
@click.argument("folder", type=_FOLDER)
@click.argument("parts", metavar="PART...", nargs=-1, type=click.Choice(list(suite.PARTS)))
@click.option("--minutes", type=click.FloatRange(0.1), default=9.5, show_default=True)
def run_tests(folder: Path, parts: tuple[str, ...], minutes: float) -> None:
    """Run tests/gpu in parts, with logs and rows in FOLDER; exit status 3 where time is up before one.

    Parts: on, alone, off, alone-off, exact, pageable (these without PART), pool, memcheck, racecheck,
    memcheck-trees. The first part that fails ends them.
    """
    left = suite.run(parts or suite.USUAL, folder, Clock(minutes), click.echo)
    if left:
        click.echo(f"time is up; call it again with {' '.join(left)}")
        sys.exit(MORE)


@main.command()
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--results", "target", type=_FOLDER, default=RESULTS, help="Default: bench/results.")
def collect(folders: tuple[Path, ...], target: Path) -> None:
    """Add what runs found as rows to bench/results; a run's row of a case is added once."""
    for folder in folders:
        tests = folder / suite.ROWS
        added = _tests_added(results.read(tests), target)
        if (folder / NAME).exists() or not tests.exists():
            added += _measured_added(read(folder / NAME), target)
        click.echo(f"{folder}: {added} rows added")


def _tests_added(found: list[dict[str, Any]], target: Path) -> int:
    for row in found:
        rows.require_origin(row)
    return _added(target, "tests-{}.json", found)


def _measured_added(state: dict[str, Any], target: Path) -> int:
    return (
        _added(target, "gpu-{}.json", rows.of_run(state))
        + _added(target, "gpu-{}-kernels.json", rows.kernels(state))
        + _added(target, "tiny-moe-f16-{}.json", rows.of_real(state))
    )


def _added(target: Path, file: str, new: list[dict[str, Any]]) -> int:
    """Add the rows to the file of their card that are not in it; return how many were added."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        if "run" not in row:
            return (row["date"],)
        return tuple(row.get(name) for name in ("run", "case", "model", "nodes", "phase"))

    added = 0
    for row in new:
        path = target / file.format(rows.slug(row["cards"][0]))
        if key(row) not in map(key, results.read(path)):
            results.append(path, row)
            added += 1
    return added


@main.command("stamp")
def write_stamp() -> None:
    """Print which commit this tree is of, and a digest of its sources: tools/gpu.sh pack keeps it."""
    click.echo(json.dumps(stamp.make()))


@main.command(hidden=True)
@click.argument("fields")
@click.argument("phase", type=click.Choice(profiling.PHASES))
@click.option("--model", required=True)
@click.option("--drafter")
def profiled(fields: str, phase: str, model: str, drafter: str | None) -> None:
    """Run what stage profile looks at, of a case as JSON; started under ncu."""
    profiling.profiled(cases.Case(**json.loads(fields)), phase, model, drafter)


@main.command(hidden=True)
def origin() -> None:
    """Print machine, build and commit of what runs here, as JSON; every stage starts it."""
    click.echo(json.dumps(stamp.origin()))


@main.command(hidden=True)
def bandwidth() -> None:
    """Print how fast the card copies its own memory, as JSON; started by stage floor."""
    click.echo(json.dumps(floor.copy_bandwidth()))


if __name__ == "__main__":
    main()
