"""How a prompt is evaluated: in which pieces, from where, and where a later one may part from it.

Must not know: contexts, engines.
Tests: tests/model/generate/test_prompt_batches.py, tests/model/test_checkpoints.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood._llama_cpp import llama_cpp as _native

_OPENING = 32  # tokens a template may put after the mark of the turn to write


def chunks(tokens: list[int], n_batch: int, n_ubatch: int) -> list[list[int]]:
    """Cut tokens where llama.cpp would: into batches, and those into ubatches.

    With recurrent snapshots it would cut elsewhere (split_equal keeps a tail together), and a prompt's
    rounding would then depend on whether drafting is on.
    """
    cut: list[list[int]] = []
    for start in range(0, len(tokens), n_batch):
        batch = tokens[start : start + n_batch]
        cut += [batch[i : i + n_ubatch] for i in range(0, len(batch), n_ubatch)]
    return cut


def common_prefix(held: Any, prompt: list[int]) -> int:
    """Return how many tokens of `prompt` the context holds: i32[n] `held`, from the first on."""
    n = min(len(held), len(prompt))
    differs = np.flatnonzero(np.asarray(held[:n]) != np.asarray(prompt[:n], dtype=np.intc))
    return int(differs[0]) if len(differs) else n


def last_turn(prompt: list[int], vocab: Any) -> int:
    """Return how many tokens stay when this turn is followed, or answered anew.

    That is all but the last, which gives the logits; in a chat all up to the mark of the turn that is about
    to be written, since templates put less after it (no open <think>) once it is history.
    """
    last = len(prompt) - 1
    n_vocab = _native.llama_vocab_n_tokens(vocab)
    for n in range(last, max(1, last - _OPENING), -1):  # a BOS marks no turn
        token = prompt[n - 1]
        if not 0 <= token < n_vocab:
            return 0  # the engine refuses it with a clear error
        if _native.llama_vocab_is_control(vocab, token):
            return n
    return last
