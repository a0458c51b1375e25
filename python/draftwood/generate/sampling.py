"""What a request's sampling parameters may be, and what they let the engine leave out.

Must not know: models, tokens, the engine. Test: tests/unit/test_sampling.py.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from draftwood.errors import OptionError

_FLOATS = {
    **{"temp": 0.8, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0, "tfs_z": 1.0, "repeat_penalty": 1.0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
}
"""Parameters of llama-cpp-python that are real numbers, and their defaults."""
_LARGEST = 3.4e38  # of a C float


def require_finite(sampling: dict[str, Any]) -> None:
    """Refuse nan, infinities and what is no number. Errors: OptionError.

    A negative temperature is llama-cpp-python's way to draw from the logits as they are.
    """
    for name in _FLOATS.keys() & sampling.keys():
        value = sampling[name]
        try:
            sound = math.isfinite(value) and abs(value) <= _LARGEST
        except (TypeError, OverflowError):
            sound = False
        if not sound:
            spoken = "temperature" if name == "temp" else name
            raise OptionError(
                f"{spoken} is {value!r:.80}; expected a finite number",
                hint=f"{spoken}={_FLOATS[name]}, or leave it out",
            )


def as_top_k(top_k: Any) -> int:
    """Return top_k; 0, all tokens, for more than a C int holds. Errors: OptionError for what is no number."""
    try:
        number = operator.index(top_k)
    except TypeError:
        raise OptionError(
            f"top_k is {top_k!r:.80}; expected a whole number", hint="top_k=40, or 0 for all tokens"
        ) from None
    return number if 0 <= number < 1 << 31 else 0


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
