"""`draftwood serve` with no size: a pool of experts where one card is too small for the model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from draftwood.cli.server_own_pool import _CHOSEN
from draftwood.cli.server_pool import _PLACING, Wanted, _settings, flags
from draftwood.engine.engine import ModelInfo, probe_model
from draftwood.errors import UnsupportedError
from draftwood.load import devices, experts, memory

from tests.unit.model_of_experts import DRAFTER, GIB, INFO

MODEL = replace(INFO, n_ctx_train=262_144)


class Pool:
    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("LLAMA_ARG_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(memory, "available", lambda: 64 * GIB)
    monkeypatch.setattr(experts, "make_pool", lambda part: Pool())


@pytest.fixture
def machine(monkeypatch):
    """machine(GiB that are free on each card, backend="CUDA", kind="GPU")."""

    def make(*free: float, backend: str = "CUDA", kind: str = "GPU") -> None:
        found = [
            {"name": f"{backend}{i}", "backend": backend, "type": kind, "memory_free": int(n * GIB)}
            for i, n in enumerate(free)
        ]
        monkeypatch.setattr(devices, "cards", lambda: list(range(len(found))))
        monkeypatch.setattr(devices, "describe", lambda card: found[card])

    return make


def made(*arguments: str, info: ModelInfo = MODEL, **options: Any) -> list[str]:
    return flags(Wanted(**{**dict.fromkeys(Wanted.__slots__), **options}), list(arguments), info)


def left(free: int, n_ctx: int) -> int:
    return free * GIB - experts.beside(MODEL, {**_settings([], MODEL), "n_ctx": n_ctx})


@pytest.mark.parametrize(
    ("free", "n_ctx"), [(23, 262_144), (20, 131_072), (16, 65_536), (14, 32_768), (12, 8192), (9, 8192)]
)
def test_a_model_larger_than_its_card_gets_what_is_free(machine, capsys, free, n_ctx):
    """The context is halved until experts have two fifths of that."""
    machine(free)
    assert made() == [
        *("--expert-vram", str(left(free, n_ctx))),
        *(() if n_ctx == 262_144 else ("-c", str(n_ctx))),
    ]
    assert n_ctx == 8192 or left(free, n_ctx) >= 0.4 * free * GIB > left(free, 2 * n_ctx)
    said = capsys.readouterr().err
    takes = (free * GIB - left(free, n_ctx) + MODEL.expert_bytes) / GIB
    assert said.startswith(
        f"draftwood: this model takes {takes:.1f} GiB with a context of {n_ctx} tokens, "
        f"and CUDA0 has {free}.0 GiB free: "
    )
    assert "% of its experts get a slot there, and all lie in host memory. --vram" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("given", [("-c", "32768"), ("--kv-unified-per-slot", "8192")])
def test_a_context_that_was_chosen_stays(machine, given):
    machine(14)
    assert made(*given) == ["--expert-vram", str(left(14, 32768))]


@pytest.mark.parametrize("free", [80, 26])
def test_a_card_that_holds_all_has_none(machine, capsys, free):
    """With a shorter context, which --fit finds."""
    machine(free)
    assert left(26, 262_144) < MODEL.expert_bytes < left(26, 8192)
    assert made() == []
    assert capsys.readouterr().err == ""


def test_a_card_without_room_for_the_rest_has_none(machine):
    machine(6)
    assert made() == []


def test_other_machines_have_none(machine):
    machine()
    assert made() == []
    machine(12, backend="Vulkan")
    assert made() == []
    machine(12, 12)
    assert made() == []
    machine(12, kind="integrated GPU")
    assert made() == []


@pytest.mark.parametrize("flag", [*_CHOSEN, *_PLACING])
def test_who_places_the_model_has_none(machine, monkeypatch, flag):
    machine(14)
    assert made()
    assert made(flag, "1") == []
    monkeypatch.setenv({**_CHOSEN, **_PLACING}[flag], "1")
    assert made() == []


@pytest.mark.parametrize(
    ("layers", "expected"), [("auto", True), ("all", True), ("99", True), ("40", False), ("x", False)]
)
def test_layers_elsewhere(machine, monkeypatch, layers, expected):
    machine(14)
    assert bool(made("-ngl", layers)) is expected
    monkeypatch.setenv("LLAMA_ARG_N_GPU_LAYERS", layers)
    assert bool(made()) is expected


def test_sizes_that_were_given(machine, monkeypatch):
    machine(14)
    assert made(expert_vram="6GiB") == ["--expert-vram", str(6 * GIB)]
    assert made("--expert-vram", "6GiB") == []
    monkeypatch.setenv("LLAMA_ARG_EXPERT_VRAM", "6GiB")
    assert made() == []


def test_models_without_experts_and_without_a_file(machine):
    machine(14)
    assert made(info=replace(MODEL, n_experts=0, expert_bytes=0)) == []
    assert flags(Wanted(None, None, None, None), ["-hf", "a/b"], None) == []


def test_memory_that_cannot_hold_all_experts(machine, monkeypatch, capsys):
    machine(14)
    monkeypatch.setattr(memory, "available", lambda: 12 * GIB)
    assert made() == []
    said = capsys.readouterr().err
    assert "a pool keeps all experts in host memory, 16.0 GiB, and 12.0 GiB are free" in said
    assert said.endswith(": llama-server places experts (--fit)\n")


def test_a_card_that_can_have_none_says_why(machine, monkeypatch, capsys):
    def refuse(part):
        assert part.device == "CUDA0"
        raise UnsupportedError("found a card without virtual memory management", hint="none")

    machine(14)
    monkeypatch.setattr(experts, "make_pool", refuse)
    assert made() == []
    assert capsys.readouterr().err == (
        "draftwood: found a card without virtual memory management: llama-server places experts (--fit)\n"
    )


def test_heat_and_guesses_go_with_it(machine, tmp_path):
    machine(14)
    heat = str(tmp_path / "heat.json")
    assert made(expert_heat=heat, expert_guess=False)[-3:] == ["--expert-heat", heat, "--no-expert-guess"]
    with pytest.raises(Exception, match="is a folder; expected a file"):
        made(expert_heat=str(tmp_path))


def test_what_a_header_does_not_say(machine):
    machine(14)
    assert made(info=replace(MODEL, kv_values=0)) == []
    assert made(info=replace(MODEL, n_ctx_train=0)) == []


def test_a_tokens_experts_are_the_least(machine, capsys):
    """Mixtral's two of eight are a quarter of all."""
    mixtral = replace(MODEL, n_experts=8, n_experts_used=2, file_bytes=28 * GIB, expert_bytes=23 * GIB)
    machine(12)
    assert made(info=mixtral) == []
    assert capsys.readouterr().err == ""


def test_slots_with_a_cache_each_share_the_context(machine, capsys):
    machine(12)
    assert made("-np", "8")[2:] == ["-c", "65536"]
    assert "with a context of 65536 tokens (8192 a slot)" in capsys.readouterr().err
    assert made("-np", "8", "-kvu")[2:] == ["-c", "8192"]
    assert "8192 tokens, and" in capsys.readouterr().err


def test_types_of_the_cache(machine):
    machine(14)
    (_, n_bytes), (_, q8) = made("-c", "65536"), made("-c", "65536", "-ctk", "q8_0", "-ctv", "q8_0")
    assert int(q8) - int(n_bytes) == 2 * 11_000 * 65536 - int(34 / 32 * 11_000 * 65536)
    (_, f32) = made("-c", "65536", "--cache-type-k", "f32")
    assert int(n_bytes) - int(f32) == 11_000 * 65536


def test_a_drafter_has_a_cache_too(machine):
    machine(14)
    info = probe_model(str(DRAFTER))
    assert info.kv_values > 0
    drafted, alone = (int(made("-c", "65536", *flags)[1]) for flags in (("-md", str(DRAFTER)), ()))
    assert alone - drafted == info.file_bytes + 2 * info.kv_values * 65536
    assert made("-hfd", "a/b") == []


@pytest.mark.parametrize("flags", [("-hf", "a/b"), ("-mu", "http://x/y")])
def test_a_model_that_is_downloaded(machine, flags):
    machine(14)
    assert made("-m", "model.gguf", *flags) == []


def test_a_file_of_flags(machine, tmp_path):
    machine(14)
    path = tmp_path / "config" / "llama.cpp" / "config.ini"
    path.parent.mkdir(parents=True)
    path.write_text("n-cpu-moe = 4\n")
    assert made() == []
