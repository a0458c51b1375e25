"""Options of a pool of experts at `draftwood serve`: flags of llama-server, sizes as bytes, refusals."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import click
import draftwood.cli.serve as serve_module
import pytest
from click.testing import CliRunner
from draftwood.cli import cli
from draftwood.cli.server_pool import _PLACING, Wanted, flags
from draftwood.engine.engine import ModelInfo
from draftwood.errors import ExpertMemoryError, OptionError, UnsupportedError
from draftwood.load import experts, memory

from tests.unit.model_of_experts import DRAFTER, GIB, INFO

MODEL = replace(INFO, n_ctx_train=32768)
SERVER = {"n_batch": 2048}


@pytest.fixture(autouse=True)
def _bare(monkeypatch):
    for name in list(os.environ):
        if name.startswith("LLAMA_ARG_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(memory, "available", lambda: 64 * GIB)


def made(*arguments: str, info: ModelInfo | None = MODEL, **options: Any) -> list[str]:
    return flags(Wanted(**{**dict.fromkeys(Wanted.__slots__), **options}), list(arguments), info)


def room(n_ctx: int, n_slots: int = 4, **changes: Any) -> int:
    """Queued steps have a sequence beside the slots'."""
    return 12 * GIB - experts.beside(MODEL, {**SERVER, "n_ctx": n_ctx, "n_seq_max": n_slots + 1, **changes})


def test_without_options_there_are_no_flags():
    assert made() == []


def test_expert_vram_reaches_the_server_as_bytes():
    assert made(expert_vram="6GiB") == ["--expert-vram", str(6 * GIB)]
    assert made(expert_vram="6GiB", info=None) == ["--expert-vram", str(6 * GIB)]
    assert made(expert_vram="1000GiB") == ["--expert-vram", str(1000 * GIB)]


def test_of_vram_experts_get_what_the_server_leaves(tmp_path):
    for given, n_ctx in ((["-c", "8192"], 8192), (["--ctx_size", "4096"], 4096), (["-c", "0"], 32768)):
        assert made(*given, vram="12GiB") == ["--expert-vram", str(room(n_ctx))]
    assert made("-c", "8192", "-np", "1", vram="12GiB") == ["--expert-vram", str(room(8192, n_slots=1))]
    of_slots = made("--kv-unified-per-slot", "1000", "-np", "3", vram="12GiB")
    assert of_slots == ["--expert-vram", str(room(3000, n_slots=3))]
    small = made("-c", "8192", "-ub", "128", vram="12GiB")
    assert small == ["--expert-vram", str(room(8192, n_ubatch=128))]
    projector = tmp_path / "beside.gguf"
    projector.write_bytes(b"x" * 12345)
    for flag, file in (("-md", DRAFTER), ("-mm", projector)):
        left = room(8192) - file.stat().st_size
        assert made("-c", "8192", flag, str(file), vram="12GiB") == ["--expert-vram", str(left)]


def test_more_slots_take_more():
    assert room(8192, n_slots=8) < room(8192) < room(8192, n_slots=1)


def test_variables_count_as_flags(monkeypatch):
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "8192")
    monkeypatch.setenv("LLAMA_ARG_N_PARALLEL", "2")
    assert made(vram="12GiB") == ["--expert-vram", str(room(8192, n_slots=2))]
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "many")  # the server says what is wrong with it
    assert made("-np", "x", vram="12GiB") == ["--expert-vram", str(room(32768))]


def test_what_the_context_takes_is_said_unless_it_was_chosen(capsys):
    made("-c", "8192", vram="12GiB")
    made(expert_vram="6GiB")
    assert capsys.readouterr().err == ""
    made(vram="12GiB")
    said = capsys.readouterr().err
    assert said.startswith(
        "draftwood: the model's context of 32768 tokens takes 688 MiB of --vram; -c N leaves"
    )


def test_guesses_and_heat_go_with_a_size(tmp_path):
    heat = str(tmp_path / "heat.json")
    assert made(expert_vram="6GiB", expert_heat=heat, expert_guess=False)[2:] == [
        "--expert-heat", heat, "--no-expert-guess",
    ]  # fmt: skip
    assert made(expert_vram="6GiB", expert_guess=True)[2:] == ["--expert-guess"]
    for alone in ({"expert_heat": heat}, {"expert_guess": False}):
        with pytest.raises(click.UsageError, match="without --vram or --expert-vram; expected a size"):
            made(**alone)


def test_the_size_may_be_a_flag_of_the_server(tmp_path, monkeypatch):
    assert made("--expert_vram", "6GiB", expert_guess=False) == ["--no-expert-guess"]
    monkeypatch.setenv("LLAMA_ARG_EXPERT_VRAM", "6GiB")
    assert made(expert_guess=False) == ["--no-expert-guess"]


@pytest.mark.parametrize("flag", _PLACING)
def test_another_way_to_place_experts_is_refused(flag, monkeypatch):
    with pytest.raises(click.UsageError, match=f"found {flag} beside --vram or --expert-vram"):
        made(flag, "3", expert_vram="6GiB")
    monkeypatch.setenv(_PLACING[flag], "3")
    with pytest.raises(click.UsageError, match="expected one way to place experts"):
        made(vram="12GiB")


def test_what_llama_refuses_is_refused(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="found vram and expert_vram"):
        made(vram="12GiB", expert_vram="6GiB")
    with pytest.raises(OptionError, match="expert_vram is '6 apples'"):
        made(expert_vram="6 apples")
    with pytest.raises(OptionError, match=r"vram is '4GiB'; expected \d+ bytes or more: .* n_ctx=32768"):
        made(vram="4GiB")
    with pytest.raises(UnsupportedError, match="this model has no experts"):
        made(expert_vram="6GiB", info=replace(MODEL, n_experts=0))
    with pytest.raises(OptionError, match="is a folder; expected a file"):
        made(expert_vram="6GiB", expert_heat=str(tmp_path))
    monkeypatch.setattr(memory, "available", lambda: 12 * GIB)
    with pytest.raises(ExpertMemoryError, match=r"in host memory, 16.0 GiB, and 12.0 GiB are free"):
        made(expert_vram="6GiB")


def test_heat_of_another_model_is_refused(tmp_path):
    path = tmp_path / "heat.json"
    path.write_text(json.dumps({"schema": 1, "n_experts": 256, "heat": {"3": [5] * 256}}))
    assert made(expert_vram="6GiB", expert_heat=str(path))[2:] == ["--expert-heat", str(path)]
    path.write_text(json.dumps({"schema": 1, "n_experts": 16, "heat": {"3": [5] * 16}}))
    with pytest.raises(OptionError, match="is no heat file of a model with 40 layers of 256 experts"):
        made(expert_vram="6GiB", expert_heat=str(path))


def test_vram_needs_a_header():
    with pytest.raises(click.UsageError, match="found --vram without a model file"):
        made("-hf", "a/b", vram="12GiB", info=None)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(options of serve) -> what became of it and the arguments that llama-server got."""
    path = tmp_path / "model.gguf"
    path.touch()
    monkeypatch.setattr(serve_module, "_header", lambda path: MODEL)

    def run(*arguments: str) -> tuple[Any, list[str]]:
        got: list[str] = []
        monkeypatch.setattr(os, "execv", lambda path, command: got.extend(command))
        return CliRunner().invoke(cli, ["serve", str(path), *arguments]), got

    return run


def test_serve_hands_a_pool_to_the_server(started):
    result, got = started("--expert-vram", "6GiB", "-np", "2", "--no-expert-guess", "--alias", "x")
    assert result.exit_code == 0, result.output
    assert got[3:-2] == [
        "-np", "2", "--alias", "x", "--spec-type", "auto",
        "--expert-vram", str(6 * GIB), "--no-expert-guess",
    ]  # fmt: skip
    assert "--vram" not in started("--vram", "12GiB", "-c", "8192")[1]


@pytest.mark.parametrize(
    ("arguments", "free", "hint"),
    [
        (("--vram", "4GiB"), 64, "MiB; a smaller -c or -ub needs less"),
        (("--expert-vram", "6GiB"), 12, "hint: --n-cpu-moe 25 in place of --vram and --expert-vram: the CPU"),
        (("--vram", "12GiB", "--expert-vram", "6GiB"), 64, "hint: leave --expert-vram out"),
    ],
    ids=str,
)
def test_hints_are_in_flags_of_the_server(started, monkeypatch, arguments, free, hint):
    monkeypatch.setattr(memory, "available", lambda: free * GIB)
    result, got = started(*arguments)
    assert (result.exit_code, got) == (1, [])
    assert hint in result.stderr
