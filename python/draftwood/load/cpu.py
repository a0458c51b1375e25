"""The variants of the CPU backend in this installation: which one runs, and what a better one needs.

A source install holds one, compiled for the machine that built it. The wheel of `make wheel` holds several,
and src/hooks/backend-modules.cpp loads the best that this CPU runs. Must not know: models, contexts.
Test: tests/model/test_cpu_variants.py.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.engine import build_info
from draftwood.errors import OptionError, UnsupportedError

CHOICE = "DRAFTWOOD_CPU"

_AVX2 = "sse4_2 avx f16c fma avx2 bmi2"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
# What each variant is compiled for, the plainest first, in the words of /proc/cpuinfo.
# Source: ggml/src/CMakeLists.txt at the pin.
NEEDS = {
    "x64": "",
    "sse42": "sse4_2",
    "haswell": _AVX2,
    "alderlake": f"{_AVX2} avx_vnni",
    "skylakex": _AVX512,
    "icelake": f"{_AVX512} avx512vbmi avx512_vnni",
    "zen4": f"{_AVX512} avx512vbmi avx512_vnni avx512_bf16",
}

_lib: Any = _capi.lib  # libllama is linked to libggml, so its handle finds these symbols too
for _name in ("dw_cpu_variants", "dw_cpu_variant"):
    getattr(_lib, _name).restype = ctypes.c_char_p
    getattr(_lib, _name).argtypes = []


def variants() -> dict[str, int]:
    """Return ggml's score of each variant, best first; 0: this CPU lacks something that it uses."""
    pairs = (each.split(":") for each in _lib.dw_cpu_variants().decode().split(",") if each)
    return {name: int(score) for name, score in pairs}


def running() -> str | None:
    """Return the name of the variant that is in force; "native" is the one of a source install."""
    return _lib.dw_cpu_variant().decode() or None


def check() -> None:
    """Raise if no variant runs on this CPU, or not the one that DRAFTWOOD_CPU names."""
    known, wanted = variants(), os.environ.get(CHOICE)
    usable = [name for name, score in known.items() if score > 0]
    if not known:
        raise UnsupportedError(
            f"found no CPU backend that can be loaded beside {_lib._name}; "
            "expected libdraftwood-ggml-cpu*.so",
            hint="pip install --force-reinstall --no-cache-dir PATH   (of draftwood's checkout or wheel)",
        )
    if running() is None:
        needs = build_info()["cpu_features"] or "what its GGML_* options name"
        raise UnsupportedError(
            f"draftwood was compiled for a CPU with {needs}; this one lacks some of it",
            hint="install it from source on this machine (pip install .), or take the wheel of `make wheel`",
        )
    if wanted and wanted != running():
        raise OptionError(
            f"{CHOICE} is `{wanted}`; expected one of {', '.join(usable)}, which run on this CPU",
            hint=f"unset {CHOICE}, and the best one is taken",
        )


def facts() -> dict[str, Any]:
    """Return what doctor says: which variant runs, its features, and what better ones need."""
    return {
        "runs": running(),
        "variants": variants(),
        "features": build_info()["cpu_features"] or "the features that its GGML_* options name",
        "named": bool(os.environ.get(CHOICE)),
        "lacking": why_not_better(),
    }


def why_not_better() -> dict[str, list[str]]:
    """Return what this CPU lacks for each variant that is better than the running one."""
    names, has = list(NEEDS), _features()
    if running() not in names:
        return {}
    refused = {name for name, score in variants().items() if score == 0}
    better = [name for name in names[names.index(str(running())) + 1 :] if name in refused]
    return {name: [each for each in NEEDS[name].split() if each not in has] for name in better}


def _features() -> set[str]:
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return set(found[1].split()) if found else set()
