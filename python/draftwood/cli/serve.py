"""`draftwood serve`: becomes the bundled llama-server, which drafts with our engine where the model can."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from draftwood.cli import server_pool, server_values, shared
from draftwood.cli.failure import library_needed
from draftwood.cli.server_flags import (
    DRAFTER_FILE_FLAGS,
    DRAFTER_SOURCE_FLAGS,
    DRAFTER_SOURCE_VARIABLES,
    SOURCE_FLAGS,
    SOURCE_VARIABLES,
    config_files,
    given,
    name_of,
    number,
    value,
)
from draftwood.cli.server_help import need_known, taking_values
from draftwood.errors import UnsupportedError
from draftwood.load.programs import program
from draftwood.options import HYBRID_ARCHITECTURES, SPECULATIONS, Options, is_one_of_several, plan

if TYPE_CHECKING:
    from draftwood.engine.engine import ModelInfo

_MODEL_FLAGS = ("-m", "--model")
# a user who gives one of these has chosen a drafter; names from common/arg.cpp at the pin
_DRAFTER_FILE_VARIABLE = "LLAMA_ARG_SPEC_DRAFT_MODEL"
_DRAFTER_FLAGS = frozenset((*DRAFTER_FILE_FLAGS, *DRAFTER_SOURCE_FLAGS))
_DRAFTER_VARIABLES = (_DRAFTER_FILE_VARIABLE, *DRAFTER_SOURCE_VARIABLES)
_TYPE, _TYPE_VARIABLE = "--spec-type", "LLAMA_ARG_SPEC_TYPE"
_TYPE_FLAGS = frozenset((_TYPE, "--spec-default"))
_DRAFT_VARIABLES = (_TYPE_VARIABLE, *_DRAFTER_VARIABLES)
# a user who gives one of these has chosen a page, or none
_PAGE_FLAGS = frozenset(("--path", "--no-ui", "--no-webui"))
_PAGE_VARIABLES = ("LLAMA_ARG_STATIC_PATH",)
# what llama-server answers without serving
_LISTS = ("-cl", "--cache-list", "--list-devices")
_HELP_FLAGS = frozenset(
    ("-h", "--help", "--usage", "--version", "--license", "--completion-bash", *_LISTS),
)
# with one of these it serves several models, as its router; it is that without a model, too
_ROUTER_FLAGS = frozenset(
    ("--models-dir", "--models-preset", "--models-max", "--models-autoload", "--no-models-autoload"),
)
_ROUTER_VARIABLES = (
    *("LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_MODELS_MAX"),
    *("LLAMA_ARG_MODELS_AUTOLOAD", "LLAMA_ARG_NO_MODELS_AUTOLOAD"),
)
# --speculation as llama-server's --spec-type; "plain" are our kernels without drafts
_TYPES = {each: "plain" if each == "off" else each for each in SPECULATIONS}
_DRAFTER = "-md DRAFTER.gguf"
# options of `draftwood run`, and of older servers, that llama-server has by another name, or not at all
_READS = "llama-server reads a mapped file as Linux does: leave it out"
_OTHERWISE = {
    "--drafter": _DRAFTER,
    "--draft-tokens": "--spec-draft-n-max N",
    "--n-ctx": "-c N",
    "--max-tokens": "-n N, or max_tokens in a request",
    "--tree-budget": "--spec-type tree, whose verifies have up to 16 rows",
    **dict.fromkeys(("--expert-readahead", "--no-expert-readahead"), _READS),
    "--draft-vocab": "it drafts from an eighth of the vocabulary, a quarter on a card: leave it out",
    "--exact": "its kernels are exact, as draftwood run's: leave it out",
    "--no-exact": "--spec-type none, for llama.cpp's own kernels",
    "--no-mmap": "--load-mode none",
    "--mlock": "--load-mode mlock",
}


@click.command(
    "serve",
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    options_metavar="[--speculation auto|off|mtp|dflash|ngram|tree] [--vram SIZE]",
)
@click.argument("arguments", metavar="[MODEL] [LLAMA-SERVER FLAGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--speculation",
    type=click.Choice(SPECULATIONS),
    default="auto",
    show_default=True,
    help="What drafts, as in `draftwood run`. auto: the model's MTP block or the drafter of -md, as far as "
    "it pays. off: exact kernels, no drafts. --spec-type in its place reaches llama-server unchanged.",
)
@shared.vram
@shared.expert_vram
@shared.expert_heat
@shared.expert_guess
def command(arguments: tuple[str, ...], speculation: str, **pool: Any) -> None:
    """Run the bundled llama-server.

    MODEL is a GGUF file, the same as -m MODEL. All other flags are llama-server's own and reach it unchanged.
    `draftwood serve -h` lists them. Each slot drafts and verifies with draftwood's engine (--spec-type auto).
    """
    server = str(program("llama-server"))
    if not os.access(server, os.X_OK):
        raise UnsupportedError(
            f"found no llama-server at {server}; expected it in the installed package",
            hint="install draftwood again; `draftwood doctor` shows what else is missing",
        )
    with library_needed():
        from draftwood.engine import _capi
        from draftwood.load import cpu
    cpu.check()
    _capi.cuda.hand_on(os.environ)
    flags = command_line(list(arguments), speculation)  # before the port: --prot 8081 names another one
    need_model(flags)
    need_drafter(flags)
    if not given(flags, _HELP_FLAGS, ()):
        server_values.check(flags)
    need_free_port(flags)
    command = [server, *with_page(with_pool(flags, **pool))]
    sys.stderr.flush()
    if sys.platform == "win32":  # a new process in any case, which finds DLLs by PATH
        os.environ["PATH"] = os.pathsep.join([str(Path(_capi.lib._name).parent), os.environ["PATH"]])
        sys.exit(subprocess.call(command))
    os.execv(server, command)


def command_line(arguments: list[str], speculation: str) -> list[str]:
    """Return llama-server's arguments: -m before a model that came first, --spec-type unless one was given.

    Errors: as `Llama` raises for a file that is missing, damaged or no model; UnsupportedError;
    click.UsageError for options that llama-server would not know, or would not heed.
    """
    _check(arguments)
    arguments = _with_model_flag(arguments)
    need_known(program("llama-server"), arguments, _own_flags())
    path = _model(arguments)
    info = None if path is None else _header(path)
    has_model = path is not None or given(arguments, SOURCE_FLAGS, SOURCE_VARIABLES)
    if not has_model or given(arguments, _TYPE_FLAGS, (_TYPE_VARIABLE,)):
        return arguments
    has_drafter = given(arguments, _DRAFTER_FLAGS, _DRAFTER_VARIABLES)
    if speculation == "dflash" and not has_drafter:
        raise click.UsageError(f"found --speculation dflash without a drafter\n\nhint: {_DRAFTER}")
    if info is not None and not has_drafter and speculation != "dflash":
        wished: Any = speculation
        planned = plan(Options(wished), info, {})
        if speculation == "auto" and planned.drafter == "none":
            click.echo(f"draftwood: nothing is drafted: {planned.reason}", err=True)
            # on a card a hybrid's layers are fused all the same; llama-server knows where they lie
            return [*arguments, _TYPE, "auto"] if info.architecture in HYBRID_ARCHITECTURES else arguments
    return [*arguments, _TYPE, _TYPES[speculation]]


def need_model(arguments: list[str]) -> None:
    """Raise click.UsageError without a model: llama-server would start as a router of all models it finds."""
    presets = {name_of(each) for each in arguments if each.startswith("--") and each.endswith("-default")}
    if (
        _model(arguments) is None
        and not given(arguments, SOURCE_FLAGS, SOURCE_VARIABLES)
        and not given(arguments, {*_ROUTER_FLAGS, *_HELP_FLAGS}, _ROUTER_VARIABLES)
        and not presets - _TYPE_FLAGS  # --gpt-oss-20b-default and others download one
        and not any(path.exists() for path in config_files())
    ):
        raise click.UsageError(
            "found no model; expected draftwood serve MODEL\n\n"
            "hint: draftwood serve model.gguf --port 8081; --models-dir FOLDER serves "
            "several models, --models-max 4 those that llama.cpp has downloaded"
        )


def need_drafter(arguments: list[str]) -> None:
    """Raise ModelFileError if a drafter is given by a file that is none: not after the model has loaded."""
    path = value(arguments, DRAFTER_FILE_FLAGS, os.environ.get(_DRAFTER_FILE_VARIABLE))
    is_local = not given(arguments, DRAFTER_SOURCE_FLAGS, DRAFTER_SOURCE_VARIABLES)
    if path and is_local and not given(arguments, _HELP_FLAGS, ()):
        with library_needed():
            from draftwood.load.files import need_drafter_file
        need_drafter_file(path)


def need_free_port(arguments: list[str]) -> None:
    """Refuse a port that is taken (UnsupportedError) or none (click.UsageError).

    llama-server does not say that it is taken, and listens on the lowest 16 bits of a larger number.
    """
    host = value(arguments, ("--host",), os.environ.get("LLAMA_ARG_HOST")) or "127.0.0.1"
    port = number(arguments, ("--port",), "LLAMA_ARG_PORT", 8080)
    if host.endswith(".sock") or given(arguments, _HELP_FLAGS, ()):
        return
    if not 0 <= port < 2**16:
        raise click.UsageError(f"found port {port}; expected 1 to 65535, or 0 for any\n\nhint: --port 8081")
    try:
        ((family, _, _, _, address),) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:1]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UnsupportedError(
                f"port {port} of {host} is in use; expected a free one",
                hint="--port N, or end the server that has it",
            ) from None


def with_pool(arguments: list[str], **options: Any) -> list[str]:
    """Return the arguments with those of a pool of experts. Errors: as `server_pool.flags` raises."""
    path = None if given(arguments, _HELP_FLAGS, ()) else _model(arguments)
    info = _header(path) if path else None
    return [*arguments, *server_pool.flags(server_pool.Wanted(**options), arguments, info)]


def with_page(arguments: list[str]) -> list[str]:
    """Return the arguments with our page at `/`, unless they choose another or none."""
    if given(arguments, _PAGE_FLAGS, _PAGE_VARIABLES):
        return arguments
    return [*arguments, "--path", str(resources.files("draftwood") / "web")]


def _check(arguments: list[str]) -> None:
    for flag in (argument.partition("=")[0] for argument in arguments):
        if name_of(flag) in _OTHERWISE:
            hint = _OTHERWISE[name_of(flag)]
            raise click.UsageError(f"found {flag}, which llama-server does not know\n\nhint: {hint}")
    types = value(arguments, (_TYPE,), os.environ.get(_TYPE_VARIABLE)) or ""
    downloads = given(arguments, SOURCE_FLAGS, SOURCE_VARIABLES)  # perhaps with a drafter beside it
    if "dflash" in types and not downloads and not given(arguments, _DRAFTER_FLAGS, _DRAFTER_VARIABLES):
        raise click.UsageError(
            f"found {_TYPE} {types} without a drafter, from which nothing is drafted\n\nhint: {_DRAFTER}"
        )


def _with_model_flag(arguments: list[str]) -> list[str]:
    """Return the arguments with -m before the model: the first word, or a file after flags."""
    first = arguments[:1] if arguments and not arguments[0].startswith("-") else []
    named = value(arguments, _MODEL_FLAGS, None)
    files = [i for i in range(len(first), len(arguments)) if _is_file(arguments[i])]
    # a program that does not answer is left to speak for itself
    takes = taking_values(program("llama-server")) if len(files) > (named is not None) else frozenset()
    others = [i for i in files if takes and name_of(arguments[i - 1]) not in takes]
    _need_one([*first, *filter(None, [named]), *(arguments[i] for i in others)])
    if first:
        return ["-m", *arguments]
    if named or not others:
        return arguments
    return [*arguments[: others[0]], "-m", *arguments[others[0] :]]


def _need_one(models: list[str]) -> None:
    if len(models) > 1:
        parts = all(map(is_one_of_several, models))
        hint = shared.FIRST_ALONE if parts else "draftwood serve model.gguf --port 8081"
        raise click.UsageError(f"found {' and '.join(models)}; expected one model\n\nhint: {hint}")


def _is_file(argument: str) -> bool:
    return argument.endswith(".gguf") and not argument.startswith("-")


def _own_flags() -> list[str]:
    options = (each for each in command.params if isinstance(each, click.Option))
    return [flag for option in options for flag in (*option.opts, *option.secondary_opts)]


def _model(arguments: list[str]) -> str | None:
    """Return the file that will be loaded; None where there is none, or it is still to be downloaded."""
    path = value(arguments, _MODEL_FLAGS, os.environ.get("LLAMA_ARG_MODEL"))
    absent = path is None or not os.path.exists(path)
    return None if absent and given(arguments, SOURCE_FLAGS, SOURCE_VARIABLES) else path


@cache
def _header(path: str) -> ModelInfo:
    """Read once what decides who drafts and whether there is a pool."""
    with library_needed():
        from draftwood.load.files import checked_model
    return checked_model(path)
