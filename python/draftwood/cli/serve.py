"""`draftwood serve`: becomes the bundled llama-server, with MTP drafting on where the model has it."""

from __future__ import annotations

import os
import sys
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwood.cli.failure import library_needed
from draftwood.errors import UnsupportedError
from draftwood.options import SPECULATIONS, Options, plan

if TYPE_CHECKING:
    from draftwood.engine.engine import ModelInfo

_MODEL_FLAGS = ("-m", "--model")
# a user who gives one of these has chosen a drafter; names from common/arg.cpp at the pin
_DRAFTER_FLAGS = frozenset(
    ("--spec-draft-model", "-md", "--model-draft", "--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft")
)
_DRAFTER_VARIABLES = ("LLAMA_ARG_SPEC_DRAFT_MODEL", "LLAMA_ARG_SPEC_DRAFT_HF_REPO")
_TYPE, _TYPE_VARIABLE = "--spec-type", "LLAMA_ARG_SPEC_TYPE"
_DRAFT_FLAGS = _DRAFTER_FLAGS | {_TYPE, "--spec-default"}
_DRAFT_VARIABLES = (_TYPE_VARIABLE, *_DRAFTER_VARIABLES)
# a model file that is not there yet may come from one of these
_SOURCE_FLAGS = frozenset(("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-dr", "--docker-repo"))
_SOURCE_VARIABLES = ("LLAMA_ARG_MODEL_URL", "LLAMA_ARG_HF_REPO", "LLAMA_ARG_DOCKER_REPO")
_MTP = (_TYPE, "draft-mtp")
_NGRAM = (_TYPE, "ngram-simple")
_DFLASH = f"{_TYPE} draft-dflash -md DRAFTER.gguf"
_CHAINS = "llama-server drafts chains; for trees use draftwood run or Llama"
_NOT_IN_LLAMA_SERVER = {"dflash": _DFLASH, "tree": _CHAINS}
# options of `draftwood run` that llama-server has by another name, or not at all
_EXPERTS = "--n-cpu-moe N keeps the experts of N layers in host memory; `draftwood run` has a pool of them"
_READS = "llama-server reads a mapped file as Linux does: leave it out"
_OTHERWISE = {
    "--drafter": _DFLASH,
    "--draft-tokens": "--spec-draft-n-max N",
    "--n-ctx": "-c N",
    "--max-tokens": "-n N, or max_tokens in a request",
    "--tree-budget": _CHAINS,
    "--vram": _EXPERTS,
    "--expert-vram": _EXPERTS,
    "--expert-heat": _EXPERTS,
    **dict.fromkeys(("--expert-guess", "--no-expert-guess"), _EXPERTS),
    **dict.fromkeys(("--expert-readahead", "--no-expert-readahead"), _READS),
    "--draft-vocab": "llama-server drafts from the whole vocabulary: leave it out",
    "--exact": "its kernels are llama.cpp's own",
    "--no-exact": "its kernels are llama.cpp's own: leave it out",
}


class _Speculation(click.Choice):  # type: ignore[type-arg]  # click 8.1 has no parameter here
    """What llama-server can do of it, with a word on the rest."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value. Errors: click.BadParameter."""
        try:
            return str(super().convert(value, param, ctx))
        except click.BadParameter as error:
            hint = _NOT_IN_LLAMA_SERVER.get(value)
            self.fail(error.message + (f"\n\nhint: {hint}" if hint else ""), param, ctx)


def program(name: str) -> Path:
    """Return where a bundled program is, or would be."""
    return Path(str(resources.files("draftwood") / "bin" / name))


@click.command(
    "serve",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[--speculation auto|off|mtp|ngram]",
)
@click.argument("arguments", metavar="[MODEL] [LLAMA-SERVER FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--speculation",
    type=_Speculation([s for s in SPECULATIONS if s not in _NOT_IN_LLAMA_SERVER]),
    default="auto",
    show_default=True,
    help="auto: add --spec-type draft-mtp if MODEL has an MTP block. mtp: the same, and fail if it has none. "
    "ngram: add --spec-type ngram-simple.",
)
def command(arguments: tuple[str, ...], speculation: str) -> None:
    """Run the bundled llama-server.

    MODEL is a GGUF file, the same as -m MODEL. All other flags are llama-server's own and reach it unchanged.
    `draftwood serve -h` lists them. Drafting is llama.cpp's own, in chains: draftwood's trees and kernels are
    not in llama-server.
    """
    server = str(program("llama-server"))
    if not os.access(server, os.X_OK):
        raise UnsupportedError(
            f"found no llama-server at {server}; expected it in the installed package",
            hint="install draftwood again; `draftwood doctor` shows what else is missing",
        )
    with library_needed():
        from draftwood.load import cpu
    cpu.check()
    command = [server, *command_line(list(arguments), speculation)]
    sys.stderr.flush()
    os.execv(server, command)


def command_line(arguments: list[str], speculation: str) -> list[str]:
    """Return llama-server's arguments: -m before a model that came first, --spec-type where MTP can draft.

    Errors: as `Llama` raises for a file that is missing, damaged or no model; UnsupportedError;
    click.UsageError for options that llama-server would not know, or would not heed.
    """
    _check(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["-m", *arguments]
    path = _model(arguments)
    info = None if path is None else _header(path)
    if speculation == "off" or _given(arguments, _DRAFT_FLAGS, _DRAFT_VARIABLES):
        return arguments
    if speculation == "ngram":
        return [*arguments, *_NGRAM]
    if info is None:
        if speculation == "mtp":
            raise UnsupportedError(
                f"--speculation mtp needs a model file to look into; found {path or 'none'}",
                hint="name it first, or pass llama-server's own --spec-type draft-mtp",
            )
        return arguments
    wished: Any = speculation
    planned = plan(Options(wished), info, {})
    if planned.drafter != "mtp":
        click.echo(f"draftwood: nothing is drafted: {planned.reason}", err=True)
        return arguments
    click.echo(
        f"draftwood: {path} has an MTP block, adding {' '.join(_MTP)} (--speculation off: without)", err=True
    )
    return [*arguments, *_MTP]


def _check(arguments: list[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in arguments):
        if _flag(flag) in _OTHERWISE:
            hint = _OTHERWISE[_flag(flag)]
            raise click.UsageError(f"found {flag}, which llama-server does not know\n\nhint: {hint}")
    types = _value(arguments, (_TYPE,), os.environ.get(_TYPE_VARIABLE)) or ""
    downloads = _given(arguments, _SOURCE_FLAGS, _SOURCE_VARIABLES)  # perhaps with a drafter beside it
    if (
        "draft-dflash" in types
        and not downloads
        and not _given(arguments, _DRAFTER_FLAGS, _DRAFTER_VARIABLES)
    ):
        raise click.UsageError(
            f"found {_TYPE} {types} without a drafter, from which nothing is drafted\n\nhint: {_DFLASH}"
        )


def _flag(argument: str) -> str:
    # llama-server reads --spec_type as --spec-type
    return argument.replace("_", "-") if argument.startswith("--") else argument


def _given(arguments: list[str], flags: frozenset[str], variables: tuple[str, ...]) -> bool:
    return any(_flag(a) in flags for a in arguments) or any(os.environ.get(v) for v in variables)


def _value(arguments: list[str], flags: tuple[str, ...], default: str | None) -> str | None:
    """Return what stands behind the last of these flags."""
    return ([default] + [value for flag, value in pairwise(arguments) if _flag(flag) in flags])[-1]


def _model(arguments: list[str]) -> str | None:
    """Return the file that will be loaded; None where there is none, or it is still to be downloaded."""
    path = _value(arguments, _MODEL_FLAGS, os.environ.get("LLAMA_ARG_MODEL"))
    absent = path is None or not os.path.exists(path)
    return None if absent and _given(arguments, _SOURCE_FLAGS, _SOURCE_VARIABLES) else path


def _header(path: str) -> ModelInfo:
    with library_needed():
        from draftwood.load.files import checked_model
    return checked_model(path)
