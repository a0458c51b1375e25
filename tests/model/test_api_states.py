"""States and caches: of another model, another size, damaged, on disk, in a folder that refuses them."""

from __future__ import annotations

import copy
import pickle
import sqlite3

import numpy as np
import pytest
from draftwood import CacheError, StateError
from draftwood._llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache

from tests.model.texts import P, text


def refused(llm, state, words):
    """The state is refused in words, and the context exact afterwards."""
    expected = text(llm)
    with pytest.raises(StateError, match=words):
        llm.load_state(state)
    assert text(llm) == expected
    llm.reset()
    assert text(llm) == expected


@pytest.mark.parametrize("other", ["planted-dense", "moe-mtp", "moe-plain"])
def test_state_of_another_model(llm, llama, other):
    foreign = llama(other)
    text(foreign)
    refused(llm, foreign.save_state(), "saved from another model")


def test_state_without_a_mark_of_another_model(llm, llama):
    """As upstream saved it: llama.cpp notices other shapes."""
    foreign = llama("planted-dense", speculation="off")
    text(foreign)
    state = foreign.save_state()
    del state.draftwood_model
    refused(llm, state, "cannot read")


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_damaged_state(llm, cut):
    text(llm)
    state = llm.save_state()
    broken = copy.copy(state)
    broken.llama_state = state.llama_state[:cut]
    refused(llm, broken, "cannot read")
    llm.load_state(state)
    assert llm.n_tokens == state.n_tokens


def test_state_longer_than_the_context(llm, llama):
    long = llama(speculation=llm.speculation, n_ctx=512)
    text(long, 3, [(7 * i) % 380 for i in range(300)])
    refused(llm, long.save_state(), "state of 302 tokens; this context holds 256")


@pytest.mark.parametrize("settings", [{"n_ctx": 512}, {"n_batch": 64}, {"logits_all": True}], ids=str)
def test_state_of_another_size(llm, llama, settings):
    """Upstream takes the other object's arrays for its own, or fails to copy them."""
    expected = text(llm, 40)
    other = llama(speculation=llm.speculation, **settings)
    text(llm, 10)
    state = llm.save_state()
    other.load_state(state)
    assert len(other.input_ids) == other.n_ctx()
    assert text(other, 30, [*P, *expected[:10]]) == expected[10:]
    prompt = [(7 * i) % 380 for i in range(150)]
    llm.reset()
    text(llm, 1, prompt)
    other.load_state(llm.save_state())
    assert other._input_ids.tolist() == prompt


def test_scores_are_kept(llama):
    llm, other = llama(logits_all=True), llama(logits_all=True)
    text(llm, 10)
    other.load_state(pickle.loads(pickle.dumps(llm.save_state())))
    assert np.array_equal(other._scores, llm._scores)


def complete(llm, prompt):
    return llm.create_completion(prompt, max_tokens=12, temperature=0.0)["choices"]


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("stream", [False, True])
def test_cache(llama, tmp_path, kind, stream):
    on, plain = llama(speculation="mtp"), llama(speculation="off")
    on.set_cache(LlamaRAMCache() if kind == "ram" else LlamaDiskCache(str(tmp_path / "cache")))
    prompts = ["one two", "one two three", "other", "one two three four", "one two"]
    for prompt in prompts:
        if stream:
            chunks = list(on.create_completion(prompt, max_tokens=12, temperature=0.0, stream=True))
            written = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert written == complete(plain, prompt)[0]["text"]
        else:
            assert complete(on, prompt) == complete(plain, prompt)
        plain.reset()
    reply = on.tokenize(b"one two", add_bos=False)
    assert on.cache[reply].n_tokens > len(reply)
    if kind == "disk":
        assert on.cache[reply].n_tokens > len(reply), "a hit leaves the entry where it is"
        on.cache.cache.close()


def test_cache_saves_prompt_work(llama):
    llm = llama(speculation="mtp")
    llm.set_cache(LlamaRAMCache())
    prompt = [(7 * i) % 380 for i in range(60)]
    first = llm.create_completion(prompt, max_tokens=6, temperature=0.0)
    longer = [*prompt, *llm._input_ids.tolist()[60:], 5, 6]
    llm.create_completion("something else", max_tokens=4, temperature=0.0)
    again = llm.create_completion(longer, max_tokens=4, temperature=0.0)
    assert first["timings"]["prompt_n"] == 60
    assert again["timings"]["prompt_n"] <= 4, "the state came from the cache"


def test_cache_folder_that_cannot_be_written(tmp_path):
    """A file is in its place: refused also for root."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CacheError, match=r"cache folder that cannot be written, .*file.*\n\nhint: pass cache_dir="
    ):
        LlamaDiskCache(str(tmp_path / "file"))


@pytest.mark.parametrize("stream", [False, True])
def test_cache_that_fails_when_saving(llm, stream):
    class Full(LlamaRAMCache):
        def __setitem__(self, key, value):
            raise OSError(28, "No space left on device")

    expected = text(llm)
    llm.set_cache(Full())
    with pytest.raises(CacheError, match=r"reply was generated, but .*No space left"):
        list(llm.create_completion("one", max_tokens=4, stream=stream))
    llm.set_cache(None)
    assert text(llm) == expected
    assert llm.create_completion("one", max_tokens=4)["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [OSError, sqlite3.OperationalError])
def test_cache_that_fails_when_looked_up(llm, stream, kind):
    class Broken(LlamaRAMCache):
        def __getitem__(self, key):
            raise kind("disk I/O error")

    expected = text(llm)
    llm.set_cache(Broken())
    with pytest.raises(CacheError, match=r"could not be read from the cache: disk I/O.*\n\nhint: "):
        list(llm.create_completion("one", max_tokens=4, stream=stream))
    llm.set_cache(None)
    assert text(llm) == expected


def test_disk_cache_with_a_state_that_was_cut_off(llm, tmp_path):
    llm.set_cache(LlamaDiskCache(str(tmp_path)))
    complete(llm, "one two")
    (state,) = tmp_path.rglob("*.val")
    for size in (100, 0):
        state.write_bytes(state.read_bytes()[:size])
        with pytest.raises(CacheError, match="could not be read from the cache"):
            complete(llm, "one two three")
    llm.cache.cache.close()


def test_cache_of_another_model(llm, llama):
    cache = LlamaRAMCache()
    foreign = llama("planted-dense")
    foreign.set_cache(cache)
    complete(foreign, "one two")
    expected = text(llm)
    llm.set_cache(cache)
    with pytest.raises(StateError, match="another model"):
        complete(llm, "one two three")
    llm.set_cache(None)
    assert text(llm) == expected
