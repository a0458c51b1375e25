"""What the tests of `Llama` write text with: a prompt, a short generation, an exception of a callback's own.

Must not know: what any test expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from draftwood import Llama

from tests.model.rig import PROMPT

P = list(PROMPT)
STOCK = {"speculation": "off", "exact": False}  # llama-cpp-python's own loop and kernels


def text(llm: Llama, n: int = 20, prompt: Sequence[int] = PROMPT, **settings: Any) -> list[int]:
    """Return n tokens, greedy unless told, then `break` as any consumer does it."""
    generator = llm.generate(list(prompt), **{"temp": 0.0, **settings})
    tokens = list(itertools.islice(generator, n))
    generator.close()
    return tokens


def fresh(llm: Llama, n: int = 20, prompt: Sequence[int] = PROMPT, **settings: Any) -> list[int]:
    """Return them from an empty context."""
    llm.reset()
    return text(llm, n, prompt, **settings)


def seeded(llm: Llama, n: int, prompt: Sequence[int], seed: int | None) -> list[int]:
    """Return them drawn with a seed, or greedy without one."""
    if seed is None:
        return fresh(llm, n, prompt)
    llm.set_seed(seed)
    return fresh(llm, n, prompt, temp=0.8, top_k=40)


class Boom(Exception):
    """What a callback raises and nobody else does."""


def drain(generator: Iterator[int], into: list[int]) -> None:
    """Append all that comes, so that what came before an exception can be looked at."""
    for token in generator:
        into.append(token)
