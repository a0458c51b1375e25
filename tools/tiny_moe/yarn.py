"""Rotary frequencies with YaRN in float64: what drafters are trained with and what llama.cpp is held against.

Scores keep 1/sqrt(d); the magnitude factor goes into cos and sin of queries and keys alike, as in
transformers. Must not know: torch, GGUF. Test: tests/unit/test_dflash_yarn.py.
Source: Peng et al. 2023, YaRN, sections 3.2 to 3.4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Yarn:
    """Name a context extension: `factor` times `original` positions."""

    factor: float = 64.0
    original: int = 4096
    beta_fast: float = 32.0  # turns within `original` above which a frequency is kept
    beta_slow: float = 1.0  # turns below which it is divided by the factor


def frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> tuple[npt.NDArray[np.float64], float]:
    """Return radians per position of each of dim/2 pairs, and the factor of cos and sin."""
    pair = np.arange(dim // 2, dtype=np.float64)
    plain = theta ** (-2 * pair / dim)
    if yarn is None:
        return plain, 1.0

    def pair_of(turns: float) -> float:
        return dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    kept = 1 - np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
    magnitude = 1.0 if yarn.factor <= 1 else 0.1 * math.log(yarn.factor) + 1
    return plain * kept + plain / yarn.factor * (1 - kept), magnitude


def rotate(
    x: npt.NDArray[np.float64], positions: npt.NDArray[np.int64], theta: float, yarn: Yarn | None = None
) -> npt.NDArray[np.float64]:
    """Rotate rows x [T, heads, dim] at positions [T] (half-split pairs)."""
    inverse, magnitude = frequencies(x.shape[-1], theta, yarn)
    angle = positions[:, None, None] * inverse
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
