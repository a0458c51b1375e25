"""What a request's sampling parameters let the engine leave out.

Must not know: models, tokens, the engine. Test: tests/unit/test_sampling.py.
"""

from __future__ import annotations

from typing import Any


def tokens_enough(
    *,
    top_k: int,
    temp: float,
    repeat_penalty: float,
    frequency_penalty: float,
    presence_penalty: float,
    mirostat_mode: int,
    logits_processor: Any,
    grammar: Any,
    **_: Any,
) -> int:
    """Return how many of a row's best tokens decide what its sampler chooses; 0: all of them.

    Source: the chain of llama-cpp-python's `Llama._init_sampler`: processors, penalties and grammar may
    raise any token, then comes greedy, or top-k before everything else.
    """
    if logits_processor is not None or grammar is not None:
        return 0
    if repeat_penalty != 1.0 or frequency_penalty != 0.0 or presence_penalty != 0.0:
        return 0
    if temp == 0.0:
        return 1
    return max(0, top_k) if temp > 0.0 and mirostat_mode == 0 else 0
