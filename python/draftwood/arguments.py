"""Arguments of `Llama` that are corrected before upstream's constructor sees them, or have no effect there.

Each is said in a UserWarning that points at the caller of `Llama(...)`. Decides from the arguments alone and
what it is told of the machine. Must not know: the library, contexts.
Tests: tests/unit/test_arguments.py, tests/model/generate/test_prompt_batches.py.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Sequence
from typing import Any

# LangChain's wrappers pass them always; llama-cpp-python once had them
_SWALLOWED = {"n_parts", "f16_kv", "device", "low_vram", "mul_mat_q", "n_gqa", "rms_norm_eps"}
_said: set[str] = set()  # what is said once a process


def raise_batch(kwargs: dict[str, Any], needed: int) -> dict[str, int]:
    """Raise n_batch and n_ubatch in `kwargs` to what a draft needs, say so, and return what was raised.

    n_ubatch 0 means n_batch and stays.
    """
    small = {name: kwargs[name] for name in ("n_batch", "n_ubatch") if 0 < kwargs.get(name, needed) < needed}
    if small:
        found = ", ".join(f"{name}={value}" for name, value in small.items())
        warnings.warn(
            f"found {found}; a draft needs at least {needed}, which is used instead "
            '(speculation="off" leaves it as it is)',
            stacklevel=3,
        )
        kwargs.update(dict.fromkeys(small, needed))
    return small


def correct_langchain(kwargs: dict[str, Any], architecture: str) -> None:
    """Undo what LangChain's wrappers always pass, where it is wrong for Qwen3.5 models, and say so.

    They fix rope_freq_base=10000.0, rope_freq_scale=1.0 (Qwen3.5 was trained with 1e7; the text would be
    nonsense) and n_batch=8 (prompts eight tokens at a time). n_batch is corrected beside the other two only.
    """
    fixed = (kwargs.get("rope_freq_base"), kwargs.get("rope_freq_scale"))
    if fixed != (10000.0, 1.0) or architecture not in ("qwen35", "qwen35moe"):
        return
    kwargs.update(rope_freq_base=0.0, rope_freq_scale=0.0)
    changed = "the model file's own values are used instead"
    if kwargs.get("n_batch") == 8:
        kwargs["n_batch"] = 512
        changed += ", and n_batch=512 for 8"
    warnings.warn(
        "found rope_freq_base=10000.0 and rope_freq_scale=1.0, which LangChain passes for every model; "
        f"{changed} (pass rope_freq_base=0.0 to say so yourself)",
        stacklevel=3,
    )


def warn_of_unknown(kwargs: dict[str, Any], known: Collection[str]) -> None:
    """Say which arguments have no effect because nobody knows them; upstream swallows any name in silence."""
    unknown = [name for name in kwargs if name not in known and name not in _SWALLOWED]
    if not unknown:
        return
    found = []
    for name in unknown:
        meant = difflib.get_close_matches(name, known, 1)
        found.append(f"{name}= (did you mean {meant[0]}=?)" if meant else f"{name}=")
    warnings.warn(
        f"found {', '.join(found)}, which Llama does not know; expected its own arguments or "
        "llama-cpp-python's, others have no effect",
        stacklevel=3,
    )


def warn_without_cards(n_gpu_layers: int, backends: Sequence[str]) -> None:
    """Say once that layers stay on the CPU, whatever n_gpu_layers is: no device of `backends` is there."""
    if "cards" in _said:
        return
    _said.add("cards")
    if backends:
        found = f"no device that {' or '.join(backends)} can use"
        fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES, and `draftwood doctor`"
    else:
        found = "a build without a GPU's backend"
        fix = 'CMAKE_ARGS="-DGGML_CUDA=on" pip install . builds the one for CUDA'
    warnings.warn(
        f"found n_gpu_layers={n_gpu_layers} and {found}; every layer stays on the CPU ({fix})", stacklevel=3
    )
