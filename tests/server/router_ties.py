"""How near a router was to another choice: batches that round otherwise may then get another expert's row.

Must not know: servers, what any test expects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from draftwood._llama_cpp import llama_cpp as native

from tests.model.rig import Rig
from tests.ops import ggml_graph as ggml

CALLBACK = native.ggml_backend_sched_eval_callback


class RouterMargins:
    """By how much the last expert that each router chose won over the next one."""

    def __init__(self, model: Path | str) -> None:
        fields = gguf.GGUFReader(model).fields
        family = fields["general.architecture"].contents()
        self._model = model
        self._n_experts, self._top_k = (
            int(fields[f"{family}.{name}"].contents()) for name in ("expert_count", "expert_used_count")
        )
        self._seen: list[np.ndarray] = []

    def of(self, tokens: Sequence[int]) -> np.ndarray:
        """Return f32[n_tokens], logits: the least margin of all layers. The CPU decodes them in one batch."""
        self._seen = []
        callback = CALLBACK(self._read)
        n = len(tokens)
        rig = Rig(self._model, n_ctx=n, n_ubatch=n, flash=True, engine=False, cb_eval=callback)
        try:
            # the last layer has routers for the rows alone that give logits
            batch = native.llama_batch_init(n, 0, 1)
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            assert native.llama_decode(rig.ctx, batch) == 0
            native.llama_batch_free(batch)
        finally:
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
