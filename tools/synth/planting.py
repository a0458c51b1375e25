"""Put given values into the first elements of encoded rows. Knows types and numbers, nothing of models.

K-quants have no encoder here: only the sub-block of the given values is encoded, and the scales of its
neighbours in the same block are made as much smaller as the block's own scale got larger.
Layouts: block_q4_K and block_q6_K of llama.cpp's ggml/src/ggml-common.h.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Type

from synth.blocks import FLOATS, RANDOM, encode

MARKS = 32  # elements: one block of Q8_0, one sub-block of Q4_K, two of Q6_K
PLANTABLE = (*FLOATS, Type.Q8_0, Type.Q4_K, Type.Q6_K)


def plant(kind: Type, rows: np.ndarray, values: np.ndarray, top: float, rest: float) -> None:
    """Set the first 32 elements of each row in place, as near as `kind` can; zeros stay zero.

    rows: [n, ..] as blocks.draw returns them, their elements spread by `rest`, or all zero (`rest` 0.0);
    values: f32 [n, 32] within -top..top, `top` well over `rest`. Steps: top/7 in Q4_K, top/31 in Q6_K.
    Test: tests/unit/test_synth_routing.py (each type, and that the rest keeps its spread).
    """
    if kind is Type.Q4_K:
        _plant_q4_k(rows[:, :144], np.rint(values / top * 7).astype(np.int8), top / 7, rest)
    elif kind is Type.Q6_K:
        _plant_q6_k(rows[:, :210], np.rint(values / top * 31).astype(np.int8), top / 31, rest)
    else:
        coded = encode(kind, np.ascontiguousarray(values, np.float32))
        rows[:, : coded.shape[1]] = coded


def _plant_q4_k(block: np.ndarray, levels: np.ndarray, step: float, rest: float) -> None:
    scale = _half(step / 63)
    scales = np.concatenate(
        [block[:, 4:8] & 63, (block[:, 12:16] & 15) | ((block[:, 4:8] >> 6) << 4)], axis=1
    )
    scales = _smaller(scales, rest / RANDOM[Type.Q4_K].rms, scale).astype(np.uint8)
    scales[:, 0] = 63
    block[:, 0:2], block[:, 2:4] = _bytes(scale), _bytes(8 * scale)  # level 8 is zero
    block[:, 4:8] = block[:, 8:12] = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    block[:, 12:16] = (scales[:, 4:] & 15) * 17  # minima equal scales
    block[:, 16:48] = (block[:, 16:48] & 0xF0) | (levels + 8).astype(np.uint8)


def _plant_q6_k(block: np.ndarray, levels: np.ndarray, step: float, rest: float) -> None:
    scale, codes = _half(step / 127), (levels + 32).astype(np.uint8)
    block[:, :32] = (block[:, :32] & 0xF0) | (codes & 15)
    block[:, 128:160] = (block[:, 128:160] & 0xFC) | (codes >> 4)
    scales = _smaller(block[:, 192:208].view(np.int8), rest / RANDOM[Type.Q6_K].rms, scale).astype(np.int8)
    scales[:, :2] = 127
    block[:, 192:208] = scales.view(np.uint8)
    block[:, 208:210] = _bytes(scale)


def _smaller(scales: np.ndarray, old: float, new: float) -> np.ndarray:
    """Return the integer scales under a block scale of `new` that are worth what they were under `old`."""
    return np.rint(scales * np.float32(old / new))


def _half(value: float) -> float:
    return float(np.float16(value))


def _bytes(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).astype("<f2").tobytes(), np.uint8)
