"""Text with drafting held against plain decoding on a GPU, where batches round otherwise than single rows.

Plain decoding is led along the text (teacher-forced), so that one flip does not make all that follows differ.
A token that it would not have chosen is excused only if its logit lies under the best by less than rounding
can move two logits, and how much that is gets measured in the same run. Must not know: who drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp as native


@dataclass(slots=True)
class Verdict:
    """Sums over texts; a mismatch is a token that neither equals plain decode's nor is excused."""

    margin: float
    tokens: int = 0
    excused: int = 0
    mismatches: int = 0
    widest: float = 0.0
    """Greatest distance of a token that differed, in logits."""

    @property
    def share_excused(self) -> float:
        """Of all tokens."""
        return self.excused / max(1, self.tokens)

    def __str__(self) -> str:
        """Say it in one line."""
        return (
            f"{self.tokens} tokens, {self.mismatches} mismatches, {self.excused} excused"
            f" ({100 * self.share_excused:.3f} %), margin {self.margin:.4g}, widest {self.widest:.4g}"
        )


def row(llm: Llama, i: int = -1) -> np.ndarray:
    """Return logits f32[n_vocab] of row i of the last decode."""
    pointer = native.llama_get_logits_ith(llm.ctx, i)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def rows_along(llm: Llama, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Return f32[len(tokens), n_vocab]: what plain decoding, token by token, thinks before each of them."""
    llm.reset()
    llm.eval(prompt)
    rows = []
    for token in tokens:
        rows.append(row(llm))
        llm.eval([token])
    return np.array(rows)


def measured_margin(llm: Llama, prompt: Sequence[int], tokens: Sequence[int], n: int = 8) -> float:
    """Return twice the most that a logit near the top moves when its row is one of n instead of alone."""
    alone = rows_along(llm, prompt, tokens)
    worst = 0.0
    llm.reset()
    llm.eval(prompt)
    engine = llm._engine
    assert engine is not None
    for first in range(0, len(tokens) - n, n):
        engine.propose_given(tokens[first], tokens[first + 1 : first + n])
        engine.verify()
        for i in range(n):
            expected, found = alone[first + 1 + i], row(llm, i)
            best = np.argsort(expected)[-8:]
            worst = max(worst, float(np.abs(found[best] - expected[best]).max()))
        for i in range(n):
            if engine.next(_greedy(llm)) != tokens[first + 1 + i]:
                break
        engine.commit()
        llm.n_tokens = engine.n_past
        if (
            engine.n_past != len(prompt) + first + n
        ):  # a sample was another token: the rest would be another text
            break
    return 2.0 * worst


def _greedy(llm: Llama) -> int:
    if not hasattr(_greedy, "sampler"):
        _greedy.sampler = native.llama_sampler_init_greedy()  # type: ignore[attr-defined]
    sampler: int = _greedy.sampler  # type: ignore[attr-defined]
    return sampler


def judge(verdict: Verdict, rows: np.ndarray, tokens: Sequence[int]) -> None:
    """Add a text to the verdict, given what plain decoding thinks before each of its tokens."""
    chosen = np.asarray(tokens)
    best = rows.argmax(axis=1)
    distance = rows[np.arange(len(chosen)), best] - rows[np.arange(len(chosen)), chosen]
    differs = best != chosen
    verdict.tokens += len(chosen)
    verdict.excused += int((differs & (distance <= verdict.margin)).sum())
    verdict.mismatches += int((differs & (distance > verdict.margin)).sum())
    verdict.widest = max(verdict.widest, float(distance[differs].max(initial=0.0)))
