"""The orthonormal Walsh-Hadamard transform in float64."""

from __future__ import annotations

import numpy as np


def transformed(x: np.ndarray, n: int) -> np.ndarray:
    """Return x [..., m n] with each n values transformed; n: a power of two, or 0 for none."""
    if n == 0:
        return x
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, n)
    return (blocks @ matrix / np.sqrt(n)).reshape(x.shape)
