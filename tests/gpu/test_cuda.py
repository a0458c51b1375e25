"""Drafting on a CUDA device. `make test-gpu`; skipped with its reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.engine import build_info

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "tiny-moe-f16.gguf"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]


def greedy(speculation: str, n_tokens: int) -> tuple[list[int], Llama]:
    llm = Llama(str(MODEL), speculation=speculation, n_gpu_layers=-1, n_ctx=512, verbose=False)
    prompt = llm.tokenize(b"import os\nimport sys\n\n\ndef main():\n", add_bos=False)
    stream = llm.generate(prompt, temp=0.0)
    return [token for token, _ in zip(stream, range(n_tokens), strict=False)], llm


def test_drafting_accepts_and_continues_alike():
    """Batches round differently on a GPU, so only the beginning must be the same there (issue: CUDA)."""
    plain, _ = greedy("off", 64)
    drafted, llm = greedy("mtp", 64)
    assert drafted[:8] == plain[:8]
    assert llm.speculation_stats is not None
    assert llm.speculation_stats.accepted > 0
