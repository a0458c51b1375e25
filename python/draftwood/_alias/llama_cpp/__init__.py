"""`llama_cpp` for programs written against llama-cpp-python, on a machine that has draftwood instead.

The folder above is on sys.path through draftwood.pth, after the packages installed beside it. Importing this
file replaces it in sys.modules: by draftwood's own copy, or by another `llama_cpp` further along sys.path.
Test: tests/compat/test_alias.py.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what a type checker sees, which reads .pth paths but runs nothing
    from draftwood import Llama as Llama
    from draftwood._llama_cpp import *  # noqa: F403
    from draftwood._llama_cpp import __version__ as __version__


def _other() -> ModuleSpec | None:
    """Find a `llama_cpp` other than this one on sys.path.

    One that is installed beside draftwood comes first by itself, for a .pth line goes after its own folder.
    One in a folder further on (system packages below a virtual environment, say) would be shadowed.
    """
    here = Path(__file__).resolve().parent.parent
    return PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry).resolve() != here])


if (_spec := _other()) is not None and _spec.loader is not None:  # a bare folder of that name has none
    # draftwood is not imported: what may be wrong with it does not concern a program that does not use it
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])
else:
    from draftwood._install import occupy

    occupy()
