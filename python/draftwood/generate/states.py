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
from draftwood.generate.host import Host

_MODEL = "draftwood_model"


def model_of(llm: Host) -> str:
    """Return what tells this model from others: a digest of its metadata, parameters and size."""
    sizes = (_native.llama_model_n_params(llm.model), _native.llama_model_size(llm.model), llm.n_vocab())
    known = [llm.metadata, *sizes]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def mark(llm: Host, state: Any) -> Any:
    """Note in a state which model it was saved from."""
    setattr(state, _MODEL, model_of(llm))
    return state


def check(llm: Host, state: Any) -> None:
    """Refuse a state of another model, or of more tokens than the context holds. Errors: StateError."""
    if not hasattr(state, "llama_state"):
        raise StateError(
            f"found a state of type {type(state).__name__}; expected a LlamaState",
            hint="save_state() returns one",
        )
    saved_by = getattr(state, _MODEL, None)  # upstream's own states say nothing
    n_vocab = state.scores.shape[-1]
    if n_vocab != llm.n_vocab() or saved_by not in (None, model_of(llm)):
        raise StateError(
            "found a state that was saved from another model; expected one of this model",
            hint="keep states and caches apart by model",
        )
    n = state.n_tokens
    if n > llm.n_ctx():
        raise StateError(
            f"found a state of {n} tokens; this context holds {llm.n_ctx()}",
            hint=f"pass n_ctx={n} or more to Llama()",
        )


def load(llm: Host, state: Any) -> None:
    """Make `llm` what it was when `state` was saved.

    Errors: StateError (RuntimeError) for a state that llama.cpp cannot read; `llm` is reset then.
    """
    n = state.n_tokens
    data = (ctypes.c_uint8 * len(state.llama_state)).from_buffer_copy(state.llama_state)
    read = _native.llama_state_set_data(llm.ctx, data, len(data))
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
    llm.n_tokens = n
    llm.set_seed(state.seed)
