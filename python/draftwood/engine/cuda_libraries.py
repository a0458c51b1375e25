"""The CUDA runtime that libdraftwood-ggml-cuda.so needs, where the system's loader does not find it.

The module names the folders that PyPI's runtime wheels have beside it in site-packages (cmake/llama.cmake).
`--user`, `--system-site-packages` and PYTHONPATH may leave those wheels in another folder of sys.path. They
are loaded from there first: the loader takes what is loaded under the name that it looks for.
Must not know: devices, contexts. Test: tests/unit/test_cuda_libraries.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

MODULE = "libdraftwood-ggml-cuda.so"
_MISSING = re.compile(r"(lib\S+): cannot open shared object file")
_PATH = "LD_LIBRARY_PATH"
_RUNTIME = re.compile(r"libcu(?:dart|blas|blasLt)\.so\.(\d+):")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the module of this installation can be loaded."""

    error: str = ""
    """The loader's words; empty: it is loaded, or the build has no CUDA."""
    folders: tuple[Path, ...] = ()
    """Where libraries were found that the loader does not find."""

    @property
    def fix(self) -> str:
        """What to do about the error; empty where there is none."""
        if not self.error:
            return ""
        runtime = _RUNTIME.match(self.error)
        if runtime:
            return f'pip install "draftwood[cuda{runtime[1]}]", or name the toolkit in LD_LIBRARY_PATH'
        if self.error.startswith("libcuda.so"):
            return "install NVIDIA's driver: nvidia-smi runs then"
        return "install draftwood again, with this machine's CUDA toolkit or a wheel for its driver"

    def hand_on(self, environ: MutableMapping[str, str]) -> None:
        """Let a program that loads the module by itself find what was found here."""
        if self.folders:
            known = [environ[_PATH]] if environ.get(_PATH) else []
            environ[_PATH] = os.pathsep.join([*map(str, self.folders), *known])


def load(folder: Path) -> Outcome:
    """Load the CUDA module in `folder`, if there is one, before ggml does, with what it needs."""
    module, taken = folder / MODULE, list[Path]()
    error = _error(module) if module.exists() else ""
    while error:
        missing = _MISSING.match(error)
        path = _on_sys_path(missing[1]) if missing else None
        if path is None or path in taken:
            break
        taken.append(path)
        error = _error(path) or _error(module)
    return Outcome(error, tuple(dict.fromkeys(path.parent for path in taken)))


def _error(path: Path) -> str:
    """Load a library, for as long as the process lives. Return why it cannot be loaded, or ""."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)
    return ""


def _on_sys_path(name: str) -> Path | None:
    """Return a library of NVIDIA's wheels: nvidia/cu13/lib, and a folder for each part before CUDA 13."""
    folders = (Path(entry, "nvidia") for entry in sys.path if entry)
    return next((path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))), None)
