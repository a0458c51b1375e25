"""A verify whose graph finds no memory: the round goes on with fewer rows, and the text is the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

# Stands in front of the C library: large blocks are refused once refuse_over() was called.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>

static size_t most = (size_t) -1;

void refuse_over(size_t bytes) { most = bytes; }

int posix_memalign(void ** block, size_t alignment, size_t bytes) {
    typedef int function(void **, size_t, size_t);
    function * real = (function *) dlsym(RTLD_NEXT, "posix_memalign");
    return bytes > most ? ENOMEM : real(block, alignment, bytes);
}
"""
SCRIPT = """
import ctypes, json, sys
from draftwood import _capi
from tests.model.rig import Rig
path, spare = sys.argv[1], int(sys.argv[2])
r = Rig(path, drafter=_capi.DRAFTER_MTP, tree_budget=64, draft_tokens=8, n_ctx=4096, n_ubatch=64)
tokens = [r.start()]
if spare:
    ctypes.CDLL(None).refuse_over(ctypes.c_size_t(spare << 10))
while len(tokens) < 48:
    r.engine.propose(tokens[-1])
    r.engine.verify()
    while r.engine.row() is not None:
        tokens.append(r.sample()[0])
    r.engine.commit()
print(json.dumps([tokens[:48], r.engine.stats().row_limit]))
"""

pytestmark = [
    pytest.mark.skipif(
        not (sys.platform.startswith("linux") and shutil.which("cc")),
        reason="needs LD_PRELOAD and a C compiler",
    ),
    pytest.mark.skipif(
        "asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates by itself"
    ),
]


@pytest.fixture
def shim(tmp_path):
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def run(path, shim, spare: int) -> tuple[list[int], int]:
    """Return the text and the limit of rows, with blocks of more than `spare` KiB refused (0: none are)."""
    command = [sys.executable, "-c", SCRIPT, str(path), str(spare)]
    surroundings = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, limit = json.loads(done.stdout.splitlines()[-1])
    return tokens, limit


def test_rounds_go_on_with_fewer_rows(gguf, shim):
    path = gguf("moe-mtp")
    expected, unlimited = run(path, shim, 0)
    assert unlimited == 0
    limits = []
    for spare in (4096, 1024, 512):
        tokens, limit = run(path, shim, spare)
        assert tokens == expected, spare
        limits.append(limit or 64)
    assert limits == sorted(limits, reverse=True)
    assert 1 < limits[-1] < 64, limits


PROMPT_SCRIPT = """
import ctypes, json, sys
from draftwood.errors import DecodeError
from tests.model.rig import Rig
r = Rig(sys.argv[1], n_ctx=4096, n_ubatch=64)
last = r.start()
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(512 << 10))
try:
    r.engine.eval(list(range(60)), 0, all_logits=True)
    found = "nothing"
except DecodeError as error:
    found = error.message
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(1 << 40))
print(json.dumps([found, last, r.start()]))
"""


def test_a_prompt_without_memory_is_a_failed_decode(gguf, shim):
    """Nothing smaller can be tried for it: what it was, and from a reset on all is well."""
    surroundings = {**os.environ, "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", PROMPT_SCRIPT, str(gguf("moe-mtp"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-2000:]
    found, first, again = json.loads(done.stdout.splitlines()[-1])
    assert "no memory for the graph of 60 tokens" in found
    assert again == first
