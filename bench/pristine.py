"""The pinned llama.cpp without draftwood, built as ours was, and how to load it in place of ours.

The library comes from the unpatched pin with the very CMake options of our build, into build/pristine/;
DRAFTWOOD_PRISTINE_LIB names the folder of one that is there already. Used by bench/off_speed.py,
bench/server_load.py and tests/model/test_inert.py. `llama_class` runs in a process of its own, started with
`environment`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("ours", "pristine")


class NoPristineError(RuntimeError):
    """A pristine library can be neither found nor built here; the text says why."""


def library() -> Path:
    """Return the folder of a pristine libllama, built if need be.

    Errors: NoPristineError without CMake or without a build of ours beside this file.
    """
    if "DRAFTWOOD_PRISTINE_LIB" in os.environ:
        return Path(os.environ["DRAFTWOOD_PRISTINE_LIB"]).resolve()
    return _built("llama")


def server() -> Path:
    """Return a pristine llama-server, built if need be. Errors: as of `library`."""
    return _built("llama-server") / "llama-server"


def _built(target: str) -> Path:
    """Build a target of the pristine pin and return the folder of what is built."""
    sys.path.insert(0, str(ROOT / "_build"))
    from source import ensure_source

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise NoPristineError("no cmake: the pristine library cannot be built; set DRAFTWOOD_PRISTINE_LIB")
    options = _options_of(_cache_of_our_build())
    tree = ensure_source(ROOT, pristine=True)
    build = ROOT / "build" / "pristine"
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    for command in (
        [cmake, "-S", tree.path / "vendor" / "llama.cpp", "-B", build, *generator, *options],
        [cmake, "--build", build, "--target", target, "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"the pristine build failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return build / "bin"


def _cache_of_our_build() -> Path:
    for cache in sorted((ROOT / "build").glob("py3-*/CMakeCache.txt")):
        return cache
    raise NoPristineError(
        "no CMakeCache.txt under build/py3-*: this draftwood was built elsewhere, its options are unknown"
    )


def _options_of(cache: Path) -> list[str]:
    """-D options that make CMake compile a llama.cpp of its own as it compiled ours."""
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    wanted = re.compile(
        r"(GGML|LLAMA)_\w+|CMAKE_BUILD_TYPE|CMAKE_(C|CXX|CUDA)_(COMPILER|FLAGS\w*|ARCHITECTURES)"
    )
    # folders of our build, which the other one finds for itself
    own = {name for name, value in entries.items() if str(cache.parent) in value or name.endswith("_DIR")}
    given = {name: value for name, value in entries.items() if wanted.fullmatch(name) and name not in own}
    if "ccache" in entries.get("DRAFTWOOD_CCACHE", ""):
        given |= {
            f"CMAKE_{lang}_COMPILER_LAUNCHER": entries["DRAFTWOOD_CCACHE"] for lang in ("C", "CXX", "CUDA")
        }
    # Ours loads its backends as modules and compiles the CPU's without contraction (cpu-variants.cmake).
    # Here the CPU backend is linked, as in llama-cpp-python, for this machine, and rounds as ours does.
    given |= {"GGML_BACKEND_DL": "OFF", "GGML_NATIVE": entries.get("GGML_NATIVE", "ON")}
    for name in ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS"):
        given[name] = f"{given.get(name, '')} -ffp-contract=off"
    # of GCC before 14, whose products by AMX end the process; others take nothing from it
    given["CMAKE_CXX_FLAGS"] += f' -include "{ROOT / "cmake" / "tile-config.h"}"'
    given |= {"BUILD_SHARED_LIBS": "ON", "CMAKE_POSITION_INDEPENDENT_CODE": "ON"}
    return [f"-D{name}={value}" for name, value in given.items()]


def environment(side: str, library: Path, folder: Path) -> dict[str, str]:
    """Return the environment for a process that calls llama_class(side); `folder` gets one link."""
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("LLAMA_", "DRAFTWOOD_"))
    }
    environ["PYTHONPATH"] = str(Path(__file__).parent)
    if side == "pristine":
        link = folder / "libdraftwood-llama.so"  # the loader looks for our file names
        link.unlink(missing_ok=True)
        link.symlink_to(library / "libllama.so")
        environ |= {"DRAFTWOOD_LIB_PATH": str(folder), "LD_LIBRARY_PATH": str(library)}
    return environ


def package() -> str:
    """Return the folder that holds llama-cpp-python's Python files as the package _llama_cpp."""
    import draftwood._llama_cpp as private

    return str(Path(private.__path__[0]).parent)


def llama_class(side: str, package: str) -> tuple[Any, dict[str, Any]]:
    """Return this side's Llama and the arguments that switch draftwood off in it; `package` as above."""
    if side == "ours":
        from draftwood import Llama

        own: dict[str, Any] = {"exact": False, "speculation": "off"}
    else:
        # the same Python files, without anything of ours that would look for the engine in the library
        stub = types.ModuleType("draftwood")
        stub.__path__ = [package]
        sys.modules["draftwood"] = stub
        from draftwood._llama_cpp.llama import Llama

        own = {}
    from draftwood._llama_cpp import llama_cpp as native

    is_ours = hasattr(native._lib, "dw_api_version")
    if is_ours != (side == "ours"):
        raise RuntimeError(f"found {'ours' if is_ours else 'a pristine library'}; expected {side}")
    return Llama, own
