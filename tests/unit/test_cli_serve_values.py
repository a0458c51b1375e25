"""`draftwood serve` refuses what llama-server would abort on, and a model that was forgotten."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from draftwood.cli import cli
from draftwood.load.arguments import MAX_THREADS
from draftwood.load.programs import program

TINY = str(Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf")


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """What became llama-server."""
    for name in [name for name in os.environ if name.startswith("LLAMA_ARG_")]:
        monkeypatch.delenv(name)
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    return commands


def serve(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "found", "hint"),
    [
        (["-c", "-5"], "-c is -5; expected a whole number of at least 0", "-c 8192"),
        (["--ctx-size", "-1"], "--ctx-size is -1; expected a whole number of at least 0", "-c 8192"),
        (["--ctx_size", "3000000000"], "--ctx_size is 3000000000; expected at most 2147483647", "-c 8192"),
        (["-b", "-1"], "-b is -1; expected a whole number of at least 1", "-b 2048"),
        (["--batch-size", "0"], "--batch-size is 0; expected a whole number of at least 1", "-b 2048"),
        (["-ub", "-1"], "-ub is -1; expected a whole number of at least 0", "-ub 512"),
        (["-t", "100000"], f"-t is 100000; expected at most {MAX_THREADS}", "-t 4"),
        (["-t", "2", "--threads", "100000"], f"--threads is 100000; expected at most {MAX_THREADS}", "-t 4"),
        (["-tb", "100000"], f"-tb is 100000; expected at most {MAX_THREADS}", "-tb 4"),
        (["--rpc", "foo"], "--rpc is 'foo'; expected host:port, or several", "--rpc 127.0.0.1:50052"),
        (["--rpc", "a:1,b"], "--rpc is 'a:1,b'; expected host:port", "--rpc 127.0.0.1:50052"),
    ],
    ids=str,
)
def test_numbers_and_addresses_that_end_the_server(started, arguments, found, hint):
    result = serve(TINY, "--port", "0", *arguments)
    assert (result.exit_code, started) == (1, [])
    assert f"Error: {found}" in result.stderr
    assert f"\n\nhint: {hint}" in result.stderr


def test_a_variable_is_named(started, monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_THREADS", "100000")
    assert "Error: LLAMA_ARG_THREADS is 100000; expected at most" in serve(TINY, "--port", "0").stderr
    assert serve(TINY, "--port", "0", "-t", "2").exit_code == 0
    assert serve("-h").exit_code == 0


def test_a_server_that_does_not_answer(started):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = serve(TINY, "--port", "0", "--rpc", f"127.0.0.1:{port}")
    assert (result.exit_code, started) == (1, [])
    assert f"no RPC server answers at 127.0.0.1:{port}" in result.stderr
    assert f"\n\nhint: {program('ggml-rpc-server')} --host HOST --port PORT" in result.stderr


def test_every_server_is_asked_that_llama_server_connects_to(started, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("draftwood.load.rpc.greet", asked.append)
    monkeypatch.setenv("LLAMA_ARG_RPC", "a:1,b:2")
    assert serve(TINY, "--port", "0", "--rpc", "c:3", "--rpc", "a:1,c:3").exit_code == 0
    assert asked == ["a:1", "b:2", "c:3"]
    result = serve(TINY, "--port", "0", "--rpc", "a:1, b:2")
    assert "--rpc is 'a:1, b:2'; expected addresses without blanks" in result.stderr


def test_a_model_of_llama_cpps_own_settings(started, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "found no model" in serve("--port", "0").stderr
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text(f"model = {TINY}\n")
    assert serve("--port", "0").exit_code == 0
    assert started


def test_numbers_within_bounds_reach_the_server(started):
    numbers = ["-c", "0", "-b", "1", "-ub", "0", "-t", "-2", "-tb", str(MAX_THREADS)]
    result = serve(TINY, "--port", "0", *numbers)
    assert result.exit_code == 0, result.output
    assert started[0][5 : 5 + len(numbers)] == numbers


@pytest.mark.parametrize(
    "arguments", [["--port", "0"], ["-c", "64", "--no-warmup"], ["--speculation", "off"]]
)
def test_a_model_that_was_forgotten(started, arguments):
    result = serve(*arguments)
    assert (result.exit_code, started) == (2, [])
    assert (
        "found no model; expected draftwood serve MODEL\n\nhint: draftwood serve model.gguf" in result.stderr
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--models-dir", "."],
        ["--models_preset", "x.ini"],
        ["--models-max", "2"],
        ["-hf", "a/b"],
        ["--gpt-oss-20b-default"],
        ["--list-devices"],
        ["-cl"],
    ],
    ids=str,
)
def test_what_stands_for_a_model(started, arguments):
    result = serve("--port", "0", *arguments)
    assert result.exit_code == 0, result.output
    assert len(started) == 1


@pytest.mark.parametrize("name", ["LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_HF_REPO"])
def test_a_variable_that_stands_for_a_model(started, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    assert serve("--port", "0").exit_code == 0
    assert len(started) == 1
