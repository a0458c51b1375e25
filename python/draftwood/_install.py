"""Put draftwood in place of the name `llama_cpp`: what `draftwood.install()` and the alias package share.

Under that name a program finds the private package itself (`llama_cpp is draftwood._llama_cpp`, and so for
every submodule), with `Llama` bound to our class. One set of modules, so types, isinstance and monkeypatches
agree. Must not know: models, contexts, libraries. Importing this module imports nothing of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

_PUBLIC = "llama_cpp"
_PRIVATE = "draftwood._llama_cpp"
# what the extra `server` installs (pyproject.toml)
_OF_THE_SERVER = ("fastapi", "uvicorn", "pydantic_settings", "sse_starlette", "starlette_context", "yaml")


def install() -> ModuleType:
    """Make `import llama_cpp` mean draftwood in this process, even where llama-cpp-python is installed.

    Call it before anything imports `llama_cpp`; calling it again does nothing. Returns the module that the
    name now stands for. Child processes start afresh and call it themselves.
    Errors: ImportError when another `llama_cpp` is already imported. Each copy works with pointers of its own
    library only, so swapping it under code that holds some of its names would crash the process.
    Source: design section 5. Test: tests/compat/test_install.py.
    """
    found = sys.modules.get(_PUBLIC)
    if found is None or found is sys.modules.get(_PRIVATE):
        return occupy()
    raise ImportError(
        f"draftwood.install() found `llama_cpp` already imported from {getattr(found, '__file__', None)!r}; "
        "expected that nothing had imported it yet.\n\n"
        "hint: call draftwood.install() at the start of the program, before the imports that use llama_cpp "
        "(in a notebook: restart the kernel first), or use draftwood.Llama directly.",
        name=_PUBLIC,
    )


def occupy() -> ModuleType:
    """Bind `llama_cpp` and all its submodules to the private package. Returns that package.

    Submodules of another `llama_cpp` whose own import failed may linger in sys.modules; they are dropped.
    """
    draftwood: Any = importlib.import_module("draftwood")
    ours: Any = importlib.import_module(_PRIVATE)
    # Programs import it from either place, and the private package's own server takes it from the first.
    # The class that ours derives from stays in draftwood.Llama.__mro__.
    ours.Llama = ours.llama.Llama = draftwood.Llama
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        # ahead of PathFinder, which would find the private package's files and load them a second time
        sys.meta_path.insert(0, _AliasFinder())
    importlib.import_module("draftwood.server").watch()
    for name in [name for name in sys.modules if name.startswith(_PUBLIC + ".")]:
        if sys.modules[name] is not sys.modules.get(_private(name)):
            del sys.modules[name]
    sys.modules[_PUBLIC] = ours
    module: ModuleType = ours
    return module


def _private(name: str) -> str:
    return _PRIVATE + name[len(_PUBLIC) :]


def _absent_of_the_server() -> list[str]:
    return [name for name in _OF_THE_SERVER if importlib.util.find_spec(name) is None]


def _refusal(absent: list[str]) -> CodeType:
    """Return code that ends the process with a message; an ImportError of ours would get words of runpy's."""
    words = (
        f"llama_cpp.server needs packages that are not installed: {', '.join(absent)}\n\n"
        'hint: pip install ".[server]" in draftwood\'s checkout'
    )
    return compile(f"raise SystemExit({words!r})", "<draftwood>", "exec")


class _AliasFinder(MetaPathFinder):
    """Finds `llama_cpp.x` as `draftwood._llama_cpp.x`, once `llama_cpp` is ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = sys.modules.get(_PRIVATE)
        if not fullname.startswith(_PUBLIC + ".") or ours is None or sys.modules.get(_PUBLIC) is not ours:
            return None
        real = importlib.util.find_spec(_private(fullname))
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(real), origin=real.origin, is_package=is_package)


class _AliasLoader(Loader):
    """Hands out the module that the private name stands for, untouched: its spec and name stay its own."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # importlib takes what sys.modules holds after this call. Handing out the real module in create_module
        # would have its __spec__ overwritten.
        sys.modules[module.__name__] = importlib.import_module(self._real.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """Serve `python -m llama_cpp.server`, which asks the loader for code instead of importing."""
        if fullname == f"{_PUBLIC}.server.__main__" and (absent := _absent_of_the_server()):
            return _refusal(absent)
        loader: Any = self._real.loader
        code: CodeType | None = loader.get_code(self._real.name)
        return code
