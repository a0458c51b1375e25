"""Read tiny-moe's logits and rows out of a built libllama, through llama-cpp-python's ctypes bindings.

Uses the bindings inside draftwood, or a plain `llama_cpp` where draftwood is not installed (its library is
named by LLAMA_CPP_LIB_PATH). Must not know: torch, how results are judged. Arrays are row-major f32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

try:
    from draftwood._llama_cpp import llama_cpp as lib
    from draftwood._llama_cpp import llama_cpp_ext as ext
except ImportError:
    from llama_cpp import llama_cpp as lib
    from llama_cpp import llama_cpp_ext as ext

Rows = npt.NDArray[np.float32]
CONTEXT = 1024


class Native:
    """Hold a model with a trunk context and an MTP context of CONTEXT tokens on `threads` threads."""

    def __init__(self, path: Path, threads: int = 2) -> None:
        lib.llama_backend_init()
        p = lib.llama_model_default_params()
        p.n_gpu_layers, p.load_mtp = 0, True
        self.model = lib.llama_model_load_from_file(str(path).encode(), p)
        if not self.model:
            raise RuntimeError(f"`{path}` does not load; expected a tiny-moe GGUF written by export.py")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab, self.width = lib.llama_vocab_n_tokens(self.vocab), lib.llama_model_n_embd(self.model)
        self.trunk, self.draft = (self._context(t, threads) for t in (0, lib.LLAMA_CONTEXT_TYPE_MTP))

    def _context(self, kind: int, threads: int) -> int:
        p = lib.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_ubatch = CONTEXT
        p.n_threads = p.n_threads_batch = threads
        p.ctx_type = kind
        ctx = lib.llama_init_from_model(self.model, p)
        if not ctx:
            raise RuntimeError("no context could be made for the model")
        ext.llama_set_embeddings_nextn(ctx, True, False)
        return ctx  # type: ignore[no-any-return]

    def __enter__(self) -> Native:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for ctx in (self.draft, self.trunk):
            lib.llama_free(ctx)
        lib.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of plain text: special tokens in it are text, nothing is added."""
        raw = text.encode()
        out = (lib.llama_token * (len(raw) + 8))()
        n = lib.llama_tokenize(self.vocab, raw, len(raw), out, len(out), False, False)
        return list(out[:n])

    def _decode(self, ctx: int, ids: list[int], first: int, h: Rows | None) -> tuple[Rows, Rows]:
        n = len(ids)
        batch = lib.llama_batch_init(n, self.width if h is not None else 0, 1)
        tokens = (lib.llama_token * n)(*ids)
        if h is not None:  # such a batch has no token array of its own, and must not free ours
            batch.token = tokens
        try:
            if h is not None:
                np.ctypeslib.as_array(batch.embd, shape=(n, self.width))[:] = h
            for i in range(n):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = ids[i], first + i, 1, 1
                batch.seq_id[i][0] = 0
            batch.n_tokens = n
            if status := lib.llama_decode(ctx, batch):
                raise RuntimeError(f"llama_decode returned {status}")
        finally:
            if h is not None:
                batch.token = ctypes.POINTER(lib.llama_token)()
            lib.llama_batch_free(batch)
        logits = np.ctypeslib.as_array(lib.llama_get_logits(ctx), shape=(n, self.n_vocab)).copy()
        rows = np.ctypeslib.as_array(ext.llama_get_embeddings_nextn(ctx), shape=(n, self.width)).copy()
        return rows, logits

    def read(self, ids: list[int]) -> tuple[Rows, Rows, Rows, Rows]:
        """Read T ids from an empty cache: rows [T, width], logits [T, vocab], then the MTP block's.

        The MTP block's are [T-1, ...]: it reads token t+1 with this library's own row t, at position t+1.
        """
        for ctx in (self.trunk, self.draft):
            lib.llama_memory_clear(lib.llama_get_memory(ctx), True)
        rows, logits = self._decode(self.trunk, ids, 0, None)
        return rows, logits, *self._decode(self.draft, ids[1:], 1, rows[:-1])
