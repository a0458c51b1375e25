"""What one CUDA card gets of a hybrid mixture of experts: load/preparation.py with a card that is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from draftwood.engine.engine import ModelInfo
from draftwood.errors import UnsupportedError
from draftwood.load import experts, files, memory, placement, preparation, steps
from draftwood.options import Options

from tests.unit.model_of_experts import GIB, INFO

NOTHING = dict.fromkeys(
    ("tensor_buft_overrides", "rpc_servers", "vram", "expert_vram", "expert_heat", "expert_guess"), None
) | {"n_cpu_moe": 0, "expert_readahead": False}

Prepare = Callable[..., preparation.Preparation]


class _NoPool:
    """As on a card without virtual memory management."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError("CUDA0 cannot hold a part of the experts: it maps no memory")


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """prepare(info, free bytes): what a plain Llama of that model is loaded with."""
    monkeypatch.setattr(experts, "ExpertPool", _NoPool)
    monkeypatch.setattr(memory, "available", lambda: 64 * GIB)
    monkeypatch.setattr(placement, "buffer_types", lambda: {"CPU": 1, "CUDA0": 2})
    monkeypatch.setattr(preparation, "without_tree_ops", list)
    for module in (experts, placement, preparation, steps):
        monkeypatch.setattr(module, "cards", lambda: [0])

    def make(info: ModelInfo, free: int, **kwargs: Any) -> preparation.Preparation:
        card = {"name": "CUDA0", "backend": "CUDA", "memory_free": free}
        for module in (experts, placement):
            monkeypatch.setattr(module, "describe", lambda _: card)
        monkeypatch.setattr(files, "checked_model", lambda _: info)
        asked = {"n_gpu_layers": -1, "n_ctx": 4096, "n_batch": 512, "n_ubatch": 512, **kwargs}
        return preparation.prepare(
            "model.gguf", Options("off"), dict(NOTHING), None, asked, {*asked, "lora_path"}
        )

    return make


def overrides(prepared: preparation.Preparation) -> list[bytes]:
    return [row.pattern for row in prepared.tensor_overrides or () if row.pattern]


def test_a_card_with_room_for_all_gets_steps_that_are_queued(prepare: Prepare) -> None:
    prepared = prepare(INFO, 80 * GIB)
    assert overrides(prepared) == [rb"^token_embd\.weight$"]
    assert prepared.plan.queue_steps


def test_where_embeddings_stay_on_the_host_there_is_no_room_for_steps(prepare: Prepare) -> None:
    """The model leaves too little of the card."""
    prepared = prepare(replace(INFO, expert_bytes=0), 22 * GIB)
    assert overrides(prepared) == []
    assert not prepared.plan.queue_steps


def test_a_card_that_cannot_have_a_pool_gets_what_fits(prepare: Prepare) -> None:
    with pytest.warns(UserWarning, match=r"it maps no memory: the CPU computes the experts of \d+ layers"):
        prepared = prepare(INFO, 16 * GIB)
    assert prepared.pool is None
    assert not prepared.plan.queue_steps
    assert 0 < len(overrides(prepared)) < INFO.n_layers
    assert all(b"exps" in pattern for pattern in overrides(prepared))
