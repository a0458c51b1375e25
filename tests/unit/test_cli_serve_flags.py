"""`draftwood serve` answers a flag that llama-server refuses with the nearest ones that it knows."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import draftwood.cli.serve as serve_module
import pytest
from click.testing import CliRunner
from draftwood.cli import cli, server_help

SERVER = serve_module.program("llama-server")


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """What the program says is not left out because others have the cores."""
    monkeypatch.setattr(server_help, "_TIMEOUT", 120.0)


@pytest.fixture
def started(monkeypatch, tmp_path) -> list[list[str]]:
    """What became llama-server. No model is read, for a wrong flag is answered before that."""
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    monkeypatch.chdir(tmp_path)
    return commands


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["serve", *arguments])


def refused(*arguments: str) -> str:
    """What is said about a flag of the arguments, behind the usage."""
    result = serve("none.gguf", *arguments)
    assert result.exit_code == 2, result.output
    return str(result.stderr.partition("Error: ")[2])


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--ctx-siz", "--ctx-size"),
        ("--paralel", "--parallel"),
        ("--spec-typ", "--spec-type"),
        ("--batch", "--batch-size"),
        ("-parallel", "--parallel"),
        ("--ngl", "-ngl"),
        ("--speculatoin", "--speculation"),
        ("--expert-hat", "--expert-heat"),
    ],
)
def test_a_misspelt_flag_is_answered_with_the_nearest(started, flag, near):
    said = refused("--port", "1", flag, "4")
    found, _, hint = said.rstrip("\n").partition("\n\nhint: ")
    assert found == f"found {flag}, which llama-server does not know; expected one of its flags"
    assert hint.split(" or ")[0] == near
    assert started == []


def test_one_like_none_is_sent_to_the_list(started):
    assert "\n\nhint: `draftwood serve -h` lists them\n" in refused("--zzzz")


def test_a_value_behind_an_equals_sign_is_the_next_word(started):
    said = refused("--ctx-size=4096")
    assert said.startswith("found --ctx-size=4096, which llama-server does not know")
    assert said.endswith("\n\nhint: --ctx-size 4096\n")
    assert refused("--ctx-siz=4096").endswith("\n\nhint: --ctx-size or --context-shift\n")


def test_flags_of_older_servers_are_named_by_their_successors(started):
    assert refused("--no-mmap").endswith("\n\nhint: --load-mode none\n")
    assert refused("--mlock").endswith("\n\nhint: --load-mode mlock\n")


def test_all_that_the_program_lists_is_known():
    said = subprocess.run([SERVER, "--completion-bash"], capture_output=True, text=True, check=True).stdout
    listed = re.search(r'opts="(.*?)"', said)
    assert listed
    flags = [each for each in listed[1].split() if each.startswith("-")]
    assert len(flags) > 200
    for flag in [*flags, "--no-kv-offload", "-nkvo"]:
        assert flag in server_help._listed(server_help._said(SERVER, "--help"))


def test_which_flags_take_a_value(monkeypatch, tmp_path):
    """As llama-server reads them: one that takes none leaves the first wrong flag behind it to be refused."""
    monkeypatch.chdir(tmp_path)  # --log-file opens a file of that name
    takes = server_help.taking_values(SERVER)
    assert {"-m", "--model", "--port", "-c", "--ctx-size", "-md", "--spec-type", "--alias", "-fa"} <= takes
    for flag in server_help._listed(server_help._said(SERVER, "--help")):
        said = server_help._said(SERVER, flag, "--zz1", "--zz2", "--zz3")
        if "invalid argument: --zz" in said:
            assert ("invalid argument: --zz1" not in said) == (flag in takes), flag
        elif "error while handling argument" in said:  # of the value
            assert flag in takes


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ctx_size", "4096", "-n", "-1", "--no_warmup"],
        ["--alias", "--a-name", "--api-key", "-secret"],  # values, as the program reads them
        ["--ctx-size", "many"],  # the program's own words say what is wrong
        ["-h"],
    ],
)
def test_what_the_program_takes_or_says_itself_reaches_it(started, arguments):
    result = serve("-mu", "http://127.0.0.1:1/x.gguf", "--port", "0", *arguments)
    assert result.exit_code == 0, result.output
    assert started[0][5 : 5 + len(arguments)] == arguments


@pytest.mark.parametrize("body", ["exit 1", "exec sleep 30"])
def test_a_program_that_does_not_answer_is_left_to_itself(monkeypatch, tmp_path, body):
    monkeypatch.setattr(server_help, "_TIMEOUT", 0.2)
    program = tmp_path / "llama-server"
    server_help.need_known(program, ["--ctx-siz", "4"], [])  # not there
    program.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    program.chmod(0o755)
    server_help.need_known(program, ["--ctx-siz", "4"], [])
