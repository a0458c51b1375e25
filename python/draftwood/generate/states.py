"""Saved states: `LlamaState` as upstream has it, and which model it belongs to.

Upstream loads a state of another model or context size half-way, and is unusable afterwards.
Must not know: generation. Tests: tests/model/test_api_states.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from typing import Any

from draftwood._llama_cpp import llama_cpp as _native
from draftwood.errors import StateError

_MODEL = "draftwood_model"


def model_of(llm: Any) -> str:
    """Return what tells this model from others: a digest of its metadata, parameters and size."""
    known = [llm.metadata, llm._model.n_params(), llm._model.size(), llm._n_vocab]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def mark(llm: Any, state: Any) -> Any:
    """Note in a state which model it was saved from."""
    setattr(state, _MODEL, model_of(llm))
    return state


def load(llm: Any, state: Any) -> None:
    """Make `llm` what it was when `state` was saved.

    Errors: StateError (RuntimeError) for a state of another model, of more tokens than the context holds, or
    one that llama.cpp cannot read. One refused before it is read changes nothing; else `llm` is reset.
    """
    saved_by = getattr(state, _MODEL, None)  # upstream's own states say nothing
    n_vocab = state.scores.shape[-1]
    if n_vocab != llm._n_vocab or saved_by not in (None, model_of(llm)):
        raise StateError(
            "found a state that was saved from another model; expected one of this model",
            hint="keep states and caches apart by model",
        )
    n = state.n_tokens
    if n > llm._n_ctx:
        raise StateError(
            f"found a state of {n} tokens; this context holds {llm._n_ctx}",
            hint=f"pass n_ctx={n} or more to Llama()",
        )
    data = (ctypes.c_uint8 * len(state.llama_state)).from_buffer_copy(state.llama_state)
    llm._requires_eval = True
    read = _native.llama_state_set_data(llm._ctx.ctx, data, len(data))
    if read != len(data) or read != state.llama_state_size:
        llm.reset()
        raise StateError(
            f"found a state that llama.cpp cannot read (it took {read} of {len(data)} bytes); expected one "
            "saved by this version with the same context settings; the context was reset",
            hint="save it again, with the same type_k, type_v and flash_attn (left out, it differs between "
            "GPU and CPU)",
        )
    llm.input_ids[:n] = state.input_ids[:n]
    rows = min(n, len(llm.scores), len(state.scores))
    llm.scores[:rows] = state.scores[:rows]
    llm.n_tokens, llm._seed = n, state.seed
