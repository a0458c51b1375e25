"""Where the logits of a position are, for `sample` by hand.

Rows stand in the newest decode only. llama.cpp ends the process where a row has no logits, and takes the last
one of the newest decode for the position asked for. After a round, that is another position's.
Must not know: sampling, text. Tests: tests/model/generate/test_rows.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.errors import OptionError

if TYPE_CHECKING:
    from draftwood.generate.generation import Generation


def found(llm: Generation, idx: int | None) -> int:
    """Return the row of position idx, or of the last one, for llama_get_logits_ith.

    A round is committed. Errors: OptionError if there is no such row.
    """
    position = llm.n_tokens - 1 if idx is None else idx
    row = _row(llm, position)
    if row is None or not _native.llama_get_logits_ith(llm._ctx.ctx, row):
        raise _missing(llm, position)
    return row


def _newest(llm: Generation) -> tuple[int, int] | None:
    """Return (row, n_past) of the engine's newest row, sampled or not; None if it has none."""
    engine = llm._engine
    if engine is None:
        return None
    engine.commit()
    row = engine.row()
    if row is None and engine.n_past == llm.n_tokens and (last := engine.last_row()) is not None:
        return last, llm.n_tokens
    return row


def _row(llm: Generation, position: int) -> int | None:
    newest = _newest(llm)
    if newest is None:
        back = llm.n_tokens - 1 - position
        return None if back < 0 or llm.n_tokens <= 0 or _is_stale(llm) else -1 - back
    row, n_past = newest
    if n_past != llm.n_tokens:
        return None
    if position == n_past - 1:
        return row
    start = llm._rows_from
    return position - start if start is not None and start <= position < n_past else None


def _is_stale(llm: Generation) -> bool:
    """Tell whether the newest decode, by others or by upstream's loop, did not end at `n_tokens`."""
    end = int(_native.llama_memory_seq_pos_max(llm._ctx.memory, 0)) + 1
    return end > llm.n_tokens or llm._rowless == llm.n_tokens


def _missing(llm: Generation, position: int) -> OptionError:
    if not 0 <= position < llm.n_tokens:
        return OptionError(
            f"found sample() at position {position}; the context holds {llm.n_tokens} tokens; "
            "expected a position with logits",
            hint="eval(tokens) first" if llm.n_tokens <= 0 else f"an idx of 0 to {llm.n_tokens - 1}",
        )
    hint = "eval(tokens) up to there once more, or leave idx out"
    if position < llm.n_tokens - 1 and not llm._logits_all:
        hint = "leave idx out, or pass logits_all=True to Llama()"
    elif position == llm.n_tokens - 1:
        hint = "set n_tokens back by one and eval() the last token once more, or reset() and eval() them all"
    return OptionError(
        f"found no logits of position {position} of {llm.n_tokens}; expected one of the newest eval()",
        hint=hint,
    )
