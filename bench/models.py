"""The models that demo, exactness and bench run on: where they are, and how the derived ones are made.

Only tiny-moe's F16 file is committed. Its quantised forms come from llama.cpp's own quantiser, the random
ones from tools/synth_gguf.py; both land in build/models and are reused while their source is unchanged.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "build" / "models"
TINY_MOE = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"
DFLASH = TINY_MOE.with_name("dflash-f16.gguf")  # the drafter of all its forms
HELDOUT = TINY_MOE.parent / "heldout"
QUANTISED = ("Q8_0", "Q4_K_M")

sys.path.insert(0, str(ROOT / "tools"))


def tiny_moe(kind: str) -> Path:
    """Return the path of tiny-moe as "F16" (committed), "Q8_0" or "Q4_K_M" (made on first use)."""
    if not TINY_MOE.exists():
        raise SystemExit(f"{TINY_MOE.relative_to(ROOT)} is missing; it belongs to the repository")
    if kind == "F16":
        return TINY_MOE
    target = MODELS / f"tiny-moe-{kind.lower()}.gguf"
    if not _fresh(target, TINY_MOE):
        quantise(TINY_MOE, target, kind)
    return target


def synthetic(preset: str) -> Path:
    """Return the path of a random GGUF of tools/synth_gguf.py's preset."""
    from synth_gguf import PRESETS

    return synthetic_of(preset, PRESETS[preset])


def synthetic_of(name: str, spec: Any) -> Path:
    """Return the path of a random GGUF of a tools/synth SynthSpec, kept under `name`."""
    from synth_gguf import write

    MODELS.mkdir(parents=True, exist_ok=True)
    target = MODELS / f"synth-{name}.gguf"
    newest = max((ROOT / "tools" / "synth").glob("*.py"), key=lambda path: path.stat().st_mtime)
    if not _fresh(target, newest):
        write(spec, target)
    return target


def heldout_prompts(llm: Any, per_category: int, n_tokens: int) -> list[tuple[str, list[int]]]:
    """Return (category, i32[n_tokens]): how the first held-out documents that are long enough begin."""
    from draftwood.bench.prompts import encode, read

    def tokenize(text: bytes) -> list[int]:
        ids: list[int] = llm.tokenize(text, add_bos=False)
        return ids

    prompts = encode(read([HELDOUT]), tokenize, per_category, n_tokens)
    return [(prompt.category, prompt.ids) for prompt in prompts if len(prompt.ids) == n_tokens]


def quantise(source: Path, target: Path, kind: str) -> None:
    """Write `target` with llama.cpp's quantiser; kind is a llama_ftype name without its prefix."""
    from draftwood._llama_cpp import _logger, llama_cpp

    _logger.set_verbose(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    partial = target.with_suffix(".partial")
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params))
    if status != 0:
        partial.unlink(missing_ok=True)
        raise SystemExit(f"llama.cpp's quantiser returned {status} for {source.name} as {kind}")
    partial.replace(target)


def _fresh(target: Path, source: Path) -> bool:
    return target.exists() and target.stat().st_mtime >= source.stat().st_mtime
