"""How many layers commands put on CUDA cards by default: all if there is room, else none.

`Llama` itself has upstream's default, none. Must not know: contexts, commands.
Test: tests/unit/test_card_layers.py.
"""

from __future__ import annotations

from typing import Any

from draftwood.engine.engine import ModelInfo
from draftwood.errors import DraftwoodError
from draftwood.load.devices import cards, describe
from draftwood.load.experts import SPARE, beside, gib
from draftwood.load.files import checked_model
from draftwood.warn import warn

ALL = -1
# a user who names one of these has layers in mind that are not on a card, or says himself how many are
_PLACED = ("rpc_servers", "expert_readahead")


def card_layers(path: str, kwargs: dict[str, Any]) -> int:
    """Return n_gpu_layers for a model's file and arguments of `Llama`, which has none among them.

    On a card that is alone a mixture of experts needs room without its experts: what that does not hold of
    them stays in host memory (load/experts.py). Warns where cards are there and no layer goes to them. 0 for
    what is no model: who loads it says so.
    """
    found = [] if any(kwargs.get(name) for name in _PLACED) else [describe(card) for card in cards()]
    if not found or any(card["backend"] != "CUDA" for card in found):
        return 0
    try:
        info = checked_model(path)
    except DraftwoodError:
        return 0
    why_not = _why_not(info, kwargs, found)
    if why_not:
        warn(f"{why_not}: every layer stays on the CPU; n_gpu_layers=N puts N of {info.n_layers} on the card")
    return 0 if why_not else ALL


def _why_not(info: ModelInfo, kwargs: dict[str, Any], found: list[dict[str, Any]]) -> str:
    alone = len(found) == 1
    if info.kv_values == 0:
        return "what this model's cache takes is not known"
    if not alone and (kwargs.get("vram") is not None or kwargs.get("expert_vram") is not None):
        return "a pool of experts lies on one card"
    needed = beside(info, kwargs) + (0 if alone else info.expert_bytes + SPARE * (len(found) - 1))
    free = sum(card["memory_free"] for card in found)
    what = "this model without its experts" if alone and info.expert_bytes > 0 else "this model"
    where = " and ".join(card["name"] for card in found)
    return "" if needed <= free else f"{what} takes {gib(needed)}, and {gib(free)} are free on {where}"
