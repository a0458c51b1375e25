"""Who gets room for steps that are queued on a card: load/steps.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from draftwood.load import steps
from draftwood.options import Options, Plan

HYBRID = SimpleNamespace(architecture="qwen35moe", n_layers=40, n_layer_nextn=0)
NOWHERE = {"n_cpu_moe": 0, "tensor_buft_overrides": None, "rpc_servers": None}


def options(**changes: Any) -> Options:
    """Return options whose other fields are the defaults."""
    return SimpleNamespace(**{"speculation": "auto", "exact": True, **changes})  # type: ignore[return-value]


def plan(drafter: str) -> Plan:
    return Plan(drafter, "", 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "changes", "expected"),
    [
        ("none", {"speculation": "off"}, True),
        ("none", {}, True),
        ("mtp", {}, True),
        ("dflash", {}, True),
        ("mtp", {"speculation": "mtp"}, False),
        ("ngram", {"speculation": "ngram"}, False),
        ("given", {}, False),
        ("none", {"exact": False}, False),
    ],
    ids=str,
)
def test_texts_with_plain_steps_one_after_another_want_them(drafter, changes, expected):
    assert steps.are_wanted(plan(drafter), options(**changes), HYBRID, {}) is expected


@pytest.mark.parametrize("arguments", [{"embedding": True}, {"vocab_only": True}], ids=str)
def test_what_never_generates_does_not(arguments):
    assert not steps.are_wanted(plan("none"), options(), HYBRID, arguments)


def test_nor_do_other_architectures():
    other = SimpleNamespace(architecture="llama", n_layers=40)
    assert not steps.are_wanted(plan("none"), options(), other, {})


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), ("", True)])
def test_a_variable_turns_them_off(monkeypatch, value, expected):
    monkeypatch.setenv("DRAFTWOOD_QUEUE_STEPS", value)
    assert steps.are_wanted(plan("none"), options(), HYBRID, {}) is expected


@pytest.mark.parametrize(
    ("n_cards", "arguments", "placement", "expected"),
    [
        (1, {"n_gpu_layers": -1}, {}, True),
        (1, {"n_gpu_layers": 41}, {}, True),
        (1, {"n_gpu_layers": 40}, {}, False),
        (1, {}, {}, False),
        (0, {"n_gpu_layers": -1}, {}, False),
        (2, {"n_gpu_layers": -1}, {}, False),
        (2, {"n_gpu_layers": -1, "split_mode": 0}, {}, False),
        (0, {"n_gpu_layers": -1, "split_mode": 0}, {}, False),
        (1, {"n_gpu_layers": -1}, {"n_cpu_moe": 3}, False),
        (1, {"n_gpu_layers": -1}, {"tensor_buft_overrides": "exps=CPU"}, False),
        (1, {"n_gpu_layers": -1}, {"rpc_servers": "host:1"}, False),
        (1, {"n_gpu_layers": -1}, {"vram": "12GiB"}, True),
    ],
    ids=str,
)
def test_one_card_has_to_have_all(monkeypatch, n_cards, arguments, placement, expected):
    monkeypatch.setattr(steps, "cards", lambda: [object()] * n_cards)
    assert bool(steps.on_one_card(HYBRID, arguments, {**NOWHERE, **placement})) is expected


@pytest.mark.parametrize(("n_gpu_layers", "expected"), [(41, False), (42, True)])
def test_blocks_that_draft_count_as_layers(monkeypatch, n_gpu_layers, expected):
    monkeypatch.setattr(steps, "cards", lambda: [object()])
    with_block = SimpleNamespace(architecture="qwen35moe", n_layers=40, n_layer_nextn=1)
    assert steps.on_one_card(with_block, {"n_gpu_layers": n_gpu_layers}, NOWHERE) is expected
