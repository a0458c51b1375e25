"""A CUDA build where CUDA has little to give: no card to be seen, or one that is full.

Must not know: how fast anything is.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from draftwood import Llama
from draftwood._llama_cpp import llama_cpp
from draftwood.cli import server_pool
from draftwood.engine.engine import build_info, probe_model
from draftwood.errors import DraftwoodError
from draftwood.load.devices import cards
from draftwood.load.experts import beside
from synth_gguf import PRESETS, write

from tests.model.processes import ask, ready, serving
from tests.model.split_gguf import split
from tests.server.process import Server

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-f16.gguf"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not build_info()["cuda"], reason="draftwood was built without -DGGML_CUDA=on"),
    pytest.mark.skipif(not llama_cpp.llama_supports_gpu_offload(), reason="no GPU that llama.cpp can use"),
]

WITHOUT = """
import json, sys
from itertools import islice
from draftwood import Llama
from draftwood.load.devices import cards
texts = []
for layers in (0, -1):
    llm = Llama(sys.argv[1], speculation="tree", n_gpu_layers=layers, n_ctx=512, verbose=False)
    texts.append(list(islice(llm.generate(llm.tokenize(b"import os\\n"), temp=0.0), 48)))
    refusal = llm.tree_refusal
    llm.close()
print(json.dumps([texts, cards(), refusal]))
"""

FULL = """
import ctypes, json, sys, warnings
from itertools import islice
from draftwood import Llama
path, spare = sys.argv[1], int(sys.argv[2])
common = dict(speculation="mtp", tree_budget=64, draft_tokens=8, n_gpu_layers=-1, n_ctx=1024, flash_attn=True,
              n_ubatch=64, n_batch=64, verbose=True)  # where CUDA ends the process, the log says why
llm = Llama(path, **common)
prompt = list(range(5, 60))
def text():
    return list(islice(llm.generate(prompt, temp=0.0), 40))
# At the context's end a draft has a few rows: then what CUDA takes for itself is there, in both contexts.
list(islice(llm.generate([5 + i % 1000 for i in range(1019)], temp=0.0), 4))
assert 0 < llm.speculation_stats.drafted < 16, llm.speculation_stats
if spare:
    cudart = ctypes.CDLL(sys.argv[3])
    free, total, block = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    assert cudart.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    assert cudart.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(free.value - (spare << 20))) == 0
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = [text(), text()]
stats = llm.speculation_stats
print(json.dumps([found, stats.row_limit, [str(each.message) for each in said], stats.drafted,
                  stats.shared_rounds, stats.rounds]))
"""


FREE = """
import json
from draftwood.load.devices import cards, describe
print(json.dumps([describe(card)["memory_free"] for card in cards()]))
"""


def run(script: str, *arguments: str, **environment: str) -> list:
    command = [sys.executable, "-c", script, *arguments]
    surroundings = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=surroundings)
    # a process that CUDA ends says why in front of a long list of addresses
    said = [line for line in done.stderr.splitlines() if "(_" not in line]
    assert done.returncode == 0, "\n".join(said)[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("speculation", ["off", "ngram", "mtp"])
def test_token_embeddings_lie_on_the_card(speculation):
    """In host memory they begin each decode on the CPU, whoever drafts."""
    llm = Llama(str(TINY), speculation=speculation, n_gpu_layers=-1, n_ctx=512, verbose=False)
    assert (llm._tensor_overrides is not None) is (len(cards()) == 1)
    llm.close()


@pytest.mark.parametrize(
    "flags", [("plain", "99", True), ("mtp", "99", True), ("plain", "auto", True), ("plain", "3", False)]
)
def test_a_servers_token_embeddings_lie_on_the_card(tmp_path, flags):
    kind, layers, on_card = flags
    server = Server(tmp_path / "log", "-c", "512", "-np", "1", "--spec-type", kind, "-ngl", layers)
    try:
        server.wait().complete("import os\n", n_predict=4)
        said = "token embeddings lie on CUDA0" in server.words()
        assert said is (on_card and len(cards()) == 1), server.words()
    finally:
        server.close()


@pytest.mark.parametrize("size", [None, 8 << 20], ids=["", "pool"])
def test_a_model_in_several_files_runs_as_one(tmp_path, size):
    common = {"n_gpu_layers": -1, "split_mode": 0, "n_ctx": 512, "flash_attn": True, "verbose": False}
    texts = []
    for path in (TINY, split(TINY, tmp_path, 60)[0]):
        llm = Llama(str(path), speculation="mtp", expert_vram=size, **common)
        texts.append(list(islice(llm.generate(llm.tokenize(b"import os\n"), temp=0.0), 48)))
        assert (llm.expert_stats is None) is (size is None)
        assert (llm.speculation_stats.ahead_rounds > 0) is (len(cards()) == 1)  # with embeddings on the card
        llm.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("served", [False, True], ids=["library", "server"])
def test_token_embeddings_lie_on_the_card_beside_a_pool(tmp_path, served):
    """A pool is for cards without room for all experts; what is free is to be enough for what it takes."""
    size = 8 << 20
    if not served:
        common = {"speculation": "mtp", "n_gpu_layers": -1, "n_ctx": 512, "verbose": False}
        llm = Llama(str(TINY), expert_vram=size, split_mode=0, **common)  # a pool lies on one card
        assert llm.expert_stats is not None
        first = llm._tensor_overrides[0].pattern
        assert (first == rb"^token_embd\.weight$") is (len(cards()) == 1)
        llm.close()
        return
    flags = ("-c", "512", "-np", "1", "--spec-type", "mtp", "-ngl", "99", "--sleep-idle-seconds", "1")
    flags = (*flags, "--split-mode", "none")
    server = Server(tmp_path / "log", *flags, "--expert-vram", str(size))
    try:
        texts = [server.wait().complete("import os\n", n_predict=8)["content"]]
        time.sleep(4)  # it sleeps, and loads the model anew
        texts.append(server.complete("import os\n", n_predict=8)["content"])
        assert texts[0] == texts[1]
        assert server.words().count("in slots on CUDA0") == 2
        n_loads = 2 if len(cards()) == 1 else 0
        assert server.words().count("token embeddings lie on CUDA0") == n_loads
    finally:
        server.close()


def test_without_a_card_the_cpu_does_it():
    """As on a machine without one, or with a driver that CUDA cannot use."""
    texts, cards, refusal = run(WITHOUT, str(TINY), CUDA_VISIBLE_DEVICES="")
    assert cards == []
    assert refusal == ""
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, "auto"),
        ({"n_gpu_layers": 2}, "auto"),
        ({"flash_attn": True}, "enabled"),
        ({"flash_attn": False}, "disabled"),
        ({"n_gpu_layers": 0}, "disabled"),
        ({"offload_kqv": False}, "disabled"),
    ],
    ids=str,
)
def test_flash_attention_is_llama_cpps_to_decide_where_nobody_says(capfd, settings, asked):
    """In the model's context and the drafter's; CUDA has kernels for the heads of both."""
    common = {"speculation": "mtp", "n_gpu_layers": -1, "n_ctx": 512, "verbose": True}
    llm = Llama(str(TINY), **{**common, **settings})
    llm.close()
    log = capfd.readouterr().err
    assert re.findall(r"flash_attn += (\w+)", log) == [asked, asked]
    assert log.count("Flash Attention enabled") == (2 if asked == "auto" else 0)
    assert "not supported, set to disabled" not in log


def test_what_a_card_has_no_kernel_for_is_the_cpus(tmp_path):
    """Heads of 44 values, states of 24: ggml-cuda would end the process in its delta net."""
    path = tmp_path / "odd.gguf"
    write(PRESETS["odd"], path)
    common = {"n_gpu_layers": -1, "n_ctx": 256, "verbose": False}
    llm = Llama(str(path), speculation="off", **common)
    text = list(islice(llm.generate(list(range(5, 40)), temp=0.0), 24))
    llm.close()
    assert len(text) == 24
    with pytest.raises(DraftwoodError, match="heads of 24 values"):
        Llama(str(path), speculation="mtp", **common)


def cudart() -> str:
    """Return the name of the CUDA runtime that this process can load; skip where there is none."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    pytest.skip("no CUDA runtime to take the card's memory with")


@pytest.mark.alone
@pytest.mark.parametrize("spare", [60, 20])
def test_a_full_card_drafts_in_what_is_set_aside(tmp_path, spare):
    """Logits of 64 rows take 64 MB here, and so much is not left, nor a CUDA graph's memory.

    On an H100 16 were enough. With 12 ggml-cuda's own pool cannot grow, and that ends the process.
    """
    path = tmp_path / "wide.gguf"
    write(replace(PRESETS["moe-mtp"], vocab=248320), path)
    expected, unlimited, silent, drafted, never, _ = run(FULL, str(path), "0", cudart())
    found, limit, said, drafted_now, shared, rounds = run(FULL, str(path), str(spare), cudart())
    assert limit == unlimited == never == 0
    assert silent == []
    assert len(said) == 1
    assert said[0].startswith("memory ran out: graphs of all sizes share")
    assert rounds / 2 < shared <= rounds
    assert drafted_now > drafted / 2
    assert found[0][:8] == expected[0][:8]  # later tokens may part where rounding does


@contextmanager
def all_but(n_bytes: int) -> Iterator[None]:
    """Hold the card's memory, but for what a process that starts now is to find free."""
    runtime, block = ctypes.CDLL(cudart()), ctypes.c_void_p()
    assert runtime.cudaFree(None) == 0  # which makes a context
    assert runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(run(FREE)[0] - n_bytes)) == 0
    try:
        yield
    finally:
        assert runtime.cudaFree(block) == 0


@pytest.mark.alone
def test_a_server_takes_a_pool_by_itself(tmp_path):
    """Its card has room for half of the experts. The model has no MTP block: its layers are fused as well."""
    if len(cards()) != 1:
        pytest.skip("needs one card")
    path, log = tmp_path / "large.gguf", tmp_path / "log"
    write(replace(PRESETS["moe-plain"], types="F16", experts=64, expert_ff=1024), path)
    info, flags = probe_model(str(path)), ("-np", "2", "-fa", "on")
    rest = beside(info, server_pool._settings([*flags, "-c", "2048"], info))
    body = {"prompt": "import os\n", "n_predict": 24, "temperature": 0}
    with (
        all_but(rest + info.expert_bytes // 2),
        log.open("w") as said,
        serving(str(path), *flags, n_ctx=2048, stderr=said.fileno()) as (address, process),
    ):
        ready(address, process)
        reply = ask(f"{address}/completion", body)
    words = log.read_text()
    assert "of its experts get a slot there, and all lie in host memory" in words
    assert "of 64 experts of each layer in slots on CUDA0, all of them in host memory" in words
    assert "draftwood: nothing is drafted: found no MTP block" in words
    assert "2 slots, no drafts (--spec-type plain)" in words
    with serving(str(path), *flags, n_ctx=2048, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        assert ask(f"{address}/completion", body)["content"] == reply["content"]
