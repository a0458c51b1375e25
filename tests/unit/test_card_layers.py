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
    machine(needed)
    assert card_layers("dense", KWARGS) == -1
    machine(*[(needed + experts.SPARE) // 2 + 1] * 2)
    assert card_layers("dense", KWARGS) == -1


@pytest.mark.parametrize(
    ("missing", "n_cards", "words"),
    [
        (
            1,
            1,
            "this model takes .* are free on CUDA0: every layer stays on the CPU; n_gpu_layers=N puts N",
        ),
        (0, 2, "this model takes .* are free on CUDA0 and CUDA1: every"),  # each needs a share of the rest
    ],
)
def test_too_large_a_model_stays_and_says_so(machine, missing, n_cards, words):
    machine(*[(experts.beside(DENSE, KWARGS) - missing) // n_cards] * n_cards)
    with pytest.warns(UserWarning, match=words):
        assert card_layers("dense", KWARGS) == 0


def test_experts_need_no_room_on_a_card_that_is_alone(machine):
    rest = experts.beside(INFO, KWARGS)
    machine(rest)
    assert card_layers("experts", KWARGS) == -1
    machine(rest - 1)
    with pytest.warns(UserWarning, match="this model without its experts takes"):
        assert card_layers("experts", KWARGS) == 0
    machine(rest, rest)
    with pytest.warns(UserWarning, match="this model takes"):
        assert card_layers("experts", KWARGS) == 0


@pytest.mark.parametrize("size", ["vram", "expert_vram"])
def test_a_pool_is_on_one_card(machine, size):
    machine(100 * GIB, 100 * GIB)
    with pytest.warns(UserWarning, match="a pool of experts lies on one card"):
        assert card_layers("experts", {**KWARGS, size: "6GiB"}) == 0


def test_what_a_header_does_not_say_is_no_room(machine, monkeypatch):
    machine(100 * GIB)
    monkeypatch.setattr(module, "checked_model", lambda _: replace(DENSE, kv_values=0))
    with pytest.warns(UserWarning, match="cache"):
        assert card_layers("dense", KWARGS) == 0


def test_other_cards_are_for_the_user_to_name(machine):
    machine(100 * GIB, backend="Vulkan")
    assert card_layers("dense", KWARGS) == 0


def test_a_file_that_is_no_model_is_left_to_who_loads_it(machine, monkeypatch):
    def refuse(path):
        raise ModelFileError(f"{path} is no GGUF")

    machine(100 * GIB)
    monkeypatch.setattr(module, "checked_model", refuse)
    assert card_layers("text.txt", KWARGS) == 0


@pytest.mark.parametrize("wish", [{"rpc_servers": "localhost:1"}, {"expert_readahead": True}], ids=str)
def test_wishes_for_layers_elsewhere(machine, wish):
    machine(100 * GIB)
    assert card_layers("experts", {**KWARGS, **wish}) == 0
