"""expert_readahead=: the same text, what is counted, and a model that is larger than its memory cgroup."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import sys
from pathlib import Path

import gguf as gguf_files
import pytest
from draftwood import ReadaheadStats
from draftwood.engine.engine import probe_model
from draftwood.engine.readahead import ExpertReadahead
from draftwood.errors import OptionError, UnsupportedError
from draftwood.load import memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import short_memory
from memory_group import NoGroupError, forget

from tests.model.texts import seeded

PROMPT = b"What experts does a model choose?"
SHAPE = {"experts": 16, "top_k": 3}
NO_MTP = {**SHAPE, "mtp": False}  # a block that is not loaded is not mapped
LAYERS = 4
N = 40


def text(llm, seed=None):
    return seeded(llm, N, llm.tokenize(PROMPT), seed)


@pytest.mark.parametrize("changes", [{}, {"types": "Q8_0"}, {"merged_experts": True}], ids=str)
@pytest.mark.parametrize("speculation", ["off", "mtp", "tree", "auto"])
@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "seeded"])
def test_the_same_text(llama_of, speculation, seed, changes):
    plain = text(llama_of("moe-mtp", {**SHAPE, **changes}, speculation="off"), seed)
    llm = llama_of("moe-mtp", {**SHAPE, **changes}, speculation=speculation, expert_readahead=True)
    assert text(llm, seed) == plain
    assert llm.readahead_stats.steps > 0


def test_what_is_counted(llama_of, gguf):
    llm = llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=True)
    tokens = llm.generate(llm.tokenize(PROMPT), temp=0.0)
    next(tokens)
    prompt = llm.readahead_stats
    assert isinstance(prompt, ReadaheadStats)
    assert prompt.layers == LAYERS, "the MTP block is not loaded"
    assert prompt.steps > 0
    assert LAYERS * SHAPE["top_k"] < prompt.experts_used <= prompt.steps * LAYERS * SHAPE["experts"]
    for _ in range(N):
        next(tokens)
    stats = llm.readahead_stats
    assert stats.steps == prompt.steps + N
    assert stats.experts_used == prompt.experts_used + N * LAYERS * SHAPE["top_k"]
    assert (stats.experts_read, stats.bytes_read) == (0, 0), "the file was read when it was mapped"
    assert stats.expert_bytes == probe_model(gguf("moe-mtp", **SHAPE)).expert_bytes
    assert stats.to_dict()["steps"] == stats.steps


def test_an_mtp_block_is_a_layer(llama_of):
    llm = llama_of("moe-mtp", SHAPE, speculation="mtp", expert_readahead=True)
    text(llm)
    assert llm.readahead_stats.layers == LAYERS + 1


MADV_PAGEOUT = 21


def in_single_pages(path):
    """Have a file in memory page by page, before it is mapped: Linux pages out no part of a larger piece."""
    forget(Path(path))
    with Path(path).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while file.read(os.sysconf("SC_PAGESIZE")):
            pass
    return path


def page_out(path):
    """Take the experts' pages out of memory, as Linux does where it is short. Skips where it does not."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    addresses, _, offset, *_ = next(line for line in maps if line.endswith(path)).split()
    base = int(addresses.split("-")[0], 16) - int(offset, 16)
    page = os.sysconf("SC_PAGESIZE")
    for begin, n_bytes in experts_in(path):
        first = -(-(base + begin) // page) * page  # a neighbour's page would bring more
        last = (base + begin + n_bytes) // page * page
        page_out_range(first, (last - first) // page)


def experts_in(path):
    """Return where a file's experts are. No mapping of it is left."""
    tensors = gguf_files.GGUFReader(path).tensors
    return [(t.data_offset, t.n_bytes) for t in tensors if "_exps." in t.name]


def page_out_range(first, n_pages):
    libc, usable = ctypes.CDLL(None, use_errno=True), os.sched_getaffinity(0)
    there = (ctypes.c_ubyte * n_pages)()
    where = (ctypes.c_void_p(first), ctypes.c_size_t(n_pages * os.sysconf("SC_PAGESIZE")))
    try:
        for cpu in 2 * [*usable]:
            os.sched_setaffinity(0, {cpu})  # each keeps a list of pages that were touched just now
            if libc.madvise(*where, MADV_PAGEOUT) != 0:
                pytest.skip(f"this kernel pages nothing out: {os.strerror(ctypes.get_errno())}")
            libc.mincore(*where, there)
            if not any(each & 1 for each in there):
                return
    finally:
        os.sched_setaffinity(0, usable)
    pytest.skip("this kernel keeps pages of this file in memory")


def test_what_is_missing_is_read(llama_of, gguf):
    """Each chosen expert of a step is asked for whole, and once."""
    path = in_single_pages(gguf("moe-mtp", **NO_MTP))
    llm = llama_of("moe-mtp", NO_MTP, speculation="off", expert_readahead=True)
    expected = text(llm)
    llm.reset()
    tokens = llm.generate(llm.tokenize(PROMPT), temp=0.0)
    assert [next(tokens) for _ in range(5)] == expected[:5]
    page_out(path)
    before, waited = llm.readahead_stats, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert next(tokens) == expected[5]
    after = llm.readahead_stats
    waited = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - waited
    used = after.experts_used - before.experts_used
    assert used == LAYERS * SHAPE["top_k"]
    assert after.experts_read - before.experts_read == used
    one = after.expert_bytes // (after.layers * SHAPE["experts"])
    n_read = after.bytes_read - before.bytes_read
    ends = used * 3 * 2 * os.sysconf("SC_PAGESIZE")  # of an expert's parts; neighbours share pages
    assert used * one - ends <= n_read <= used * one + ends
    assert waited < used, "products found pages on their way, and began to read none themselves"
    assert next(tokens) == expected[6]


def test_long_prompts_are_left_to_linux(llama_of, gguf):
    path = in_single_pages(gguf("moe-mtp", **NO_MTP))
    llm = llama_of("moe-mtp", NO_MTP, speculation="off", expert_readahead=True)
    prompt = [5 + i % 200 for i in range(128)]
    llm.eval(prompt)
    llm.reset()
    page_out(path)
    before = llm.readahead_stats
    llm.eval(prompt)
    after = llm.readahead_stats
    assert after.steps == before.steps + 1
    assert after.experts_used > before.experts_used
    assert after.experts_read == before.experts_read


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can be another user")
def test_of_a_file_that_is_anothers(llama_of, gguf):
    """Linux does not say which of its pages are in memory: all are asked for, and none is counted."""
    plain = llama_of("moe-mtp", NO_MTP, speculation="off")
    expected = text(plain)
    plain.close()  # a page that is mapped twice stays
    path = in_single_pages(gguf("moe-mtp", **NO_MTP))
    llm = llama_of("moe-mtp", NO_MTP, speculation="off")
    os.seteuid(65534)
    try:
        llm._readahead = ExpertReadahead(llm._model.model)
    finally:
        os.seteuid(0)
    page_out(path)
    assert text(llm) == expected
    assert llm.readahead_stats.experts_used > 0
    assert llm.readahead_stats.experts_read == llm.readahead_stats.bytes_read == 0


def test_a_second_one_of_a_model(llama_of):
    llm = llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=True)
    with pytest.raises(OptionError, match="read ahead already"):
        ExpertReadahead(llm.model)
    text(llm)
    assert llm.readahead_stats.steps > 0


def test_two_models_and_one_that_goes(llama_of):
    """A layer is found by its tensors: those of a model that is gone must not be."""
    first, second = (
        llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=True, seed=seed) for seed in (1, 2)
    )
    expected = text(first)
    first.close()
    assert first.readahead_stats is None
    assert text(second) == expected
    third = llama_of("moe-mtp", SHAPE, speculation="off")
    assert text(third) == expected
    assert third.readahead_stats is None
    assert second.readahead_stats.steps >= N


def test_without_a_mapped_file(llama_of):
    with pytest.raises(UnsupportedError, match="no experts in a mapped file"):
        llama_of("moe-mtp", SHAPE, expert_readahead=True, use_mmap=False)
    with pytest.raises(UnsupportedError, match="no experts in a mapped file"):
        llama_of("dense-plain", {}, expert_readahead=True)


@pytest.mark.parametrize("given", ["yes", 2, 0.5, []])
def test_no_bool(llama_of, given):
    with pytest.raises(OptionError, match="expected True, False or None"):
        llama_of("moe-mtp", SHAPE, expert_readahead=given)


@pytest.mark.parametrize(("free", "on"), [(1 << 10, True), (1 << 50, False), (None, False)])
def test_by_itself(llama_of, monkeypatch, free, on, recwarn):
    """Where the model is larger than the memory that is left."""
    monkeypatch.setattr(memory, "available", lambda: free)
    llm = llama_of("moe-mtp", SHAPE, speculation="off")
    assert (llm.readahead_stats is not None) is on
    assert any("read from its file as they are chosen" in str(w.message) for w in recwarn) is on
    off = llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=False)
    assert off.readahead_stats is None


def test_a_pickled_one_reads_ahead(llama_of):
    llm = llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=True)
    again = pickle.loads(pickle.dumps(llm))
    assert text(again) == text(llm)
    assert again.readahead_stats.steps > 0
    again.close()
    assert again.readahead_stats is None


def test_one_that_goes_unclosed(llama_of):
    llm = llama_of("moe-mtp", SHAPE, speculation="off", expert_readahead=True)
    again = pickle.loads(pickle.dumps(llm))
    expected = text(again)
    del again
    gc.collect()
    assert text(llm) == expected


def test_a_model_larger_than_memory(gguf):
    """190 MB of experts in 200 MiB: steps find some missing, and have them read together."""
    model = Path(gguf("moe-mtp", experts=64, top_k=4, width=256, expert_ff=480, types="F16", mtp=False))
    limit = 200 << 20
    try:
        found = [short_memory.turn(model, on, limit, 24, seed=1) for on in (False, True)]
    except NoGroupError as error:
        pytest.skip(str(error))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["bytes_read"] is None
    assert found[1]["bytes_read"] > 0
