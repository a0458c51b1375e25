"""How fast a model would be with other parts of its experts on the card: two pools timed, others replayed.

A model writes one text over a small pool and over a large one. Its choices are recorded once and replayed for
every size (expert_replay.py). A step takes a part of its own and a part for each missing expert; the two
measured sizes give both. Copies that guesses hide are in the second part. Must not know: terminals.
Test: tests/model/test_expert_plan.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from draftwood.bench.expert_replay import misses
from draftwood.engine.engine import ModelInfo
from draftwood.engine.routing import RoutingRecorder

_WARM = 16  # tokens of the reply that are not timed


@dataclass(frozen=True, slots=True)
class Run:
    """A text over a pool."""

    slots: int
    """Of each layer."""
    token_ms: float
    tokens: list[int]
    """Prompt and reply."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was measured, and what follows for other sizes."""

    info: ModelInfo
    choices: np.ndarray
    """i32[n_layers, n_tokens, k]."""
    warm: int
    """Tokens of `choices` that were not timed."""
    step_ms: float
    """A step whose experts are all on the card."""
    miss_ms: float
    """One missing expert more."""

    def row(self, slots: int) -> dict[str, Any]:
        """Return what a token costs with so many slots a layer."""
        missing = self.missing(slots)
        wanted = self.choices.shape[0] * self.choices.shape[2]
        expert_bytes = self.info.expert_bytes / (self.info.n_experts * self.info.n_expert_layers)
        token_ms = self.step_ms + self.miss_ms * missing
        return {
            "hit_rate": 1.0 - missing / wanted,
            "bytes_missed": round(missing * expert_bytes),
            "token_ms": token_ms,
            "tokens_per_second": 1e3 / token_ms,
        }

    def missing(self, slots: int) -> float:
        """Return the experts that a token misses."""
        if slots >= self.info.n_experts:
            return 0.0
        n_tokens = int(self.choices.shape[1]) - self.warm
        return misses(self.choices, self.info.n_experts, slots, self.warm) / n_tokens


def write(llm: Any, prompt: Sequence[int], n_tokens: int) -> Run:
    """Write n_tokens greedily behind a prompt, plainly, and time all but the first ones."""
    times: list[float] = []
    tokens = list(prompt)
    with closing(llm.generate(list(prompt), temp=0.0)) as stream:
        for token in stream:
            tokens.append(token)
            times.append(time.perf_counter())
            if len(times) == _WARM + n_tokens:
                break
    seconds = [late - early for early, late in pairwise(times[_WARM - 1 :])]
    return Run(llm._pool.n_slots, 1e3 * float(np.mean(seconds)), tokens)


def predict(model: str, pools: Sequence[int], prompt: bytes, n_tokens: int, **settings: Any) -> Prediction:
    """Measure two pools of these bytes of experts, each smaller than all of them.

    settings: of `Llama`. Errors: those of `Llama`.
    """
    from draftwood.llama import Llama

    runs: list[Run] = []
    choices = np.empty(0)
    for n_bytes in pools:
        with closing(Llama(model, speculation="off", expert_vram=n_bytes, verbose=False, **settings)) as llm:
            ids = llm.tokenize(prompt)
            runs.append(write(llm, ids, n_tokens))
            info = llm._info
            if len(runs) == 1:
                recorder = RoutingRecorder(
                    llm.model,
                    n_experts=info.n_experts,
                    n_experts_used=info.n_experts_used,
                    n_threads=llm.n_threads,
                )
                choices = recorder.choices(runs[0].tokens[:-1])  # the last token chose nothing yet
    return fit(info, choices, len(ids) + _WARM - 1, runs)


def fit(info: ModelInfo, choices: np.ndarray, warm: int, runs: Sequence[Run]) -> Prediction:
    """Split the times of two runs into a step's own part and one for each missing expert."""
    even = Prediction(info, choices, warm, 0.0, 0.0)
    (few, slow), (many, fast) = sorted((even.missing(run.slots), run.token_ms) for run in runs)[::-1]
    more = few - many
    miss_ms = max(0.0, (slow - fast) / more) if more > 0 else 0.0
    return Prediction(info, choices, warm, max(fast - miss_ms * many, 1e-6), miss_ms)
