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
    "temperature=": "--temp ",
    "temperature is": "--temp is",
    " or n_ubatch needs less": " needs less",  # no such option
    ", or a cache of smaller numbers: flash_attn=True, type_k=8, type_v=8 (q8_0)": "",  # no such options
}
# options of llama-server, which has other names
_SERVER_WORDS = {
    "n_ctx or n_ubatch needs": "-c or -ub needs",
    "n_cpu_moe=": "--n-cpu-moe ",
    "n_cpu_moe keeps": "--n-cpu-moe N keeps",
    "n_ctx=": "-c ",
}
_WITH_DRAFTER = "Llama(model, drafter=path)"
_BEFORE, _AFTER = r"(?<![\w/.-])", r"(?![\w/-]|\.\w)"  # of a name, but not in a path
_VALUE = r"""=("[^"]*"|'[^']*'|[^\s,;)]+)?"""


def said(error: DraftwoodError, command: click.Command) -> str:
    """Return an error's message and hint, which name the options of the command."""
    hint = error.hint and in_options(error.hint, command)
    return str(DraftwoodError(in_options(error.message, command), hint))


def in_options(text: str, command: click.Command) -> str:
    """Return a text written for `Llama(...)` with the command's options in place of keyword arguments.

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
        text = text.replace(python, ours)
    for option in command.params:
        if isinstance(option, click.Option) and option.name:
            text = _with_option(text, option, option.name)
    return text


def _with_option(text: str, option: click.Option, name: str) -> str:
    text = re.sub(rf"{_BEFORE}{name}{_VALUE}", lambda found: _given(option, found[1]), text)
    if "_" not in name and name != "vram":  # a word, too
        return text
    return re.sub(rf"{_BEFORE}{name}{_AFTER}", option.opts[-1], text)


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
