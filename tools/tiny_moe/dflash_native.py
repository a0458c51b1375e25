"""Feed a DFlash drafter through llama.cpp's C API, as common/speculative.cpp at the pin does.

The reference for whoever writes that feeding elsewhere: `Drafter.inject`, `Drafter.logits`, `Drafter.draft`.
Must not know: torch, how results are judged. Arrays are row-major f32.
Test: tests/model/test_dflash_parity.py.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tools.tiny_moe.native import Rows, lib

_dll: Any = lib._lib
_context = lib.llama_context_p_ctypes
_tap = _dll._Z30llama_set_embeddings_layer_inpP13llama_contextjb  # llama-ext.h has C++ linkage
_tap.argtypes, _tap.restype = [_context, ctypes.c_uint32, ctypes.c_bool], None
_tapped = _dll._Z30llama_get_embeddings_layer_inpP13llama_contextj
_tapped.argtypes, _tapped.restype = [_context, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)
_layers = _dll._Z28llama_model_target_layer_idsPK11llama_model
_layers.argtypes, _layers.restype = [lib.llama_model_p_ctypes], ctypes.POINTER(ctypes.c_int32)
_n_layers = _dll._Z30llama_model_target_layer_ids_nPK11llama_model
_n_layers.argtypes, _n_layers.restype = [lib.llama_model_p_ctypes], ctypes.c_uint32

MROPE = 8  # LLAMA_ROPE_TYPE_MROPE


def _load(path: Path) -> Any:
    p = lib.llama_model_default_params()
    p.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), p)
    if not model:
        raise RuntimeError(f"`{path}` does not load")
    return model


def _meta(model: Any, key: str) -> float | None:
    text = ctypes.create_string_buffer(64)
    n = lib.llama_model_meta_val_str(model, key.encode(), text, len(text))
    return float(text.value) if n >= 0 else None


def _make(model: Any, n_ctx: int, threads: int, other: Any, kv_type: int | None, betas: bool = True) -> Any:
    p = lib.llama_context_default_params()
    for side in ("fast", "slow") if betas else ():  # the pin's loader leaves them at 32 and 1
        if (beta := _meta(model, f"dflash.rope.scaling.yarn_beta_{side}")) is not None:
            setattr(p, f"yarn_beta_{side}", beta)
    p.n_ctx = p.n_batch = p.n_ubatch = n_ctx  # not causal: a batch must fit one ubatch
    p.n_threads = p.n_threads_batch = threads
    p.ctx_other = other
    if kv_type is not None:
        p.type_k = p.type_v = kv_type
    ctx = lib.llama_init_from_model(model, p)
    if not ctx:
        raise RuntimeError("no context could be made for the model")
    return ctx


class Drafter:
    """Hold target and drafter, each with a context of n_ctx tokens, one sequence.

    kv_type: ggml type of keys and values, by default F16; betas: take YaRN's betas from the drafter's file.
    """

    def __init__(
        self,
        target: Path,
        drafter: Path,
        n_ctx: int = 1024,
        threads: int = 1,
        kv_type: int | None = None,
        betas: bool = True,
    ) -> None:
        lib.llama_backend_init()
        self.target_model, self.model = _load(target), _load(drafter)
        self.target = _make(self.target_model, n_ctx, threads, None, kv_type)
        self.ctx = _make(self.model, n_ctx, threads, self.target, kv_type, betas)
        self.taps = _layers(self.model)[: _n_layers(self.model)]
        for layer in self.taps:
            _tap(self.target, layer, True)
        lib.llama_set_causal_attn(self.ctx, False)
        vocab = lib.llama_model_get_vocab(self.model)
        self.mask, self.n_vocab = lib.llama_vocab_mask(vocab), lib.llama_vocab_n_tokens(vocab)
        self.width = lib.llama_model_n_embd(self.target_model)
        self.positions = 4 if lib.llama_model_rope_type(self.model) == MROPE else 1

    def __enter__(self) -> Drafter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        lib.llama_free(self.ctx)  # before the context whose tensors it borrows
        lib.llama_free(self.target)
        lib.llama_model_free(self.model)
        lib.llama_model_free(self.target_model)

    def clear(self) -> None:
        """Forget both contexts."""
        for ctx in (self.target, self.ctx):
            lib.llama_memory_clear(lib.llama_get_memory(ctx), True)

    def read(self, ids: list[int], first: int = 0) -> tuple[Rows, Rows]:
        """Decode ids at positions first.. with the target: features [T, taps*width], logits [T, vocab]."""
        self._decode(self.target, np.arange(first, first + len(ids)), tokens=ids)
        taps = [
            np.ctypeslib.as_array(_tapped(self.target, k), shape=(len(ids), self.width)) for k in self.taps
        ]
        return np.concatenate(taps, 1), self._logits(self.target, len(ids))

    def inject(self, features: Rows, positions: Any) -> None:
        """Put keys and values of features [T, taps*width] at positions [T] into the drafter's cache."""
        at = np.asarray(positions)
        if self.positions == 4:  # section-major: T of each of four positions, the last zero
            at = np.concatenate([at, at, at, 0 * at])
        self._decode(self.ctx, at, features=features)

    def logits(self, last: int, at: int, depth: int) -> Rows:
        """Run the block [last, mask * depth] at positions at..; return logits [depth + 1, vocab].

        Row i >= 1 guesses the token at position at + i. The block's cells are freed again.
        """
        tokens = [last, *[self.mask] * depth]
        self._decode(self.ctx, np.arange(at, at + depth + 1), tokens=tokens)
        out = self._logits(self.ctx, depth + 1)
        self.cut(at)
        return out

    def cut(self, at: int) -> None:
        """Take positions at.. out of the drafter's cache: the block, or features of rejected tokens."""
        if not lib.llama_memory_seq_rm(lib.llama_get_memory(self.ctx), 0, at, -1):
            raise RuntimeError(f"the drafter's cache cannot be cut at position {at}")

    def draft(self, last: int, at: int, depth: int) -> list[int]:
        """Return `depth` greedy drafts that follow token `last` at position `at`."""
        return [int(i) for i in self.logits(last, at, depth)[1:].argmax(-1)]

    def rounds(self, ids: list[int], features: Rows, first: int, depth: int) -> list[tuple[int, int]]:
        """Draft a known text round by round from token `first` on: (newest token's index, tokens emitted).

        features [T, taps*width] of the text; only those before the newest token are injected.
        """
        self.cut(0)
        out, fed, t = [], 0, first
        while t + depth + 1 < len(ids):
            self.inject(features[fed:t], range(fed, t))  # what the round before has accepted
            fed = t
            right = [d == ids[t + 1 + i] for i, d in enumerate(self.draft(ids[t], t, depth))]
            out.append((t, 1 + (right.index(False) if False in right else depth)))
            t += out[-1][1]
        return out

    def _logits(self, ctx: Any, n: int) -> Rows:
        return np.ctypeslib.as_array(lib.llama_get_logits(ctx), shape=(n, self.n_vocab)).copy()

    def _decode(
        self, ctx: Any, positions: Any, tokens: list[int] | None = None, features: Rows | None = None
    ) -> None:
        n = len(tokens) if tokens is not None else len(features)  # type: ignore[arg-type]
        zero = (lib.llama_seq_id * 1)(0)
        batch = lib.llama_batch()
        keep: list[Any] = [
            (lib.llama_pos * len(positions))(*(int(p) for p in positions)),
            (ctypes.c_int32 * n)(*[1] * n),
            (ctypes.POINTER(lib.llama_seq_id) * n)(*[zero] * n),
            (ctypes.c_int8 * n)(*[int(tokens is not None)] * n),
        ]
        batch.n_tokens = n
        batch.pos, batch.n_seq_id, batch.seq_id, batch.logits = keep
        if tokens is not None:
            batch.token = (lib.llama_token * n)(*tokens)
        else:
            rows = np.ascontiguousarray(features, np.float32)
            keep.append(rows)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if status := lib.llama_decode(ctx, batch):
            raise RuntimeError(f"llama_decode returned {status}")
