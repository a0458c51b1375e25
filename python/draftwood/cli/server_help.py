"""What llama-server's help tells of its flags: which it knows, and which take a value.

A flag that it refuses is answered with the nearest ones that it knows, before a model is loaded.

Must not know: what flags mean. Test: tests/unit/test_cli_serve_flags.py.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click

from draftwood.cli.server_flags import name_of

# the head of an option's entry: "-c,    --ctx-size N    size of the prompt context"
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_HEAD = re.compile(rf"^{_FLAG.pattern}(?:,\s+{_FLAG.pattern})*", re.M)
_TAKES = re.compile(rf"^({_FLAG.pattern}(?:,\s+{_FLAG.pattern})*) \S", re.M)  # two blanks before a text
_REFUSED = re.compile(r"^error: invalid argument: (-.*)", re.M)
_TIMEOUT = 10.0
"""Seconds for an answer of the program. It takes milliseconds; a user's RPC server may keep it waiting."""


def need_known(server: Path, arguments: list[str], ours: Iterable[str]) -> None:
    """Raise click.UsageError for a flag that llama-server refuses. `ours` are flags of `serve` itself.

    The help lists the flags. Whether a word that is none of them is a value, the program decides: it reads
    the arguments as far as `--version`, where it ends. One that does not answer is left to speak for itself.
    """
    known = frozenset(_listed(_said(server, "--help")))
    flags = [each for each in arguments if _FLAG.match(each)]
    if not known or all(name_of(flag) in known for flag in flags):
        return
    refused = _REFUSED.search(_said(server, *arguments, "--version"))
    if refused:
        raise click.UsageError(
            f"found {refused[1]}, which llama-server does not know; expected one of its flags\n\n"
            f"hint: {_hint(refused[1], {*known, *ours})}"
        )


def taking_values(server: Path) -> frozenset[str]:
    """Return the flags that take a value; none if the program does not answer."""
    heads = _TAKES.findall(_said(server, "--help"))
    return frozenset(flag for head in heads for flag in _FLAG.findall(head))


def _said(server: Path, *arguments: str) -> str:
    """Return what the program says to these arguments. It need not look for cards first."""
    try:
        done = subprocess.run(
            [server, *arguments],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def _listed(text: str) -> list[str]:
    return [flag for head in _HEAD.findall(text) for flag in _FLAG.findall(head)]


def _hint(flag: str, known: set[str]) -> str:
    name, is_pair, value = flag.partition("=")
    if is_pair and name in known:
        return f"{name} {value}".rstrip()
    name = name.lstrip("-")
    if f"-{name}" in known:  # short flags resemble anything: one is meant by its own letters only
        return f"-{name}"
    near = difflib.get_close_matches(name, [each[2:] for each in known if each.startswith("--")], n=8)
    near.sort(key=lambda each: not each.startswith(name))  # --batch is --batch-size cut short
    return " or ".join(f"--{each}" for each in near[:3]) or "`draftwood serve -h` lists them"
