"""How near a router was to another choice: batches that round otherwise may then get another expert's row.

Must not know: servers, what any test expects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaBatch
from draftwood.engine.engine import probe_model

from tests.model.rig import Rig
from tests.ops import ggml_graph as ggml

CALLBACK = native.ggml_backend_sched_eval_callback


class RouterMargins:
    """By how much the last expert that each router chose won over the next one."""

    def __init__(self, model: Path | str) -> None:
        facts = probe_model(str(model))
        self._model, self._n_experts, self._top_k = model, facts.n_experts, facts.n_experts_used
        self._seen: list[np.ndarray] = []

    def of(self, tokens: Sequence[int]) -> np.ndarray:
        """Return f32[n_tokens], logits: the least margin of all layers. The CPU decodes them in one batch."""
        self._seen = []
        callback = CALLBACK(self._read)
        n = len(tokens)
        rig = Rig(self._model, n_ctx=n, n_ubatch=n, flash=True, engine=False, cb_eval=callback)
        batch = LlamaBatch(n_tokens=n, embd=0, n_seq_max=1)
        try:
            batch.set_batch(tokens, 0, logits_all=True)  # the last layer routes rows that give logits alone
            assert native.llama_decode(rig.ctx, batch.batch) == 0
        finally:
            batch.close()
            rig.close()
        assert {len(each) for each in self._seen} == {n}, "one margin of each layer for each token"
        return np.min(self._seen, axis=0)

    def _read(self, tensor: int, ask: bool, _user: object) -> bool:
        if not ggml.base.ggml_get_name(tensor).startswith(b"ffn_moe_logits-"):
            return not ask
        if not ask:
            n_bytes = ggml.base.ggml_nbytes(tensor)
            logits = np.empty((n_bytes // 4 // self._n_experts, self._n_experts), np.float32)
            ggml.base.ggml_backend_tensor_get(tensor, logits.ctypes.data_as(ctypes.c_void_p), 0, n_bytes)
            best = -np.sort(-logits)
            self._seen.append(best[:, self._top_k - 1] - best[:, self._top_k])
        return True
