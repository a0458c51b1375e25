"""How fast a model would be with other parts of its experts on the card: two pools timed, others replayed.

A model writes one text over a small pool and over a large one, several times each, without guesses. Its
choices are recorded once and replayed for every size (expert_replay.py). A step takes a part of its own and a
part for each missing expert; the two timed sizes give both. Must not know: terminals.
Test: tests/model/test_expert_plan.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwood.bench.expert_replay import misses
from draftwood.bench.modes import vocabulary
from draftwood.engine.engine import ModelInfo
from draftwood.engine.routing import RoutingRecorder
from draftwood.errors import OptionError

_WARM = 16  # tokens of the reply that are not timed
_REPEATS = 3
_LEAST_SLOWER = 1.02  # that the small pool must be, to say what a missing expert costs


@dataclass(frozen=True, slots=True)
class Text:
    """What a model wrote, and the experts that it chose."""

    n_experts: int
    expert_bytes: float
    """Of one expert of one layer."""
    choices: np.ndarray
    """i32[n_layers, n_tokens, k]."""
    warm: int
    """Tokens of `choices` that were not timed: the prompt and the reply's first."""

    def missing(self, slots: int) -> float:
        """Return the experts that a token misses over pools of so many slots a layer."""
        if slots >= self.n_experts:
            return 0.0
        n_tokens = int(self.choices.shape[1]) - self.warm
        return misses(self.choices, self.n_experts, slots, self.warm) / n_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step takes, in milliseconds."""

    step_ms: float
    """With all experts on the card."""
    miss_ms: float
    """One missing expert more."""


def row(text: Text, costs: Costs | None, slots: int) -> dict[str, Any]:
    """Return what a token takes with so many slots a layer; without costs no times."""
    missing = text.missing(slots)
    wanted = text.choices.shape[0] * text.choices.shape[2]
    found = {
        "hit_rate_without_guesses": 1.0 - missing / wanted,
        "bytes_missed_a_token": round(missing * text.expert_bytes),
    }
    if costs is None:
        return found
    token_ms = costs.step_ms + costs.miss_ms * missing
    return {**found, "token_ms": token_ms, "tokens_per_second": 1e3 / token_ms}


def fit(text: Text, times: Sequence[tuple[int, float]]) -> Costs | None:
    """Return what two (slots, milliseconds a token) come to; None where they do not tell."""
    (most_missing, slow), (least_missing, fast) = sorted(
        ((text.missing(slots), ms) for slots, ms in times), reverse=True
    )
    if most_missing == least_missing or slow < _LEAST_SLOWER * fast:
        return None
    miss_ms = (slow - fast) / (most_missing - least_missing)
    step_ms = fast - miss_ms * least_missing
    return Costs(step_ms, miss_ms) if step_ms > 0 else None


def check_room(model: str, prompt: bytes, n_tokens: int, n_ctx: int) -> None:
    """Refuse a text that does not fit into the context. Reads the vocabulary alone. Errors: OptionError."""
    with vocabulary(model) as known:
        n_prompt = len(known.tokenize(prompt, add_bos=True, special=False))
    if n_prompt == 0:
        raise OptionError("--prompt is empty; expected a text", hint="leave it out for the built-in one")
    if n_prompt + _WARM + n_tokens > n_ctx:
        raise OptionError(
            f"found a prompt of {n_prompt} tokens and {_WARM} + {n_tokens} to write; expected them to fit "
            f"into {n_ctx}",
            hint=f"--n-ctx {n_prompt + _WARM + n_tokens}, or a smaller --tokens",
        )


def measure(
    model: str, pools: Sequence[int], prompt: bytes, n_tokens: int, **settings: Any
) -> tuple[Text, list[tuple[int, float]]]:
    """Write the text over pools of these bytes; return it and each pool's slots of a layer and ms a token.

    settings: of `Llama`. Errors: those of `Llama`.
    """
    from draftwood.llama import Llama

    settings |= {"speculation": "off", "expert_guess": False, "verbose": False}
    text: Text | None = None
    times: list[tuple[int, float]] = []
    for n_bytes in sorted(pools):
        with closing(Llama(model, expert_vram=n_bytes, **settings)) as llm:
            ids = llm.tokenize(prompt)
            tokens, token_ms = _timed(llm, ids, n_tokens)
            pool = llm._pool  # None: all fit, after all
            times.append((pool.n_slots if pool else llm._info.n_experts, token_ms))
            text = text or _recorded(llm, tokens, len(ids) + _WARM - 1)
    assert text is not None
    return text, times


def _timed(llm: Any, prompt: list[int], n_tokens: int) -> tuple[list[int], float]:
    """Write greedily after the prompt; return all tokens and the median of the repeats' ms a token."""
    means = []
    for _ in range(_REPEATS):
        llm.reset()
        tokens, begin = list(prompt), 0.0
        with closing(llm.generate(prompt, temp=0.0)) as stream:
            for i, token in enumerate(stream, 1):
                tokens.append(token)
                if i == _WARM:
                    begin = time.perf_counter()
                if i == _WARM + n_tokens:
                    break
        means.append(1e3 * (time.perf_counter() - begin) / n_tokens)
    return tokens, statistics.median(means)


def _recorded(llm: Any, tokens: list[int], warm: int) -> Text:
    info: ModelInfo = llm._info
    recorder = RoutingRecorder(
        llm.model, n_experts=info.n_experts, n_experts_used=info.n_experts_used, n_threads=llm.n_threads
    )
    one = info.expert_bytes / (info.n_experts * info.n_expert_layers)
    return Text(info.n_experts, one, recorder.choices(tokens[:-1]), warm)  # the last one chose nothing yet
