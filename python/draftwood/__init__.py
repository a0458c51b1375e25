"""draftwood: llama-cpp-python's `Llama` with MTP drafting for Qwen3.5/3.6 hybrid models.

    from draftwood import Llama

Importing this package never touches the name `llama_cpp`; `install()` does, when asked to.
"""

from importlib.metadata import version as _version

from draftwood._install import install
from draftwood.errors import (
    ClosedError,
    ContextFullError,
    DecodeError,
    DraftwoodError,
    ModelFileError,
    OptionError,
    UnsupportedError,
)
from draftwood.llama import Llama
from draftwood.stats import SpeculationStats

__version__ = _version("draftwood")

__all__ = [
    "ClosedError",
    "ContextFullError",
    "DecodeError",
    "DraftwoodError",
    "Llama",
    "ModelFileError",
    "OptionError",
    "SpeculationStats",
    "UnsupportedError",
    "__version__",
    "install",
]
