"""A pool under models and adapters that are not ours: another architecture, LoRA on experts and elsewhere."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from draftwood import Llama
from draftwood.engine.engine import probe_model

from tests.model.rig import PROMPT
from tests.model.texts import seeded

E, K, WIDTH, FF, BLOCKS, HEAD = 16, 3, 64, 64, 3, 16
SMALL = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
N = 48


def write_qwen3moe(path, like):
    """Write a random F32 model of architecture "qwen3moe": attention in all layers, no shared expert."""
    all_fields = gguf.GGUFReader(like).fields
    fields = {name: field for name, field in all_fields.items() if name.startswith("tokenizer.")}
    tokens = fields["tokenizer.ggml.tokens"].contents()
    out = gguf.GGUFWriter(path, "qwen3moe")
    out.add_context_length(4096)
    out.add_embedding_length(WIDTH)
    out.add_block_count(BLOCKS)
    out.add_feed_forward_length(FF)
    out.add_expert_feed_forward_length(FF)
    out.add_expert_count(E)
    out.add_expert_used_count(K)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_key_length(HEAD)
    out.add_value_length(HEAD)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types(fields["tokenizer.ggml.token_type"].contents())
    out.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    out.add_eos_token_id(len(tokens) - 1)
    chance = np.random.default_rng(0)

    def add(name, *shape):
        weight = chance.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        out.add_tensor(f"{name}.weight", weight.astype(np.float32))

    add("token_embd", len(tokens), WIDTH)
    add("output_norm", WIDTH)
    add("output", len(tokens), WIDTH)
    for i in range(BLOCKS):
        add(f"blk.{i}.attn_norm", WIDTH)
        add(f"blk.{i}.ffn_norm", WIDTH)
        add(f"blk.{i}.attn_q", 4 * HEAD, WIDTH)
        add(f"blk.{i}.attn_k", 2 * HEAD, WIDTH)
        add(f"blk.{i}.attn_v", 2 * HEAD, WIDTH)
        add(f"blk.{i}.attn_output", WIDTH, 4 * HEAD)
        add(f"blk.{i}.attn_q_norm", HEAD)
        add(f"blk.{i}.attn_k_norm", HEAD)
        add(f"blk.{i}.ffn_gate_inp", E, WIDTH)
        add(f"blk.{i}.ffn_gate_exps", E, FF, WIDTH)
        add(f"blk.{i}.ffn_up_exps", E, FF, WIDTH)
        add(f"blk.{i}.ffn_down_exps", E, WIDTH, FF)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_lora(path, names, rank=4, architecture="qwen3moe"):
    """Write an adapter of random weights for these tensors, {name: shape as numpy has it}."""
    chance = np.random.default_rng(1)
    out = gguf.GGUFWriter(path, architecture)
    out.add_string("general.type", "adapter")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", float(rank))
    for name, (*experts, rows, columns) in names.items():
        a, b = (*experts, rank, columns), (*experts, rows, rank)
        out.add_tensor(f"{name}.weight.lora_a", chance.standard_normal(a).astype(np.float32) / WIDTH)
        out.add_tensor(f"{name}.weight.lora_b", chance.standard_normal(b).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory, gguf):
    path = tmp_path_factory.mktemp("qwen3moe") / "qwen3moe.gguf"
    write_qwen3moe(path, gguf("moe-mtp"))
    return str(path)


@pytest.fixture
def texts(model):
    """texts(slots, ...) -> greedy and seeded text with so many slots (None: no pool), and the counters."""
    info = probe_model(model)

    def make(slots, **settings):
        n_bytes = None if slots is None else -(-slots * info.expert_bytes // info.n_experts)
        llm = Llama(model, expert_vram=n_bytes, **{**SMALL, "speculation": "off", **settings})
        found = [seeded(llm, N, PROMPT, seed) for seed in (None, 7)]
        stats = llm.expert_stats
        llm.close()
        return found, stats

    return make


@pytest.mark.parametrize("guess", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("slots", [K, E // 2, E - 1])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_another_architecture(texts, slots, speculation, guess):
    plain, _ = texts(None)
    found, stats = texts(slots, speculation=speculation, expert_guess=guess)
    assert found == plain
    assert (stats.layers, stats.slots) == (BLOCKS, slots * BLOCKS)
    assert stats.misses > 0
    assert (stats.guessed > 0) is guess


ADAPTERS = {
    "experts": {
        "blk.1.ffn_gate_exps": (E, FF, WIDTH),
        "blk.1.ffn_up_exps": (E, FF, WIDTH),
        "blk.1.ffn_down_exps": (E, WIDTH, FF),
    },
    "attention": {"blk.0.attn_q": (4 * HEAD, WIDTH), "blk.2.attn_v": (2 * HEAD, WIDTH)},
    "a router": {"blk.1.ffn_gate_inp": (E, WIDTH)},
}


@pytest.mark.parametrize("guess", [False, True], ids=["", "guesses"])
@pytest.mark.parametrize("what", ADAPTERS)
def test_an_adapter(texts, tmp_path, what, guess):
    """It is read from where it lies: adapters of experts by their own numbers, not by slots."""
    path = tmp_path / "lora.gguf"
    write_lora(path, ADAPTERS[what])
    lora = {"lora_path": str(path), "lora_scale": 1.0}
    without, _ = texts(None)
    plain, _ = texts(None, **lora)
    assert plain != without
    for slots in (K, E // 2):
        found, stats = texts(slots, expert_guess=guess, **lora)
        assert found == plain, slots
        assert stats.misses > 0
