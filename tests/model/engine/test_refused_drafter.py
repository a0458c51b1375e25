"""A drafter that is not made, for want of a block of memory, leaves the target as it was: no layer is read.

Contract: dw_attachment::tap_layer, tap_hidden. Test of large blocks: test_little_memory.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.engine.little_memory import NEEDS, run

# Refuses one of C++'s blocks, and counts what llama.cpp says of taps.
_SHIM = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

static __thread long n_left = -1; // blocks before the one that is refused
static long n_seen = 0, n_refused = 0, n_taps = 0;

extern "C" void refuse_block(long nth) { n_left = nth, n_seen = 0; }
extern "C" long seen(void) { return n_seen; }
extern "C" long refused(void) { return n_refused; }
extern "C" long taps(void) { return n_taps; }

extern "C" void count_taps(int, const char * text, void *) {
    int layer = 0, on = 0;
    const char * at = std::strstr(text, "set_embeddings_layer_inp: lid = ");
    if (at && std::sscanf(at, "set_embeddings_layer_inp: lid = %d, enable = %d", &layer, &on) == 2) {
        n_taps += on ? 1 : -1;
    }
}

void * operator new(std::size_t n) {
    if (n_left >= 0) {
        ++n_seen;
        if (n_left-- == 0) {
            ++n_refused;
            throw std::bad_alloc();
        }
    }
    void * found = std::malloc(n ? n : 1);
    if (!found) {
        throw std::bad_alloc();
    }
    return found;
}
"""
SCRIPT = """
from draftwood._llama_cpp import llama_cpp as native
from draftwood.errors import DraftwoodError
from tests.model.engine.test_joint_dflash import DFLASH, TARGET
shim = ctypes.CDLL(None)
native.llama_log_set(ctypes.cast(shim.count_taps, native.llama_log_callback), None)

def taps_left(nth):
    r = Rig(TARGET, engine=False, n_ctx=512)
    r.settings.update(DFLASH)
    before = shim.taps()
    shim.refuse_block(ctypes.c_long(nth))
    try:
        r.attach()
    except (DraftwoodError, MemoryError):
        pass
    n_blocks, made = shim.seen(), shim.taps() - before
    shim.refuse_block(ctypes.c_long(-1))
    r.detach()
    left = shim.taps() - before
    r.close()
    return made, n_blocks, left

made, n_blocks, left = taps_left(1 << 30)
found = [made, left, [taps_left(n_blocks - k)[2] for k in range(1, 40)]]
"""

pytestmark = [
    *NEEDS,
    pytest.mark.skipif(not (sys.platform.startswith("linux") and shutil.which("c++")), reason="needs c++"),
]


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """The library that refuses a block."""
    source, library = tmp_path / "blocks.cpp", tmp_path / "blocks.so"
    source.write_text(_SHIM)
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def test_a_drafter_that_is_not_made_taps_no_layer(blocks: Path) -> None:
    made, left, after_failures = run(SCRIPT, blocks)
    assert made > 1
    assert left == 0
    assert set(after_failures) == {0}
