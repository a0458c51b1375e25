"""Random tensor data in any supported type, from seeded raw bits. Knows types and numbers, nothing of models.

Arrays are row-major as in numpy. Bits come from `random_raw` of PCG64, whose stream numpy keeps for good, and
the steps after it are plain IEEE arithmetic: the same seed gives the same bytes on every machine and numpy.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

FLOATS = (Type.F32, Type.F16, Type.BF16)
FLOAT_BYTES = 64  # raw bytes drawn at a time for floats: 32 values of 16 bits
OWN_BLOCKS = 1 << 14  # up to this many a tensor draws bits of its own; a larger one reads its type's pool
POOL_BLOCKS = (1 << 19) - 1  # prime: the rows of a tensor that has fewer rows than this all differ


@dataclass(frozen=True, slots=True)
class Random:
    """Say how random bits of a quantised type are scaled: `rms` at scale 1, and where its half-floats go."""

    rms: float
    scales: tuple[tuple[int, float], ...]  # (byte offset, factor on the scale)


RMS_8 = (65535 / 12) ** 0.5  # of a uniform signed byte about its mean
RMS_6, RMS_5, RMS_4 = (4095 / 12) ** 0.5, (1023 / 12) ** 0.5, (255 / 12) ** 0.5
RMS_SCALE = (63 * 127 / 6) ** 0.5  # of a uniform 6-bit scale about zero
RMS_TABLE = (72768 / 16) ** 0.5  # of the 16 levels of IQ4_NL
RMS_3 = (44 / 8 * 21856 / 64) ** 0.5  # of a value of 3 bits less 4 by a scale of 6 bits less 32
RMS_ODD = 341**0.5  # of the odd numbers up to 31, which scales of 4 bits stand for
# the mean squares of the grids' levels
RMS_IQ2_XXS, RMS_IQ3_XXS, RMS_IQ3_S = 534.43**0.5 / 8, 951.64**0.5 / 4, 57.672**0.5
# Q4_K, Q5_K and Q5_1 store minima, stamped so that every sub-block is centred on zero
RANDOM = {
    Type.Q8_0: Random(RMS_8, ((0, 1.0),)),
    Type.Q5_0: Random(RMS_5, ((0, 1.0),)),
    Type.Q5_1: Random(RMS_5, ((0, 1.0), (2, -15.5))),
    Type.IQ4_NL: Random(RMS_TABLE, ((0, 1.0),)),
    Type.Q4_K: Random(RMS_SCALE * RMS_4, ((0, 1.0), (2, 7.5))),
    Type.Q5_K: Random(RMS_SCALE * RMS_5, ((0, 1.0), (2, 15.5))),
    Type.Q6_K: Random(RMS_8 * RMS_6, ((208, 1.0),)),
    Type.IQ4_XS: Random(RMS_TABLE * RMS_6, ((0, 1.0),)),
    Type.Q3_K: Random(RMS_3, ((108, 1.0),)),
    Type.IQ2_XXS: Random(RMS_IQ2_XXS * RMS_ODD, ((0, 1.0),)),
    Type.IQ3_XXS: Random(RMS_IQ3_XXS * RMS_ODD, ((0, 1.0),)),
    Type.IQ3_S: Random(RMS_IQ3_S * RMS_ODD, ((0, 1.0),)),
}
# for rows that are no multiple of 256, as in llama.cpp's src/llama-quant.cpp, tensor_type_fallback
SUBSTITUTE = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0, Type.IQ4_XS: Type.IQ4_NL}


def fitting(kind: Type, row: int) -> Type:
    """Return what rows of `row` elements take where `kind` is asked for: it, its substitute, or F16."""
    for candidate in (kind, SUBSTITUTE.get(kind, kind)):
        if row % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return Type.F16


def n_bytes(kind: Type, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape` (its last dimension a multiple of the block of `kind`)."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // elements * size


def draw(kind: Type, shape: tuple[int, ...], seed: int, name: str, *, mean: float, std: float) -> np.ndarray:
    """Draw a tensor: floats uniform about `mean` with `std`, or quantised blocks of that `std` about zero.

    Returns float32 or float16 of `shape`, or uint8 [.., row bytes] for other types. Tensors of other names
    are independent up to `OWN_BLOCKS` blocks; larger ones are stretches of one pool per seed and type.
    Test: tests/unit/test_synth_shapes.py (spread of each type, reproducibility).
    """
    if kind in FLOATS:
        return encode(kind, uniform(shape, seed, name) * np.float32(std) + np.float32(mean))
    blocks = _bits(kind, n_bytes(kind, shape) // gguf.GGML_QUANT_SIZES[kind][1], seed, name)
    stamp(kind, blocks, std)
    return blocks.reshape(*shape[:-1], -1)


def uniform(shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
    """Draw float32 of `shape`, uniform with mean 0 and variance 1 in 65,536 steps."""
    count = int(np.prod(shape, dtype=np.int64))
    codes = _bits(Type.F32, -(-count * 2 // FLOAT_BYTES), seed, name).reshape(-1).view("<i2")[:count]
    values: np.ndarray = (codes.astype(np.float32) + np.float32(0.5)) * np.float32(12**0.5 / 65536)
    return values.reshape(shape)


def encode(kind: Type, values: np.ndarray) -> np.ndarray:
    """Encode float32 values (rows a multiple of the block) as F32, F16, BF16 or Q8_0."""
    return values if kind is Type.F32 else gguf.quants.quantize(values, kind)


def decode(kind: Type, rows: np.ndarray) -> np.ndarray:
    """Decode rows of any type to float32."""
    return gguf.quants.dequantize(rows, kind)


def stamp(kind: Type, blocks: np.ndarray, std: float) -> None:
    """Set the scales of `blocks`, uint8 [.., n * block bytes], in place, so that values spread by `std`."""
    flat = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    for offset, factor in RANDOM[kind].scales:
        half = np.float16(std / RANDOM[kind].rms * factor)
        flat[:, offset : offset + 2] = np.frombuffer(half.astype("<f2").tobytes(), np.uint8)


def release() -> None:
    """Drop the pools: some 100 MB a type once a large tensor was drawn."""
    _pool.cache_clear()


def normal(shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
    """Draw float32 of `shape`, nearly normal with mean 0 and variance 1: sums of twelve uniform values."""
    values: np.ndarray = uniform((12, *shape), seed, name).sum(axis=0) / np.float32(12**0.5)
    return values


def _bits(kind: Type, n_blocks: int, seed: int, name: str) -> np.ndarray:
    """Return writable uint8 [n_blocks, block bytes] of random bits, blocks of `kind` once stamped."""
    if n_blocks <= OWN_BLOCKS:
        return _fresh(kind, n_blocks, _state(seed, name))
    with _pool_lock:
        pool = _pool(kind, seed)
    out = np.empty((n_blocks, pool.shape[1]), np.uint8)
    start, done = _state(seed, name) % POOL_BLOCKS, 0
    while done < n_blocks:
        count = min(n_blocks - done, POOL_BLOCKS - start)
        out[done : done + count] = pool[start : start + count]
        start, done = 0, done + count
    return out


_pool_lock = threading.Lock()


@lru_cache(maxsize=8)
def _pool(kind: Type, seed: int) -> np.ndarray:
    return _fresh(kind, POOL_BLOCKS, _state(seed, f"pool {kind.name}"))


def _fresh(kind: Type, n_blocks: int, state: int) -> np.ndarray:
    size = FLOAT_BYTES if kind in FLOATS else gguf.GGML_QUANT_SIZES[kind][1]
    words = np.random.PCG64(state).random_raw(-(-n_blocks * size // 8))
    blocks = words.astype("<u8", copy=False).view(np.uint8)[: n_blocks * size].reshape(n_blocks, size)
    if kind in (Type.Q4_K, Type.Q5_K):  # bytes 4..16 pack scales and minima of 6 bits: make them equal
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    return blocks


def _state(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
