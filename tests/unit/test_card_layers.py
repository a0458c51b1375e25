"""Layers that commands put on cards: all of a model that has room there, none without cards."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from draftwood import ModelFileError
from draftwood.load import card_layers as module
from draftwood.load import experts
from draftwood.load.card_layers import card_layers

from tests.unit.model_of_experts import GIB, INFO

DENSE = replace(INFO, expert_bytes=0, n_experts=0, n_experts_used=0)
MODELS = {"dense": DENSE, "experts": INFO}
KWARGS = {"n_ctx": 4096}


@pytest.fixture
def machine(monkeypatch):
    def have(*free, backend="CUDA"):
        found = [{"name": f"{backend}{i}", "backend": backend, "memory_free": n} for i, n in enumerate(free)]
        monkeypatch.setattr(module, "cards", lambda: [*range(len(found))])
        monkeypatch.setattr(module, "describe", found.__getitem__)

    monkeypatch.setattr(module, "checked_model", MODELS.__getitem__)
    return have


@pytest.fixture(autouse=True)
def _silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_none_without_a_card(machine):
    machine()
    assert card_layers("experts", KWARGS) == 0


def test_all_where_they_have_room(machine):
    needed = experts.beside(DENSE, KWARGS)
    for free in ([needed], [needed // 2 + 1] * 2):
        machine(*free)
        assert card_layers("dense", KWARGS) == -1


def test_too_large_a_model_stays_and_says_so(machine):
    machine(experts.beside(DENSE, KWARGS) - 1)
    with pytest.warns(
        UserWarning, match="CUDA0 has .* free: every layer stays on the CPU; n_gpu_layers=N puts"
    ):
        assert card_layers("dense", KWARGS) == 0


def test_experts_need_no_room_on_one_cuda_card(machine):
    rest = experts.beside(INFO, KWARGS)
    machine(rest)
    assert card_layers("experts", KWARGS) == -1
    for free, backend in (([rest // 2] * 2, "CUDA"), ([rest], "Vulkan")):  # no pool there
        machine(*free, backend=backend)
        with pytest.warns(UserWarning, match="every layer stays on the CPU"):
            assert card_layers("experts", KWARGS) == 0


def test_a_file_that_is_no_model_is_left_to_who_loads_it(machine, monkeypatch):
    def refuse(path):
        raise ModelFileError(f"{path} is no GGUF")

    machine(100 * GIB)
    monkeypatch.setattr(module, "checked_model", refuse)
    assert card_layers("text.txt", KWARGS) == 0


def test_with_rpc_servers_the_user_says(machine):
    machine(100 * GIB)
    assert card_layers("experts", {**KWARGS, "rpc_servers": "localhost:1"}) == 0
