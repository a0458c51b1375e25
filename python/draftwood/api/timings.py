"""The `timings` of a completion, in llama-server's names, with what drafting did for this request.

Must not know: text. Test: tests/model/test_api_timings.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftwood.generate.host import Host


@dataclass(slots=True)
class Latest:
    """What is known of the last completion; None before the first."""

    timings: dict[str, Any] | None = None
    usage: Callable[[], dict[str, int]] | None = None
    """Counts its tokens, of one that is still streamed, too."""


class Timer:
    """Times one request: prompt up to the first token, then the tokens."""

    def __init__(self, llm: Host, n_prompt: int) -> None:
        self._llm, self._n_prompt = llm, n_prompt
        self._stats = llm.speculation_stats
        self._n = 0
        self._start = self._first = time.perf_counter()

    def tick(self) -> None:
        """Count a token."""
        if self._n == 0:
            self._first = time.perf_counter()
        self._n += 1

    def result(self) -> dict[str, Any]:
        """Return counts, milliseconds and rates; `speculation` names the drafter, `draft_n` counts drafts.

        `prompt_n` are the prompt's tokens that were evaluated, `cache_n` those that the context still held.
        Without an engine (exact=False, nothing drafted) every prompt token counts as evaluated.
        """
        end = time.perf_counter()
        before, after = self._stats, self._llm.speculation_stats
        evaluated = self._n_prompt
        drafted = accepted = rounds = 0
        if before is not None and after is not None:
            evaluated = min(after.prompt_tokens - before.prompt_tokens, self._n_prompt)
            drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
            rounds = after.rounds - before.rounds
        return {
            "cache_n": self._n_prompt - evaluated,
            **_rates("prompt", evaluated, self._first - self._start),
            **_rates("predicted", self._n, end - self._first),
            "draft_n": drafted,
            "draft_n_accepted": accepted,
            "rounds": rounds,
            "tokens_per_round": (accepted + rounds) / rounds if rounds else 0.0,
            "speculation": self._llm.speculation,
        }


def _rates(name: str, n: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": n,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds > 0 else 0.0,
    }
