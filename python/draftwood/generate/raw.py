"""Decodes and cuts by llama.cpp's own names on a `Llama`'s context, as guidance makes them.

Recurrent layers hold the state after their last token only. A cut before it fails in llama.cpp; guidance
does not look, and its next decode fails. Here the cut is made: from a checkpoint, or by evaluating the kept
tokens again. For that, the tokens of plain decodes are noted in `input_ids`. This holds for the names in the
package `llama_cpp` and for models with recurrent layers. Those in its module `llama_cpp.llama_cpp` stay the
library's. Must not know: text, requests.
Tests: tests/model/generate/test_raw.py, tests/compat/test_examples.py.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import draftwood._llama_cpp as _package
from draftwood._llama_cpp import llama_cpp as _native
from draftwood.generate.turns import context_taken

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftwood.generate.generation import Generation

_watched: weakref.WeakValueDictionary[int, Generation] = weakref.WeakValueDictionary()


def apply() -> None:
    """Put the two functions in the package; again is harmless."""
    _package.llama_decode = decode
    _package.llama_memory_seq_rm = seq_rm


def watch(llm: Generation) -> Callable[[], None]:
    """Look at decodes and cuts of `llm`. Returns what ends that; call it before the context is freed."""
    addresses = (_address(llm._ctx.ctx), _address(llm._ctx.memory))
    for address in addresses:
        _watched[address] = llm

    def end() -> None:
        for address in addresses:
            _watched.pop(address, None)

    return end


@functools.wraps(_native.llama_decode)
def decode(ctx: Any, batch: Any, /) -> int:
    """llama_decode. Plain decodes after the context's end run on the engine, which can come back to them.

    Errors: those of `Llama.eval`, where the library returns a number.
    """
    llm = _watched.get(_address(ctx))
    if llm is None:
        return int(_native.llama_decode(ctx, batch))
    with context_taken(llm):
        tokens = _continuing(llm, batch)
        if not tokens:
            return int(_native.llama_decode(ctx, batch))
        start = llm.n_tokens
        all_logits = _logits(batch)
        fits = len(tokens) <= _native.llama_n_ubatch(ctx)
        if llm._engine is not None and fits and all_logits is not None:
            llm._decoding(llm._engine.eval, tokens, start, all_logits=all_logits)
        elif (status := int(_native.llama_decode(ctx, batch))) != 0:
            return status
        llm.input_ids[start : start + len(tokens)] = tokens
        llm.n_tokens = start + len(tokens)
        llm._requires_eval = llm._engine is None
        return 0


@functools.wraps(_native.llama_memory_seq_rm)
def seq_rm(mem: Any, seq_id: int, p0: int, p1: int, /) -> bool:
    """llama_memory_seq_rm. An end of the context goes, however far back it begins.

    Errors: those of `Llama.eval`, if kept tokens are evaluated again.
    """
    llm = _watched.get(_address(mem))
    if llm is None:
        return bool(_native.llama_memory_seq_rm(mem, seq_id, p0, p1))
    with context_taken(llm):
        kept = _kept(llm, max(p0, 0)) if seq_id <= 0 and (p1 < 0 or p1 >= llm.n_tokens) else None
        if kept is None:
            return bool(_native.llama_memory_seq_rm(mem, seq_id, p0, p1))
        if len(kept) < llm.n_tokens or not kept:
            _keep(llm, kept)
        return True


def _kept(llm: Generation, n_keep: int) -> list[int] | None:
    """Return the first n_keep tokens, or all if there are fewer; None: they are unknown."""
    if n_keep == 0:
        return []
    tokens = llm.input_ids[: min(n_keep, llm.n_tokens)]
    pictured = bool((tokens < 0).any())  # its positions are no tokens
    return None if pictured or not _knows_its_tokens(llm) else [int(token) for token in tokens]


def _keep(llm: Generation, tokens: list[int]) -> None:
    """Cut the context to `tokens`, its first ones, and let later cuts come back here."""
    engine = llm._engine
    reached = engine.reach(len(tokens)) if engine is not None else 0
    if engine is not None and reached > 0 and engine.trim(reached):
        llm.n_tokens, llm._requires_eval, llm._rowless = reached, True, reached
    else:
        reached = 0
        llm.reset()
    if reached < len(tokens):
        llm.eval(tokens[reached:])
    if engine is not None:
        engine.checkpoint()


def _knows_its_tokens(llm: Generation) -> bool:
    """Tell whether the memory holds `input_ids` up to `n_tokens` and nothing else."""
    if llm._engine is not None:
        llm._engine.commit()
    return int(_native.llama_memory_seq_pos_max(llm._ctx.memory, 0)) + 1 == llm.n_tokens


def _continuing(llm: Generation, batch: Any) -> list[int]:
    """Return the tokens of a batch that goes on with sequence 0 where the context ends; none for another."""
    n, start = batch.n_tokens, llm.n_tokens
    if n <= 0 or not batch.token or start + n > llm._n_ctx or not _knows_its_tokens(llm):
        return []
    if batch.pos and batch.pos[:n] != list(range(start, start + n)):
        return []
    if batch.seq_id and any(batch.n_seq_id[i] != 1 or batch.seq_id[i][0] != 0 for i in range(n)):
        return []
    return list(batch.token[:n])


def _logits(batch: Any) -> bool | None:
    """Return whether a batch asks for all rows' logits; None: for others than all, or the last."""
    if not batch.logits:
        return False
    asked = [bool(flag) for flag in batch.logits[: batch.n_tokens]]
    if all(asked):
        return len(asked) > 1
    return False if asked[-1] and not any(asked[:-1]) else None


def _address(pointer: Any) -> int:
    return int(getattr(pointer, "value", pointer) or 0)
