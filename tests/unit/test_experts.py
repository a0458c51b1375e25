"""Sizes as users write them, how many experts fit, and heat files."""

from __future__ import annotations

import json

import pytest
from draftwood.engine.engine import ModelInfo
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import experts

GIB = 1 << 30
FIELDS = {"n_experts": 256, "n_experts_used": 8, "n_expert_layers": 40, "expert_bytes": 16 * GIB}
INFO = ModelInfo("qwen35moe", 1, True, 700, 21 * GIB, **FIELDS)


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        (0, 0), (7, 7), ("7", 7), ("7B", 7), ("6GiB", 6 * GIB), ("6 gib", 6 * GIB), ("1.5GiB", 3 * GIB // 2),
        ("900 MB", 900_000_000), ("2KB", 2000), (" 3MiB ", 3 << 20),
    ],
)  # fmt: skip
def test_sizes(given, n_bytes):
    assert experts.to_bytes(given, "expert_vram") == n_bytes


@pytest.mark.parametrize("given", [-1, True, 1.5, "", "6 apples", "GiB", "-6GiB", "6GiB6", [], "1e9", "nan"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(OptionError, match=r"expert_vram is .*; expected a number of bytes"):
        experts.to_bytes(given, "expert_vram")


@pytest.mark.parametrize(
    ("given", "slots"),
    [("0", 8), ("511MiB", 8), ("576MiB", 9), ("1GiB", 16), ("8GiB", 128), ("16383MiB", 255)],
)
def test_slots_are_what_fits(given, slots):
    found = experts.share(INFO, given, {})
    assert found == experts.Share(slots, "CPU")


@pytest.mark.parametrize("given", ["16GiB", "1000GiB"])
def test_a_card_that_holds_all_needs_no_pool(given):
    assert experts.share(INFO, given, {}) is None


def test_nobody_asked():
    assert experts.share(INFO, None, {}) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_experts": 0, "n_expert_layers": 0, "expert_bytes": 0}, "this file has no experts"),
        ({"n_experts": 2048}, "2048 experts; a pool holds 1024 at most"),
    ],
)
def test_models_without_a_pool_are_refused(changes, text):
    fields = {name: getattr(INFO, name) for name in INFO.__slots__} | changes
    with pytest.raises(UnsupportedError, match=text):
        experts.share(ModelInfo(**fields), "6GiB", {})


def test_several_cards_need_a_choice(monkeypatch):
    monkeypatch.setattr(experts, "cards", lambda: [1, 2])
    monkeypatch.setattr(experts, "describe", lambda card: {"name": f"CUDA{card - 1}"})
    with pytest.raises(UnsupportedError, match="found 2 cards; a pool of experts lies on one"):
        experts.share(INFO, "6GiB", {"n_gpu_layers": -1})
    one = {"n_gpu_layers": -1, "split_mode": 0, "main_gpu": 1}
    assert experts.share(INFO, "1GiB", one) == experts.Share(16, "CUDA1")
    # a stage of two layers, 0.8 GiB, comes first where as much is left
    assert experts.share(INFO, "8GiB", one) == experts.Share(115, "CUDA1", stage=True)
    with pytest.raises(OptionError, match="main_gpu is 7; expected 0 to 1"):
        experts.share(INFO, "6GiB", {**one, "main_gpu": 7})


@pytest.mark.parametrize("given", [7, object(), ["a"]])
def test_what_is_no_path_is_refused(given):
    with pytest.raises(OptionError, match=r"expert_heat is .*; expected a path"):
        experts.heat_path(given)


def heat_file(path, **changes):
    path.write_text(json.dumps({"schema": 1, "n_experts": 256, "heat": {"3": [5] * 256}} | changes))
    return str(path)


def test_heat_is_read(tmp_path):
    assert experts.read_heat(heat_file(tmp_path / "heat.json"), INFO) == {3: [5] * 256}


def test_a_file_to_come_is_no_heat(tmp_path):
    assert experts.read_heat(str(tmp_path / "none.json"), INFO) == {}
    assert experts.read_heat(None, INFO) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"heat": {"40": [5] * 256}}, {"heat": {"-1": [5] * 256}}, {"heat": {"3": [5] * 255}},
        {"heat": {"3": [-1] * 256}}, {"heat": {"3": [1 << 32] * 256}}, {"heat": {"x": [5] * 256}},
        {"heat": 7},
        {"heat": {"3": 7}}, {"heat": {"3": ["a"] * 256}},
    ],
)  # fmt: skip
def test_heat_of_another_model_warns(tmp_path, changes):
    with pytest.warns(UserWarning, match="is no heat file of a model with 40 layers of 256 experts"):
        assert experts.read_heat(heat_file(tmp_path / "heat.json", **changes), INFO) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_what_is_no_heat_file_warns(tmp_path, text):
    path = tmp_path / "heat.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match="is no heat file"):
        assert experts.read_heat(str(path), INFO) == {}
