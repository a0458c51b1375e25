"""llama-cpp-python arguments that this build has to correct before upstream's constructor sees them.

Each correction is said in a UserWarning that points at the caller of `Llama(...)`. Decides from the arguments
alone. Must not know: the library, contexts. Test: tests/model/generate/test_prompt_batches.py.
"""

from __future__ import annotations

import warnings
from typing import Any


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
