"""Whether a `Llama` may queue plain steps on a card before their token is known (dw_params.queue_steps).

The engine looks again (src/verify/target_steps.cpp). Decided here is whether the context gets the room that
it takes: a second recurrent state. Must not know: contexts, engines.
Tests: tests/unit/test_queued_plan.py, test_one_card.py, tests/gpu/test_same_text.py.
"""

from __future__ import annotations

import os
from typing import Any

from draftwood.engine.engine import ModelInfo
from draftwood.load.devices import cards
from draftwood.load.placement import all_layers
from draftwood.options import HYBRID_ARCHITECTURES, Options, Plan


def are_wanted(plan: Plan, options: Options, info: ModelInfo, kwargs: dict[str, Any]) -> bool:
    """Tell whether texts will have plain steps in a row: without a drafter, or in pauses of "auto"."""
    pauses = options.speculation == "auto" and plan.drafter != "given"
    generates = options.exact and not (kwargs.get("embedding") or kwargs.get("vocab_only"))
    wanted = os.environ.get("DRAFTWOOD_QUEUE_STEPS") != "0" and (plan.drafter == "none" or pauses)
    return wanted and generates and info.architecture in HYBRID_ARCHITECTURES


def on_one_card(info: ModelInfo, kwargs: dict[str, Any], placement: dict[str, Any]) -> bool:
    """Tell whether one card gets all layers, whether or not a pool has their experts.

    False for several cards: `placement.embeddings_on_card` leaves embeddings in host memory there.
    """
    one = len(cards()) == 1
    elsewhere = placement["n_cpu_moe"] or placement["tensor_buft_overrides"] or placement["rpc_servers"]
    return one and not elsewhere and all_layers(kwargs.get("n_gpu_layers", 0), info)


def read_one_card(n_cpu_moe: int, on_card: dict[str, str]) -> bool:
    """Tell whether a step reads nothing elsewhere: no layer's experts, and not the embedding of its token.

    n_cpu_moe: as it became. on_card: what `placement.embeddings_on_card` returned.
    """
    return n_cpu_moe == 0 and bool(on_card)
