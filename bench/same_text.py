"""What the runs that hold text with drafting against text without have in common: prompts, texts, verdict.

Used by exact.py, exact_experts.py and exact_trees.py. Must not know: who drafts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood._llama_cpp.llama_grammar import LlamaGrammar

import models

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "seeded": {"temp": 0.8, "top_k": 40, "top_p": 0.95},
    "penalties": {"temp": 0.6, "repeat_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.3},
}
TEMPERATURES = {SAMPLING[kind]["temp"]: SAMPLING[kind] for kind in ("greedy", "seeded")}
SEED = 20260
CACHES = {"F16": llama_cpp.GGML_TYPE_F16, "Q8_0": llama_cpp.GGML_TYPE_Q8_0}
LONGEST = 8
"""Tokens of the longest draft, or of a tree's longest path."""
N_PROMPTS = 3
TEXT = 420
"""Tokens of each of a model's plain texts."""
FEW = 3
"""Tokens of the texts on which n-grams draft for random weights, which else repeat nothing."""


@dataclass(slots=True)
class Tally:
    """Sums over all cells."""

    tokens: int = 0
    mismatches: int = 0
    cells: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: int, mismatches: int, lengths: Counter[int]) -> None:
        """Count one cell."""
        self.tokens += tokens
        self.mismatches += mismatches
        self.cells += 1
        self.accepted_lengths += lengths

    def print_verdict_of_all(self, only: str | None) -> int:
        """The same, where every accepted length must have occurred; one model alone need not have all."""
        lengths = range(0 if only else LONGEST + 1)
        missing = [depth for depth in lengths if self.accepted_lengths[depth] == 0]
        words = f"accepted lengths that never occurred: {', '.join(map(str, missing))}"
        return self.print_verdict([words] if missing else [])

    def print_verdict(self, faults: Sequence[str] = ()) -> int:
        """Print what is wrong and, last, the sums as JSON; return the exit status."""
        histogram = {str(depth): self.accepted_lengths[depth] for depth in range(LONGEST + 1)}
        for fault in faults:
            print(fault)
        sums = {
            "tokens": self.tokens,
            "mismatches": self.mismatches,
            "excused": 0,
            "cells": self.cells,
            "accepted_lengths": histogram,
        }
        print(json.dumps(sums))
        return 1 if self.mismatches or faults or not self.cells else 0


def accepted_lengths(llm: Llama) -> Counter[int]:
    """Return how many rounds accepted exactly 0, 1, 2... drafts."""
    stats = llm.speculation_stats
    assert stats is not None
    reached = [stats.rounds, *stats.accepted_by_depth, 0]
    return +Counter({depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)})


def generate(
    llm: Llama,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: dict[str, Any],
    *,
    goes_back: bool = False,
    loop: Callable[..., Generator[int, Any, None]] = Llama.generate,
) -> list[int]:
    """Return n_tokens tokens after `prompt` with a fixed seed; goes_back: from a context that held more."""
    llm.reset()
    for other in (prompt, [*prompt, *prompt[:9]]) if goes_back else ():
        list(zip(llm.generate(other, temp=0.0), range(7), strict=False))
    llm.set_seed(SEED)
    if "grammar" in sampling:  # a grammar keeps its place in the text
        sampling = {**sampling, "grammar": LlamaGrammar.from_string(sampling["grammar"], verbose=False)}
    stream = loop(llm, prompt, **sampling)
    tokens = [token for _, token in zip(range(n_tokens), stream, strict=False)]
    stream.close()
    return tokens


def cases(
    shapes: Sequence[str], only: str | None, n_tokens: int
) -> Iterator[tuple[str, Path, bool, list[list[int]], int]]:
    """Yield name, path, whether it is trained, prompts, tokens a text: tiny-moe's forms, then random shapes.

    only: what a name must hold; None: any. Random models write half of `n_tokens`.
    """
    made: dict[str, Callable[[], Path]] = {
        f"tiny-moe-{kind}": partial(models.tiny_moe, kind) for kind in ("F16", *models.QUANTISED)
    }
    made |= {shape: partial(models.synthetic, shape) for shape in shapes}
    for name, make in made.items():
        if only and only not in name:
            continue
        path = make()
        if name.startswith("tiny-moe"):
            yield name, path, True, trained_prompts(path), n_tokens
        else:
            yield name, path, False, random_prompts(2), n_tokens // 2


def trained_prompts(path: Path) -> list[list[int]]:
    """Return a held-out prompt of 128 tokens of every category."""
    llm = Llama(str(path), vocab_only=True, verbose=False)
    prompts = [ids for _, ids in models.heldout_prompts(llm, 1, 128)]
    llm.close()
    return prompts


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of random tokens, of several lengths (one longer than the 64 exact rows)."""
    dice = random.Random(SEED)
    return [[dice.randrange(256) for _ in range(length)] for length in (7, 40, 130, 64)[:count]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model and what plain decode gave on it."""

    name: str
    path: Path
    trained: bool
    prompts: list[list[int]]
    sampling: dict[float, dict[str, Any]]
    plain: dict[float, list[list[int]]]
    """By temperature, as the sampling; i32[TEXT] after each prompt."""

    @property
    def least(self) -> int:
        """Tokens that a cell has at least."""
        return 200 if self.trained else 50


def settings(
    threads: int | None, threads_batch: int | None = None, *, gpu_layers: int = 0, cache: str = "F16"
) -> dict[str, Any]:
    """Return the arguments that every Llama of a run is loaded with; threads None: llama-cpp-python's own.

    threads_batch: of prompts and verifies, where it is another number. cache: type of keys and values, one of
    CACHES; a quantised one takes flash attention.
    """
    quantised = (
        {} if cache == "F16" else {"type_k": CACHES[cache], "type_v": CACHES[cache], "flash_attn": True}
    )
    return {
        "n_gpu_layers": gpu_layers,
        "n_ctx": 1024,
        "verbose": False,
        "n_threads": threads,
        "n_threads_batch": threads_batch or threads,
        **quantised,
    }


def load(name: str, path: Path, common: dict[str, Any], *, few: bool = False) -> Model:
    """Generate a model's plain texts; common: `settings`, few: of FEW tokens, prompts included."""
    trained = name.startswith("tiny-moe")
    prompts = trained_prompts(path) if trained else random_prompts(N_PROMPTS)
    assert len(prompts) == N_PROMPTS
    sampling = TEMPERATURES
    if few:
        prompts = [[token % FEW for token in ids] for ids in prompts]
        sampling = {t: {**TEMPERATURES[t], "logits_processor": [only_few]} for t in TEMPERATURES}
    llm = Llama(str(path), speculation="off", **common)
    plain = {t: [generate(llm, ids, TEXT, sampling[t]) for ids in prompts] for t in sampling}
    llm.close()
    return Model(name, path, trained, prompts, sampling, plain)


def only_few(_: Any, scores: Any) -> Any:
    """Return f32[n_vocab] logits that leave the first FEW tokens."""
    left = np.full_like(scores, -np.inf)
    left[:FEW] = scores[:FEW]
    return left
