"""What draftwood reads of a model as large as Qwen3.5-35B-A3B, for tests without its file.

Must not know: what any test expects.
"""

from __future__ import annotations

from pathlib import Path

from draftwood.engine.engine import ModelInfo

DRAFTER = Path(__file__).resolve().parents[2] / "models" / "tiny-moe" / "dflash-f16.gguf"
GIB = 1 << 30
INFO = ModelInfo(
    "qwen35moe",
    1,
    True,
    700,
    21 * GIB,
    n_layers=40,
    n_vocab=250_000,
    kv_values=11_000,
    n_experts=256,
    n_experts_used=8,
    n_expert_layers=40,
    expert_bytes=16 * GIB,
)
