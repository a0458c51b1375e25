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
stats = r.engine.stats()
print(json.dumps([tokens[:48], stats.row_limit, stats.shared_rounds, stats.rounds]))
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
    tokens, limit, shared, rounds = run(SCRIPT, shim, path, spare, first)
    assert 0 < shared <= rounds - first if spare else shared == 0
    return tokens, limit


def test_rounds_go_on_in_the_memory_set_aside(gguf, shim):
    """No verify has memory for a graph of its own; what llama.cpp holds for prompts has room for 64 rows."""
    path = gguf("moe-mtp")
    expected = text(shim, path, 0)
    assert expected[1] == 0
    for spare in (1024, 512, 256):
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
n_rs_seq, first = int(sys.argv[3]), int(sys.argv[4])
r = Rig(sys.argv[1], drafter=drafter, draft_tokens=4, n_ctx=4096, n_ubatch=64, n_rs_seq=n_rs_seq)
refuse = ctypes.CDLL(None).refuse_over
def text(least):
    tokens = [r.start(range(3, 50))]
    while len(tokens) < 24:
        if len(tokens) == first:
            refuse(ctypes.c_size_t(least))
        wrong = [tokens[-1]] * 3 if n_rs_seq and len(tokens) < first else []
        r.engine.propose_given(tokens[-1], wrong)
        r.engine.verify()
        while r.engine.row() is not None:
            tokens.append(r.sample()[0])
        r.engine.commit()
    return tokens
r.start(range(2, 60))  # as large an output buffer as any decode of these texts needs
if first == 0:
    refuse(ctypes.c_size_t(4 << 10))
little = text(4 << 10)
refuse(ctypes.c_size_t(1 << 40))
print(json.dumps([little, text(1 << 40)]))
"""


@pytest.mark.parametrize("first", [0, 1, 3], ids=["prompt", "first step", "third step"])
@pytest.mark.parametrize(
    ("preset", "drafter", "n_rs_seq"),
    [("moe-mtp", "none", 0), ("moe-mtp", "mtp", 0), ("moe-mtp", "none", 4), ("dense-plain", "none", 0)],
)
def test_small_decodes_without_memory_take_what_is_set_aside(gguf, shim, preset, drafter, n_rs_seq, first):
    """A prompt with an output and plain steps, each in a graph of its own where there is memory for one.

    With snapshots the first one behind a refused draft is taken back to where its state is an older one.
    """
    little, much = run(PLAIN_SCRIPT, shim, gguf(preset), drafter, n_rs_seq, first)
    assert little == much


TOGETHER_SCRIPT = """
import ctypes, json, sys
from draftwood import _capi
from draftwood.engine import Engine
from tests.model.rig import Rig
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_NONE, n_ctx=4096, n_ubatch=64, n_seq_max=2, engine=False)
engines = [Engine(r.ctx, r.params, **r.settings, seq_id=i) for i in range(2)]
def text():
    last = []
    for i, each in enumerate(engines):
        each.reset()
        each.eval(list(range(2 + i, 60)), 0)
        last.append(each.next(r.sampler))
    tokens = list(last)
    for _ in range(12):
        for each, token in zip(engines, last):
            each.propose_given(token, [])
        Engine.verify_all(engines)
        last = [each.next(r.sampler) for each in engines]
        tokens += last
        for each in engines:
            each.commit()
    return tokens
last = [each.eval(list(range(2, 60)), 0) for each in engines]
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(64 << 10))
little = text()
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(1 << 40))
print(json.dumps([little, text()]))
"""


def test_steps_of_several_sequences_do_too(gguf, shim):
    little, much = run(TOGETHER_SCRIPT, shim, gguf("moe-mtp"))
    assert little == much


RAW_SCRIPT = """
import ctypes, json, sys
from draftwood import _capi
from draftwood._llama_cpp import llama_cpp as native
from tests.model.rig import Rig
r = Rig(sys.argv[1], drafter=_capi.DRAFTER_NONE, draft_tokens=8, n_ctx=4096, n_ubatch=64)
r.start(range(2, 60))
if sys.argv[2] == "refuse":
    ctypes.CDLL(None).refuse_over(ctypes.c_size_t(256 << 10))
r.engine.reset()
r.engine.eval(list(range(3, 30)), 0)
r.engine.propose_given(r.engine.next(r.sampler), [5, 6, 7])
r.engine.verify()
r.engine.next(r.sampler)
r.engine.commit()
ctypes.CDLL(None).refuse_over(ctypes.c_size_t(1 << 40))
n_past = r.engine.n_past
r.detach()
batch = native.llama_batch_init(4, 0, 1)
batch.n_tokens = 4
for i in range(4):
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 9 + i, n_past + i, 1, 1
    batch.seq_id[i][0] = 0
assert native.llama_decode(r.ctx, batch) == 0
print(json.dumps([r.logits(i).tolist() for i in range(4)]))
"""


def test_nothing_of_an_engine_that_is_gone_is_used(gguf, shim):
    """A verify's graph in the context's own place works on tensors that went with the engine."""
    path = gguf("moe-mtp")
    assert run(RAW_SCRIPT, shim, path, "refuse") == run(RAW_SCRIPT, shim, path, "")


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
