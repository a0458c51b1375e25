"""draftwood: llama-cpp-python's `Llama` with speculative decoding for Qwen3.5 and Qwen3.6 hybrid models.

The model's MTP block, a DFlash drafter or n-grams draft tokens; the model verifies them in chains or trees.

    from draftwood import Llama

Importing this package never touches the name `llama_cpp`; `install()` does, when asked to. The library and
numpy are loaded when `Llama` is first named, so that `draftwood doctor` can say what is wrong with them.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from draftwood._install import install
from draftwood.errors import (
    CacheError,
    ClosedError,
    ContextFullError,
    DecodeError,
    DrafterMemoryError,
    DraftwoodError,
    ExpertMemoryError,
    GrammarError,
    ModelFileError,
    OptionError,
    ServerError,
    StateError,
    UnsupportedError,
)
from draftwood.speculative import SpecConfig, SpeculativeType
from draftwood.stats import ExpertStats, ReadaheadStats, SpeculationStats

if _TYPE_CHECKING:
    from draftwood.llama import Llama

__version__ = _version("draftwood")

__all__ = [
    "CacheError",
    "ClosedError",
    "ContextFullError",
    "DecodeError",
    "DrafterMemoryError",
    "DraftwoodError",
    "ExpertMemoryError",
    "ExpertStats",
    "GrammarError",
    "Llama",
    "ModelFileError",
    "OptionError",
    "ReadaheadStats",
    "ServerError",
    "SpecConfig",
    "SpeculationStats",
    "SpeculativeType",
    "StateError",
    "UnsupportedError",
    "__version__",
    "install",
]


def __getattr__(name: str) -> _Any:
    """Return `Llama`, or a class of llama-cpp-python's package or draft models by its name."""
    if not name[:1].isupper():  # functions and submodules are not looked for: ours have names of theirs
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _class(name)
    globals()[name] = found  # the next look-up does not come here
    return found


def _class(name: str) -> _Any:
    if name == "Llama":
        from draftwood.llama import Llama

        return Llama
    import draftwood._llama_cpp as package
    from draftwood._llama_cpp import llama_speculative

    for module in (package, llama_speculative):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
