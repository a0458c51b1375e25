"""Corrections of llama-cpp-python's server (`python -m llama_cpp.server`), made when it is imported.

Its app, settings and models stay upstream's. Completions, chats and errors are answered by this room:
requests.py reads them, routes.py generates, stream.py and replies.py write, failures.py says what went
wrong. This module imports nothing of the extra `server`. Entry point: `watch`.
Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_APP = "draftwood._llama_cpp.server.app"


def watch() -> None:
    """Have the server's app corrected once it is imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _APP:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Correcting(spec.loader)
        return spec


class _Correcting(Loader):
    """A loader that corrects the module when it has been executed."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        importlib.import_module("draftwood.server.routes").correct(module)
