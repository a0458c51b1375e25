"""The command line: `draftwood run | tree | serve | bench | experts | doctor`.

Holds the group, the exit codes and how errors are shown. Must not import the library, numpy or rich: `--help`
and `--version` are instant, and each command imports what it needs when it runs.
Exit codes: 0, 1 (an error, said in one message), 2 (wrong usage), 3 (`bench`: a claim failed), 130 (Ctrl-C).
Tests: tests/unit/test_cli.py, tests/model/test_cli.py.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any, NoReturn

import click

from draftwood.cli import bench, doctor, experts, run, serve, tree
from draftwood.cli.failure import Commands, in_options


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"draftwood {version('draftwood')}")
        ctx.exit()


_EPILOG = 'Shell completion: eval "$(_DRAFTWOOD_COMPLETE=bash_source draftwood)", or zsh_source, fish_source.'


@click.group(cls=Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def cli() -> None:
    """Run GGUF models with speculative decoding.

    Drafts come from MTP, DFlash or n-grams, as chains or trees. The text stays the same.
    """


for _module in (run, tree, serve, bench, experts, doctor):
    cli.add_command(_module.command)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, options by their names, instead of Python's two with a source line."""
    context = click.get_current_context(silent=True)
    text = " ".join(str(message).split())
    if context is not None:
        text = in_options(text, context.command)
    click.echo(f"{click.style('Warning: ', fg='yellow')}{text}", err=True)


def main() -> NoReturn:
    """Run the command line on sys.argv and exit."""
    warnings.showwarning = _show_warning
    cli.main(prog_name="draftwood")
    raise AssertionError("click returned from main")
