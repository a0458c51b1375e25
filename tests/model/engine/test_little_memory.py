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
path, spare, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
r = Rig(path, drafter=_capi.DRAFTER_MTP, tree_budget=64, draft_tokens=8, n_ctx=4096, n_ubatch=64)
tokens, rounds = [r.start()], 0
while len(tokens) < 48:
    if spare and rounds == first:
        ctypes.CDLL(None).refuse_over(ctypes.c_size_t(spare << 10))
    rounds += 1
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


def run(script: str, shim, path, *arguments: str | int):
    """Return what the script says with the shim in front."""
    command = [sys.executable, "-c", script, str(path), *map(str, arguments)]
    surroundings = {**os.environ, "LD_PRELOAD": str(shim)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=surroundings)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def text(shim, path, spare: int, first: int = 0) -> tuple[list[int], int]:
    """Return text and limit of rows, blocks over `spare` KiB refused (0: none) from round `first` on."""
    tokens, limit = run(SCRIPT, shim, path, spare, first)
    return tokens, limit


def test_rounds_go_on_in_the_memory_set_aside(gguf, shim):
    """No verify has memory for a graph of its own; what llama.cpp holds for prompts has room for 64 rows."""
    path = gguf("moe-mtp")
    expected = text(shim, path, 0)
    assert expected[1] == 0
    for spare in (4096, 1024, 512, 256):
        assert text(shim, path, spare) == expected


def test_rounds_go_on_with_fewer_rows(gguf, shim):
    """What a verify hands over has no room either."""
    path = gguf("moe-mtp")
    tokens, limit = text(shim, path, 128)
    assert tokens == text(shim, path, 0)[0]
    assert 1 < limit < 64


@pytest.mark.parametrize("spare", [64, 16, 4])
@pytest.mark.parametrize("first", [1, 3])
def test_drafts_without_memory_for_more_are_those_that_fit(gguf, shim, spare, first):
    """The drafter's graphs find none, round after round; the context's own are there."""
    path = gguf("moe-mtp")
    assert text(shim, path, spare, first)[0] == text(shim, path, 0)[0]


PLAIN_SCRIPT = """
import ctypes, json, sys
from draftwood import _capi
from tests.model.rig import Rig
drafter = {"none": _capi.DRAFTER_NONE, "mtp": _capi.DRAFTER_MTP}[sys.argv[2]]
r = Rig(sys.argv[1], drafter=drafter, draft_tokens=int(sys.argv[3]), n_ctx=4096, n_ubatch=64)
def text(prompt):
    tokens = [r.start(prompt)]
    while len(tokens) < 24:
        r.engine.propose_given(tokens[-1], [])
        r.engine.verify()
        tokens.append(r.sample()[0])
        r.engine.commit()
    return tokens
prompt = list(range(3, 50))
last = r.start(range(2, 60))  # as large an output buffer as any decode of these texts needs
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(4 << 10))
little = text(prompt)
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(1 << 40))
print(json.dumps([little, text(prompt)]))
"""


@pytest.mark.parametrize(
    ("preset", "drafter"), [("moe-mtp", "none"), ("moe-mtp", "mtp"), ("dense-plain", "none")]
)
def test_small_decodes_without_memory_take_what_is_set_aside(gguf, shim, preset, drafter):
    """A prompt with an output and plain steps, each in a graph of its own where there is memory for one."""
    little, much = run(PLAIN_SCRIPT, shim, gguf(preset), drafter, 4)
    assert little == much


PROMPT_SCRIPT = """
import ctypes, json, sys
from draftwood.errors import DecodeError
from tests.model.rig import Rig
r = Rig(sys.argv[1], n_ctx=4096, n_ubatch=64)
last = r.start()
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(64 << 10))  # nor for what it has to hand over
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
    found, first, again = run(PROMPT_SCRIPT, shim, gguf("moe-mtp"))
    assert "no memory for the graph of 60 tokens" in found
    assert again == first
