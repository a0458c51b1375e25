"""How many layers commands put on cards where nobody says: all of a model that has room there, else none.

`Llama` itself has upstream's default, none. Must not know: contexts, commands.
Test: tests/unit/test_card_layers.py.
"""

from __future__ import annotations

from typing import Any

from draftwood.errors import DraftwoodError
from draftwood.load.devices import cards, describe
from draftwood.load.experts import beside, gib
from draftwood.load.files import checked_model
from draftwood.warn import warn

ALL = -1


def card_layers(path: str, kwargs: dict[str, Any]) -> int:
    """Return n_gpu_layers for a model's file and arguments of `Llama`, which has none among them.

    Experts need no room: what a CUDA card alone does not hold of them stays in host memory (load/experts.py).
    Warns where cards are there and the model is too large for them. 0 with RPC servers, whose share the user
    says, and for a file that is no model, which who loads it says.
    """
    found = [] if kwargs.get("rpc_servers") else [describe(card) for card in cards()]
    if not found:
        return 0
    try:
        info = checked_model(path)
    except DraftwoodError:
        return 0
    may_pool = len(found) == 1 and found[0]["backend"] == "CUDA"
    needed = beside(info, kwargs) + (0 if may_pool else info.expert_bytes)
    free = sum(card["memory_free"] for card in found)
    if needed <= free:
        return ALL
    names = ", ".join(card["name"] for card in found)
    warn(
        f"this model takes {gib(needed)} and {names} has {gib(free)} free: every layer stays on the CPU; "
        f"n_gpu_layers=N puts N of its {info.n_layers} layers there"
    )
    return 0
