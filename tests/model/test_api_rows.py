"""Rows of the compatibility table that no other file tests: drafting on and off give the same.

tests/compat/test_table.py lists every row with its tests. "On" accepts about two of three drafts here.
"""

from __future__ import annotations

import ctypes
import json

import gguf
import numpy as np
import pytest
from draftwood import UnsupportedError
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp.llama import LogitsProcessorList, MinTokensLogitsProcessor

from tests.model.texts import P, text

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
        },
    },
}


def bare(out):
    """A result or its chunks without what is new at each call."""
    parts = [out] if isinstance(out, dict) else list(out)
    ids = [part.pop("id").removeprefix("chat") for part in parts]
    for part in parts:
        part.pop("created")
        part.pop("timings", None)
    return json.loads(json.dumps(parts).replace(ids[0], "ID"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forced_tool(on, off, stream, temperature):
    asked = {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "temperature": temperature,
        "max_tokens": 100,
        "stream": stream,
    }
    messages = [{"role": "user", "content": "weather?"}]
    results = [bare(llm.create_chat_completion(messages, **asked)) for llm in (on, off)]
    assert results[0] == results[1]
    if not stream:
        call = results[0][0]["choices"][0]["message"]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]).keys() == {"place", "days"}
    assert on.speculation_stats.rounds > 0


@pytest.mark.parametrize("least", [0, 1, 4, 9])
def test_min_tokens_and_bias(on, off, least):
    """A bias that ends at once, and a processor that forbids the end: the server passes both."""
    eos = off.token_eos()
    results = []
    for llm in (on, off):
        out = llm.create_completion(
            "one two",
            max_tokens=30,
            temperature=0.0,
            logit_bias={str(eos): 1000.0},
            logits_processor=LogitsProcessorList([MinTokensLogitsProcessor(least, eos)]),
        )
        results.append(bare(out))
    assert results[0] == results[1]
    assert results[0][0]["choices"][0]["finish_reason"] == "stop"
    assert results[0][0]["usage"]["completion_tokens"] == least


def write_lora(path, n_embd=256, n_vocab=384, rank=4):
    """An adapter of the output layer, strong enough to change the text."""
    chance = np.random.default_rng(3)
    out = gguf.GGUFWriter(path, "qwen35moe")
    out.add_string("general.type", "adapter")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", float(rank))
    out.add_tensor("output.weight.lora_a", chance.standard_normal((rank, n_embd)).astype(np.float32))
    out.add_tensor("output.weight.lora_b", chance.standard_normal((n_vocab, rank)).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_lora(llama, off, tmp_path):
    write_lora(tmp_path / "lora.gguf")
    settings = {"lora_path": str(tmp_path / "lora.gguf"), "lora_scale": 0.1}
    a, b = llama(speculation="mtp", **settings), llama(speculation="off", **settings)
    for temp in (0.0, 0.8):
        assert text(a, 60, temp=temp) == text(b, 60, temp=temp)
    a.reset()
    assert text(a, 40) != text(off, 40), "the adapter acts"
    assert a.speculation_stats.rounds > 0


def test_embeddings(llama):
    inputs = ["one two", "three", "one two three four"]
    auto, off = llama(embedding=True), llama(embedding=True, speculation="off")
    found = [
        np.array([row["embedding"] for row in llm.create_embedding(["x"] * 2)["data"]], object)
        for llm in (auto, off)
    ]
    assert found[0].tolist() == found[1].tolist()
    assert auto.embed(inputs) == off.embed(inputs)
    for normalize in (False, True):
        each = [auto.embed(text, normalize=normalize, return_count=True) for text in inputs]
        rows, count = auto.embed(inputs, normalize=normalize, return_count=True)
        assert rows == [found for found, _ in each]
        assert count == sum(n for _, n in each)
    pooled = llama(embedding=True, pooling_type=1)
    assert pooled.embed(inputs) == [pooled.embed(text) for text in inputs]
    assert auto.speculation == "off"
    assert "embedding=True contexts generate no text" in auto.speculation_reason
    with pytest.raises(UnsupportedError, match="embedding=True"):
        llama(embedding=True, speculation="mtp")


def decode_image(llm, n_positions):
    """What a multimodal handler does: rows of embeddings on the bare context, then n_tokens set past them."""
    n_embd = llm.n_embd()
    batch = native.llama_batch_init(4 * n_positions, n_embd, 1)  # M-RoPE: four sections of positions
    rows = np.random.default_rng(5).standard_normal((n_positions, n_embd)).astype(np.float32)
    ctypes.memmove(batch.embd, rows.ctypes.data, rows.nbytes)
    batch.n_tokens = n_positions
    for i in range(n_positions):
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, False
    for i in range(4 * n_positions):
        batch.pos[i] = llm.n_tokens + i % n_positions
    assert native.llama_decode(llm.ctx, batch) == 0
    native.llama_batch_free(batch)
    llm.n_tokens += n_positions


def image_handler(llama, messages, **settings):
    """As Llava15ChatHandler: evaluate by itself, then complete from what input_ids hold, junk included."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.eval(P[:6])
    llama.input_ids[llama.n_tokens : llama.n_tokens + 5] = -1
    decode_image(llama, 5)
    llama.eval(P[6:])
    prompt = llama.input_ids[: llama.n_tokens].tolist()
    keys = ("max_tokens", "temperature", "stream", "seed")
    return llama.create_completion(prompt=prompt, **{key: settings[key] for key in keys})


@pytest.mark.parametrize("stream", [False, True])
def test_multimodal_handler(llama, stream):
    handled = [llama(speculation=name, chat_handler=image_handler) for name in ("mtp", "off")]
    for temperature in (0.0, 0.8):
        asked = {"max_tokens": 30, "temperature": temperature, "stream": stream, "seed": 4}
        messages = [{"role": "user", "content": "what is it?"}]
        results = [bare(llm.create_chat_completion(messages, **asked)) for llm in handled]
        assert results[0] == results[1]
        assert len(json.dumps(results[0])) > 200
        assert text(handled[0], 20) == text(handled[1], 20), "a plain request afterwards"


def guide(llm, n):
    """guidance: isinstance, then its own cuts, decodes and logits on the bare context."""
    memory = native.llama_get_memory(llm.ctx)
    native.llama_memory_clear(memory, True)
    tokens = list(P)
    todo, at = tokens, 0
    for _ in range(n):
        for start in range(0, len(todo), llm.n_batch):
            chunk = todo[start : start + llm.n_batch]
            array = (ctypes.c_int32 * len(chunk))(*chunk)
            assert native.llama_decode(llm.ctx, native.llama_batch_get_one(array, len(chunk))) == 0
            at += len(chunk)
        logits = np.ctypeslib.as_array(native.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),))
        todo = [int(np.argmax(logits))]
        tokens += todo
    return tokens[len(P) :]


@pytest.mark.parametrize("k", range(7))
def test_guidance_decodes_behind_our_back(on, off, k):
    expected = text(off, 30)
    assert text(on, k) == expected[:k]
    results = [guide(llm, 12) for llm in (on, off)]
    assert results[0] == results[1] == expected[:12]
    assert text(on, 30) == expected, "our bookkeeping was checked against the memory"
    assert text(on, 20, [9, 8, 7]) == text(off, 20, [9, 8, 7])


def test_guidance_cuts_behind_our_back(on, off):
    """It removes cells of the sequence that a generation left."""
    expected = text(off, 30)
    for k in range(1, 8):
        text(on, k)
        native.llama_memory_seq_rm(native.llama_get_memory(on.ctx), 0, 0, -1)
        assert text(on, 30) == expected


def test_a_second_object_of_the_model_is_untouched(llama, off):
    """What one object decodes does not reach another's drafter."""
    a, b = llama(speculation="mtp"), llama(speculation="mtp")
    expected = text(off, 30)
    streams = [a.generate(P, temp=0.0), b.generate(P, temp=0.0)]
    got = [[], []]
    for i in range(30):
        got[i % 2].append(next(streams[i % 2]))
    assert got[0] == got[1] == expected[:15]


def test_tokenizer_of_the_users_own(llama, off):
    from draftwood._llama_cpp.llama_tokenizer import BaseLlamaTokenizer

    class Shifted(BaseLlamaTokenizer):
        def tokenize(self, text, add_bos=True, special=True):
            return [(byte + 1) % 256 for byte in text]

        def detokenize(self, tokens, prev_tokens=None, special=False):
            return bytes(48 + token % 64 for token in tokens)

    on, plain = (llama(speculation=name, tokenizer=Shifted()) for name in ("mtp", "off"))
    for stream in (False, True):
        asked = {"max_tokens": 20, "temperature": 0.0, "stream": stream, "stop": ["~~"]}
        assert bare(on.create_completion("one", **asked)) == bare(plain.create_completion("one", **asked))
    assert on.tokenize(b"ab") == [98, 99]
