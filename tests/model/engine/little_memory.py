"""A process that finds little memory from some point on: a library in front of the C library's.

Must not know: what any test expects. Used by test_little_memory.py, test_little_memory_steps.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Large blocks are refused once refuse_over() was called; refused() counts them.
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

static size_t most = (size_t) -1;
static long   n_refused = 0;

void refuse_over(size_t bytes) { most = bytes; }
long refused(void) { return n_refused; }

int posix_memalign(void ** block, size_t alignment, size_t bytes) {
    typedef int function(void **, size_t, size_t);
    function * real = (function *) dlsym(RTLD_NEXT, "posix_memalign");
    n_refused += bytes > most;
    return bytes > most ? ENOMEM : real(block, alignment, bytes);
}
"""
_HEAD = """
import ctypes, json, sys
from draftwood.engine import _capi
from draftwood.engine.engine import Engine
from draftwood.errors import DecodeError
from bench.testing_api import verify_all
from tests.model.rig import Rig
def refuse(over): ctypes.CDLL(None).refuse_over(ctypes.c_size_t(over))
ALL = 1 << 40
"""
_TAIL = """
print(json.dumps([found, ctypes.CDLL(None).refused()]))
"""

NEEDS = [
    pytest.mark.skipif(
        not (sys.platform.startswith("linux") and shutil.which("cc")),
        reason="needs LD_PRELOAD and a C compiler",
    ),
    pytest.mark.skipif(
        "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates by itself"
    ),
]


def build_shim(folder: Path) -> Path:
    """Return the library that refuses."""
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def run(script: str, shim: Path, *arguments: str | int, refuses: bool = True) -> Any:
    """Return what a script calls `found`, run with the shim in front: `refuse(bytes)` begins there.

    Fails where nothing was refused though it `refuses`, or the other way round.
    """
    command = [sys.executable, "-c", f"{_HEAD}{script}{_TAIL}", *map(str, arguments)]
    surroundings = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-2000:]
    found, refused = json.loads(done.stdout.splitlines()[-1])
    assert (refused > 0) == refuses, f"{refused} blocks were refused"
    return found
