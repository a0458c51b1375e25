"""Whether experts are read from their file as they are chosen: expert_readahead=.

Must not know: contexts, requests. Test: tests/model/test_expert_readahead.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftwood.coerce import as_bool
from draftwood.engine.engine import ModelInfo
from draftwood.engine.readahead import ExpertReadahead
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import memory
from draftwood.load.experts import gib
from draftwood.warn import warn


@dataclass(frozen=True, slots=True)
class Wanted:
    """That experts are to be read ahead."""

    warning: str = ""
    """What the user is told; empty where the user asked for it."""


def wanted(given: Any, info: ModelInfo, kwargs: dict[str, Any]) -> Wanted | None:
    """Return what `expert_readahead` means for this model; None: nothing is read ahead.

    None is for a model of experts in a mapped file that is larger than the memory that is left.
    Errors: OptionError for what is neither True, False nor None.
    """
    wish = as_bool(given)
    if given is not None and wish is None:
        raise OptionError(
            f"expert_readahead is {given!r}; expected True, False or None",
            hint="leave it out: it is on where the model is larger than memory",
        )
    if wish is not None:
        return Wanted() if wish else None
    if info.expert_bytes == 0 or not kwargs.get("use_mmap", True):
        return None
    free = memory.available()
    if free is None or info.file_bytes <= free:
        return None
    return Wanted(
        f"this model takes {gib(info.file_bytes)} and {gib(free)} of memory are free: its experts are read "
        "from its file as they are chosen (docs/experts.md)"
    )


def begin(model: int, wish: Wanted | None) -> ExpertReadahead | None:
    """Begin to read ahead the experts of a loaded model, a llama_model pointer.

    Errors: UnsupportedError where the user asked for it and no experts lie in a mapped file.
    """
    if wish is None:
        return None
    made = ExpertReadahead(model)
    if made.stats().layers > 0:
        if wish.warning:
            warn(wish.warning)
        return made
    made.close()
    if not wish.warning:
        raise UnsupportedError(
            "expert_readahead is True, but this model has no experts in a mapped file",
            hint="leave it out, unless a mixture of experts lies in host memory on Linux with use_mmap=True "
            "and exact=True, without vram, expert_vram or lora_path",
        )
    return None
