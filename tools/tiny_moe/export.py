"""Write a tiny-moe checkpoint as a `qwen35moe` GGUF with one nextn block.

Matrices become F16 (the checkpoint already holds F16 values, so nothing is lost); vectors, the router and the
convolution stay F32. Facts of names and layouts: conversion/qwen.py and src/models/qwen35moe.cpp at the pin.
Must not know: how the weights were trained. Test: tests/model/test_parity.py.
Usage: python -m tools.tiny_moe.export CHECKPOINT_FOLDER TOKENIZER_JSON OUT.gguf
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tools.tiny_moe.checkpoint import is_matrix, load_state
from tools.tiny_moe.model import TINY, Shape, TinyMoe

ARCH = "qwen35moe"
LIMIT = 24_000_000
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")

# Names inside one block, transformers' to GGUF's.
BLOCK = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "mtp.fc.weight": "blk.{mtp}.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.{mtp}.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.{mtp}.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.{mtp}.nextn.shared_head_norm.weight",
}
Array = npt.NDArray[np.float32]


def block_of(name: str, s: Shape) -> str:
    """Return the GGUF prefix of a parameter's block; the MTP block comes after the trunk's."""
    owner, _, rest = name.partition("layers.")
    index = int(rest.partition(".")[0])
    return f"blk.{s.layers + index if owner == 'mtp.' else index}."


def gguf_name(name: str, s: Shape) -> str:
    """Return the GGUF name of a parameter; one that is not the model's raises KeyError."""
    if name in OUTER:
        return OUTER[name].format(mtp=s.layers)
    return block_of(name, s) + BLOCK[name.partition("layers.")[2].partition(".")[2]]


def is_offset(name: str) -> bool:
    """Tell whether a parameter is a norm weight kept as an offset from one: all but the gated norm."""
    return (
        name.split(".")[-2].endswith(("norm", "norm_embedding", "norm_hidden")) and "linear_attn" not in name
    )


def weights(state: dict[str, Array], s: Shape) -> Iterator[tuple[str, npt.NDArray[np.floating]]]:
    """Yield (GGUF name, row-major array) for every entry of a state dict of f32 arrays.

    A foreign name raises KeyError. With one key head the value heads are already in ggml's order, so nothing
    is permuted.
    """
    for name, value in state.items():
        if is_offset(name):
            value = value + 1
        if name.endswith("A_log"):
            value = -np.exp(value)
        if name.endswith("gate_up_proj"):
            half = value.shape[1] // 2
            yield block_of(name, s) + "ffn_gate_exps.weight", stored(name, value[:, :half])
            yield block_of(name, s) + "ffn_up_exps.weight", stored(name, value[:, half:])
        else:
            yield gguf_name(name, s), stored(name, value)


def stored(name: str, value: Array) -> npt.NDArray[np.floating]:
    """Give the array its type and shape in the file."""
    if is_matrix(name, value):
        half = value.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), value):
            raise ValueError(
                f"`{name}` holds values that F16 cannot; expected a checkpoint rounded by train.py"
            )
        return np.ascontiguousarray(half)
    return np.ascontiguousarray(value.squeeze() if value.ndim > 1 else value, dtype=np.float32)


def state_of(path: Path, s: Shape = TINY) -> dict[str, Array]:
    """Read a GGUF written by `export` back into a state dict of f32 arrays: the inverse of `weights`."""
    tensors = {t.name: np.array(t.data, np.float32) for t in gguf.GGUFReader(path).tensors}
    out = {}
    for name, like in TinyMoe(s).state_dict().items():
        if name.endswith("gate_up_proj"):
            block = block_of(name, s)
            gate, up = tensors[block + "ffn_gate_exps.weight"], tensors[block + "ffn_up_exps.weight"]
            value = np.concatenate([gate, up], 1)
        else:
            value = tensors[gguf_name(name, s)].reshape(tuple(like.shape))
        if name.endswith("A_log"):
            value = np.log(-value)
        out[name] = value - 1 if is_offset(name) else value
    return out


def add_shape(w: gguf.GGUFWriter, s: Shape) -> None:
    """Write the architecture's hyperparameters."""
    w.add_name("tiny-moe")
    w.add_license("mit")
    w.add_description("A small Qwen3.5-MoE with one trained MTP block, for tests and demos.")
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)
    w.add_block_count(s.layers + 1)
    w.add_nextn_predict_layers(1)
    w.add_full_attention_interval(s.interval)
    w.add_head_count(s.heads)
    w.add_head_count_kv(1)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.rope_theta)
    w.add_rope_dimension_count(s.rotary)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    w.add_expert_count(s.experts)
    w.add_expert_used_count(s.top_k)
    w.add_expert_feed_forward_length(s.expert_ff)
    w.add_expert_shared_feed_forward_length(s.shared_ff)
    w.add_ssm_conv_kernel(s.conv)
    w.add_ssm_state_size(s.delta_dim)
    w.add_ssm_group_count(1)
    w.add_ssm_time_step_rank(s.delta_heads)
    w.add_ssm_inner_size(s.delta_heads * s.delta_dim)
    w.add_vocab_size(s.vocab)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def add_tokenizer(w: gguf.GGUFWriter, tokenizer: Path) -> None:
    """Write vocabulary, merges and special tokens of a tokenizer.json that splits as `qwen35`."""
    spec = json.loads(tokenizer.read_text("utf-8"))
    ids = spec["model"]["vocab"]
    special = {t["content"]: t["id"] for t in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen35")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]])
    w.add_eos_token_id(special["<|im_end|>"])
    w.add_eot_token_id(special["<|im_end|>"])
    w.add_pad_token_id(special["<|endoftext|>"])
    w.add_mask_token_id(special["<|mask|>"])
    w.add_add_bos_token(False)
    w.add_add_eos_token(False)
    w.add_chat_template(CHAT_TEMPLATE.read_text("utf-8"))


def export(state: dict[str, Array], tokenizer: Path, out: Path, s: Shape = TINY) -> int:
    """Write the GGUF of a state dict and return its size in bytes; over `LIMIT` is an error."""
    w = gguf.GGUFWriter(out, ARCH)
    add_shape(w, s)
    add_tokenizer(w, tokenizer)
    for name, value in weights(state, s):
        w.add_tensor(name, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    size = out.stat().st_size
    if size > LIMIT:
        raise ValueError(f"`{out}` has {size} bytes; at most {LIMIT} may be committed")
    return size


def main() -> None:
    """Run from the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("tokenizer", type=Path)
    p.add_argument("out", type=Path)
    a = p.parse_args()
    state = {k: v.numpy() for k, v in load_state(a.checkpoint).items()}
    print(f"{a.out}: {export(state, a.tokenizer, a.out):,} bytes")


if __name__ == "__main__":
    main()
