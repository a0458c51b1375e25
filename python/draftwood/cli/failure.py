"""Exit codes, errors in the words of a command, and installation failures in one message."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from draftwood.errors import DraftwoodError

INTERRUPTED = 130
"""After Ctrl-C: 128 and the signal's number, as shells have it."""
SLOWER = 3
"""A claim about speed that failed in a run that went well."""

_WORDS = {
    " to Llama()": "",
    " or n_ubatch needs less": " needs less",  # no such option
    ", or a cache of smaller numbers: flash_attn=True, type_k=8, type_v=8 (q8_0)": "",  # no such options
}
# options of llama-server, which has other names
_SERVER_WORDS = {
    "n_ctx or n_ubatch needs": "-c or -ub needs",
    "n_cpu_moe=": "--n-cpu-moe ",
    "n_cpu_moe keeps": "--n-cpu-moe N keeps",
    "vram and expert_vram": "--vram and --expert-vram",
}
_WITH_DRAFTER = "Llama(model, drafter=path)"
_VALUE = r"""=("[^"]*"|'[^']*'|[^\s,;)]+)?"""


def said(error: DraftwoodError, command: click.Command) -> str:
    """Return an error's message, its hint in the words of the command."""
    return str(DraftwoodError(error.message, error.hint and in_options(error.hint, command)))


def in_options(hint: str, command: click.Command) -> str:
    """Return a hint written for `Llama(...)` with the command's options in place of keyword arguments.

    Options are parameters by their names; a keyword without an option stays. Test: tests/unit/test_cli.py.
    """
    drafts = any(option.name == "drafter" for option in command.params)
    words = _SERVER_WORDS if command.name == "serve" else {}
    words = {
        **words,
        **_WORDS,
        _WITH_DRAFTER: f"draftwood {command.name if drafts else 'run'} MODEL --drafter FILE",
    }
    for python, ours in words.items():
        hint = hint.replace(python, ours)
    for option in command.params:
        if isinstance(option, click.Option) and option.name:
            hint = re.sub(rf"\b{option.name}{_VALUE}", lambda found, o=option: _given(o, found[1]), hint)  # type: ignore[misc]
            if "_" in option.name:  # others are words, too
                hint = re.sub(rf"(?<![\w-]){option.name}(?![\w-])", option.opts[-1], hint)
    return hint


def _given(option: click.Option, value: str | None) -> str:
    if option.is_flag:
        off = value == "False" and option.secondary_opts
        return option.secondary_opts[-1] if off else option.opts[-1]
    value = "FILE" if value == "path" else (value or "").strip("\"'")
    return f"{option.opts[-1]} {value}".rstrip()


class Commands(click.Group):
    """A group whose commands end with a message, never with a traceback, where an error is one of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except DraftwoodError as error:
            command = self.commands[ctx.invoked_subcommand or ""]
            raise click.ClickException(said(error, command)) from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read our text has left; click ends quietly
                raise
            raise click.ClickException(str(error)) from error


@contextmanager
def library_needed() -> Iterator[None]:
    """Import what loads the library in here: whatever keeps it from loading becomes one message."""
    try:
        yield
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        hint = "`draftwood doctor` says what is wrong with this installation"
        raise click.ClickException(f"draftwood's library cannot be used: {error}\n\nhint: {hint}") from error
