"""load/placement.py: when a card holds the whole model, and its token embeddings."""

from __future__ import annotations

import pytest
from draftwood.load import placement

from tests.unit.model_of_experts import GIB, INFO


@pytest.mark.parametrize(
    ("n_gpu_layers", "expected"),
    [(-1, True), (-5, True), (0, False), (40, False), (41, False), (42, True), (99, True)],
)
def test_all_layers_are_those_of_the_file_and_the_output(n_gpu_layers, expected):
    assert (INFO.n_layers, INFO.n_layer_nextn) == (40, 1)
    assert placement.all_layers(n_gpu_layers, INFO) is expected


@pytest.mark.parametrize(("n_cpu_moe", "rows"), [(0, 0), (3, 3), (41, 41), (99, 41), (10**9, 41)])
def test_experts_of_more_layers_than_there_are(n_cpu_moe, rows):
    array = placement.tensor_overrides(n_cpu_moe, None, n_layers=INFO.n_layers + INFO.n_layer_nextn)
    assert (0 if array is None else len(array) - 1) == rows
    assert len(placement.tensor_overrides(10**9, None)) < 1000


@pytest.mark.parametrize(
    ("n_gpu_layers", "free", "backend", "on_card"),
    [
        (-1, 80, "CUDA", True),
        (99, 80, "CUDA", True),
        (41, 80, "CUDA", False),
        (99, 22, "CUDA", False),
        (99, 80, "Vulkan", False),
    ],
)
def test_embeddings_lie_on_the_card_that_holds_all(monkeypatch, n_gpu_layers, free, backend, on_card):
    found = {"name": f"{backend}0", "backend": backend, "memory_free": free * GIB}
    monkeypatch.setattr(placement, "cards", lambda: [0])
    monkeypatch.setattr(placement, "describe", lambda _: found)
    expected = {r"^token_embd\.weight$": "CUDA0"} if on_card else {}
    assert placement.embeddings_on_card(n_gpu_layers, INFO, lambda: 24 * GIB) == expected
