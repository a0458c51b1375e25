"""`draftwood bench`: speed of every way of drafting beside plain decode, as a table, JSON and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwood.bench.modes import BASELINE, MODES, STOCK
from draftwood.cli import llama_flags, shared
from draftwood.cli.failure import SLOWER, library_needed

if TYPE_CHECKING:
    from draftwood.bench.run import Outcome, Prepared, Request

_LEAST_TREE = 3  # the newest token and two that may follow it: fewer cannot branch
_WIDTH = 150  # enough for all columns of the table where no terminal asks for fewer


def _modes(_: click.Context, __: click.Parameter, value: str) -> list[str]:
    modes = list(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
    known = (*MODES, STOCK)
    unknown = [name for name in modes if name not in known]
    if unknown or not modes:
        raise click.BadParameter(f"found {', '.join(unknown) or 'none'}; expected some of {','.join(known)}")
    return modes


def _claims(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, float]]:
    return [_claim(value) for value in values]


def _claim(value: str) -> tuple[str, float]:
    mode, sign, text = value.partition(":")
    if sign and mode not in MODES:
        raise click.BadParameter(f"found the mode {mode!r}; expected one of {','.join(MODES)}")
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.0 < ratio < 1000.0:
        raise click.BadParameter(f"found {value!r}; expected MODE:RATIO, such as auto:0.97")
    return mode, ratio


def _file(**settings: Any) -> click.Path:
    return click.Path(dir_okay=False, path_type=Path, **settings)


@click.command("bench", cls=llama_flags.Command)
@click.argument("model")
@shared.drafter
@click.option("--modes", default=",".join(MODES), show_default=True, callback=_modes,
              help=f"Modes to measure, beside {BASELINE}. What cannot run is left out. {STOCK}: "
                   "llama-cpp-python's own loop and kernels.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), multiple=True,
              help='A file with one {"text": ...} a line; its name is the category. '
                   "Or a folder of such *.jsonl. May be repeated. Default: a built-in set.")  # fmt: skip
@click.option("--per-category", type=click.IntRange(min=1), default=2, show_default=True,
              help="Prompts of each category.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=16), default=128, show_default=True,
              help="Tokens to generate after each prompt.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True,
              help="Cut prompts to this many tokens.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=9, show_default=True,
              help="Timed passes. An interval needs 6; claims are made with 9.")  # fmt: skip
@click.option("--threads", type=shared.THREADS,
              help="CPU threads, the same for all modes. Default: half of the usable cores.")  # fmt: skip
@shared.n_gpu_layers
@click.option("--expert-vram", metavar="SIZE",
              help="Bytes of the card for experts of each mode. All modes are loaded side by side, each "
                   "with all experts in host memory.")  # fmt: skip
@shared.draft_tokens
@shared.tree_budget(_LEAST_TREE)
@click.option("--temp", "temps", type=click.FloatRange(min=0), multiple=True, default=(0.0, 0.8),
              show_default=True, help="Sampling temperature. May be repeated.")  # fmt: skip
@click.option("--floor", "floors", multiple=True, metavar="MODE:RATIO", callback=_claims,
              help="Fail unless the 95 % interval reaches RATIO in every category.")  # fmt: skip
@click.option("--best", "bests", multiple=True, metavar="MODE:RATIO", callback=_claims,
              help="Fail unless the median of one category reaches RATIO.")  # fmt: skip
@click.option("--rivals", "rivals", multiple=True, metavar="MODE:RATIO", callback=_claims,
              help="As --floor, against the fastest of plain decode and the measured chains.")  # fmt: skip
@click.option("--json", "json_path", type=_file(), help="Write all figures to this file.")
@click.option("--plot", type=_file(), help="Draw the ratios into this PNG (needs draftwood[bench]).")
@click.option("--results", type=_file(), help="Add the figures to this file, as a row.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Measure the GGUF file MODEL: plain decode and each way of drafting.

    All modes run in one process, one text each in turn. Each repeat gives the ratio of a mode's speed to
    plain decode's. The table shows the median ratio and its 95 % interval (order statistics, as in the sign
    test), and the same of the prompts' evaluation. Run nothing else beside it. The exit code is 1 if a text
    differs from plain decode's, 3 if a claim fails.
    """
    outputs = {f"--{name}": options[key] for name, key in _OUTPUTS.items() if options[key]}
    _check_outputs(outputs, options["results"])
    with library_needed():
        import draftwood.llama  # noqa: F401
    from draftwood.bench import run

    prepared = run.prepare(_request(options))
    for mode, reason in prepared.left_out.items():
        click.echo(f"left out {mode}: {reason}", err=True)
    with _progress(prepared.steps) as step:
        outcome = run.execute(prepared, step)
    _show(outcome, prepared.request)
    _write(outcome, prepared, options)
    for fault in outcome.faults:
        click.echo(click.style("wrong: ", fg="red") + fault, err=True)
    if outcome.faults:
        ctx.exit(1)
    if not outcome.document["ok"]:
        ctx.exit(SLOWER)


_OUTPUTS = {"json": "json_path", "plot": "plot", "results": "results"}


def _check_outputs(outputs: dict[str, Path], results: Path | None) -> None:
    """Refuse files that could not be written in the end. Errors: OptionError."""
    from draftwood.bench.results import check_writable, read

    for option, path in outputs.items():
        check_writable(option, path)
    if results:
        read(results)
    if "--plot" in outputs:
        from draftwood.bench import plot

        plot.check_available("--plot")


def _request(options: dict[str, Any]) -> Request:
    from draftwood.bench.claims import Claim
    from draftwood.bench.run import Request
    from draftwood.load.cores import usable_cores

    given = {name: value for name, value in options.items() if name in Request.__dataclass_fields__}
    given["temps"] = tuple(dict.fromkeys(options["temps"]))
    given["threads"] = options["threads"] or max(1, usable_cores() // 2)  # as `draftwood run`
    floors = [Claim("floor", mode, ratio) for mode, ratio in options["floors"]]
    bests = [Claim("best", mode, ratio) for mode, ratio in options["bests"]]
    rivals = [Claim("rivals", mode, ratio) for mode, ratio in options["rivals"]]
    return Request(**given, claims=[*floors, *bests, *rivals])


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, drawn between two texts only: a thread of its own would be timed too."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("texts", total=total)
        yield lambda: progress.update(task, advance=1, refresh=True)


def _show(outcome: Outcome, request: Request) -> None:
    from rich.console import Console

    from draftwood.bench.report import notes, table

    console = Console()
    width = console.width if console.is_terminal else None
    console.width = max(console.width, _WIDTH)  # a terminal too narrow for any column wraps, none is cut
    for temp in request.temps:
        console.print(table(outcome.figures, temp, width))
    for note in notes({**outcome.document, "expert_vram": request.expert_vram}):
        click.echo(note)
    for verdict in outcome.verdicts:
        word = click.style("holds", fg="green") if verdict.holds else click.style("FAILED", fg="red")
        click.echo(f"{word}: {verdict.text}")


def _write(outcome: Outcome, prepared: Prepared, options: dict[str, Any]) -> None:
    from draftwood.bench import plot, results

    if options["json_path"]:
        text = json.dumps(outcome.document, indent=1, allow_nan=False)
        options["json_path"].write_text(text + "\n", encoding="utf-8")
    if options["results"]:
        results.append(options["results"], outcome.document)
    if options["plot"]:
        plot.draw(options["plot"], outcome.figures, _title(prepared.request))


def _title(request: Request) -> str:
    threads = f"{request.threads} thread{'s' if request.threads > 1 else ''}"
    spread = "\nwhiskers: 95 % interval of the median" if request.repeats >= 6 else ""
    return f"{Path(request.model).name}, {threads}, {request.repeats} paired repeats{spread}"
