"""Copies of pieces by the CUDA kernel, on a CPU (cuda_on_cpu.py)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops import cuda_on_cpu

SIZES = (1, 2, 4, 6, 16, 36, 100, 4096, 5000, 65535, 65536, 70000)  # bytes; large ones: the copy engine


@pytest.mark.parametrize("n", [0, 1, 3, 17, 48, 49, 100])
def test_pieces_are_copied_and_nothing_beside(rng, n):
    """Wherever they begin: inputs are aligned, a row of one need not be."""
    pieces, expected, found, given = [], [], [], []
    for i in range(n):
        n_bytes = int(rng.choice(SIZES))
        source, to = (rng.integers(0, 256, n_bytes + 64, np.uint8) for _ in range(2))
        at, start = (int(rng.choice([0, 1, 4, 16])) for _ in range(2)) if i % 2 else (16, 32)
        wanted = to.copy()
        wanted[at : at + n_bytes] = source[start : start + n_bytes]
        pieces.append((to.ctypes.data + at, source.ctypes.data + start, n_bytes))
        expected.append(wanted)
        found.append(to)
        given.append(source)
    cuda_on_cpu.copy(pieces)
    for wanted, to in zip(expected, found, strict=True):
        assert np.array_equal(wanted, to)


def test_an_empty_piece_is_none(rng):
    to = rng.integers(0, 256, 8, np.uint8)
    before = to.copy()
    cuda_on_cpu.copy([(to.ctypes.data, before.ctypes.data, 0)] * 3)
    assert np.array_equal(to, before)
