"""load/split.py: ways to spread a model that llama.cpp would end the process on, or not load."""

from __future__ import annotations

import pytest
from draftwood import OptionError, UnsupportedError
from draftwood.load import split

ALL = {"n_gpu_layers": -1}


@pytest.fixture
def two_cards(monkeypatch):
    monkeypatch.setattr(split, "cards", lambda: [1, 2])
    monkeypatch.setattr(split, "describe", lambda card: {"backend": "CUDA"})
    monkeypatch.setattr(split, "finds", lambda card, function: False)


def test_rows_where_the_backend_has_no_such_buffers(two_cards):
    with pytest.raises(UnsupportedError, match="splits no tensor by rows") as said:
        split.check({**ALL, "split_mode": 2}, None)
    assert "split_mode=1" in str(said.value.hint)


def test_rows_where_it_has(two_cards, monkeypatch):
    asked = []
    monkeypatch.setattr(split, "finds", lambda card, function: asked.append((card, function)) or True)
    split.check({**ALL, "split_mode": 2}, None)
    assert asked == [(card, b"ggml_backend_split_buffer_type") for card in (1, 2)]


def test_tensors_over_rpc_servers():
    with pytest.raises(UnsupportedError, match="expected servers that take whole layers"):
        split.check({**ALL, "split_mode": 3}, "127.0.0.1:50052")


@pytest.mark.parametrize("n_gpu_layers", [-1, 0])
def test_tensors_without_a_card(monkeypatch, n_gpu_layers):
    monkeypatch.setattr(split, "cards", list)
    with pytest.raises(UnsupportedError, match="found no card beside split_mode=3"):
        split.check({"n_gpu_layers": n_gpu_layers, "split_mode": 3}, None)


def test_tensors_without_flash_attention(two_cards):
    with pytest.raises(UnsupportedError, match="found flash_attn=False beside split_mode=3"):
        split.check({**ALL, "split_mode": 3, "flash_attn": False}, None)


@pytest.mark.parametrize("mode", [4, -1, "layer", None, 1.5])
def test_modes_that_are_none(mode):
    with pytest.raises(OptionError, match=r"split_mode is .*; expected 0 to 3"):
        split.check({"split_mode": mode}, None)


@pytest.mark.parametrize(
    ("kwargs", "servers"),
    [
        ({**ALL, "split_mode": 1}, "127.0.0.1:50052"),
        ({**ALL, "split_mode": 3}, None),
        ({**ALL, "split_mode": 0}, None),
        (ALL, None),
        ({"n_gpu_layers": 0, "split_mode": 2}, None),
        ({"split_mode": 2}, None),
    ],
)
def test_what_runs(two_cards, kwargs, servers):
    split.check(kwargs, servers)
