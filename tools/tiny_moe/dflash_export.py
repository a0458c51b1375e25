"""Write a DFlash drafter as a `dflash` GGUF, and read one back.

Matrices become F16, norms stay F32; embedding and output are the target's and are not in the file, the
vocabulary is. Facts of names and keys: conversion/qwen.py and src/models/dflash.cpp at the pin.
Must not know: how the weights were trained. Test: tests/model/test_dflash_parity.py.
Usage: python -m tools.tiny_moe.dflash_export CHECKPOINT_FOLDER TOKENIZER_JSON OUT.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch

from tools.tiny_moe.checkpoint import load_state
from tools.tiny_moe.dflash import DRAFT, DFlash, DraftShape
from tools.tiny_moe.export import Array, add_tokenizer, stored

ARCH = "dflash"
LIMIT = 5_000_000
OUTER = {
    "fc.weight": "fc.weight",
    "enc_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
}
BLOCK = {
    "attn_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a parameter; one that is not the drafter's raises KeyError."""
    if name in OUTER:
        return OUTER[name]
    _, index, part, kind = name.split(".")
    return f"blk.{index}.{BLOCK[part]}.{kind}"


def add_shape(w: gguf.GGUFWriter, s: DraftShape, mrope: bool) -> None:
    """Write the hyperparameters; `mrope` marks a drafter of an M-RoPE target, as llama.cpp's converter does.

    Such a drafter rotates by the first of four positions, so only the way it is fed differs.
    """
    w.add_name("tiny-moe DFlash")
    w.add_license("mit")
    w.add_description("A small DFlash drafter for tiny-moe, for tests and demos.")
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.ff)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_dim)
    w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.rope_theta)
    w.add_rope_dimension_count(s.head_dim)
    if mrope:
        w.add_rope_dimension_sections([s.head_dim // 2, 0, 0, 0])
    if y := s.yarn:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(y.factor)
        w.add_rope_scaling_orig_ctx_len(y.original)
        w.add_rope_scaling_yarn_beta_fast(y.beta_fast)
        w.add_rope_scaling_yarn_beta_slow(y.beta_slow)
    w.add_causal_attention(False)
    w.add_uint32(f"{ARCH}.block_size", s.block)
    w.add_array(f"{ARCH}.target_layers", list(s.taps))
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def export(
    state: dict[str, Array], tokenizer: Path, out: Path, s: DraftShape = DRAFT, *, mrope: bool = True
) -> int:
    """Write the GGUF of a state dict of f32 arrays and return its bytes; over `LIMIT` is an error."""
    w = gguf.GGUFWriter(out, ARCH)
    add_shape(w, s, mrope)
    add_tokenizer(w, tokenizer)
    for name, value in state.items():
        w.add_tensor(gguf_name(name), stored(name, value))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    size = out.stat().st_size
    if size > LIMIT:
        raise ValueError(f"`{out}` has {size} bytes; at most {LIMIT} may be committed")
    return size


def load(path: Path, s: DraftShape = DRAFT) -> DFlash:
    """Build the torch drafter with the weights of a GGUF written by `export`, every one used."""
    tensors = {t.name: np.array(t.data, np.float32) for t in gguf.GGUFReader(path).tensors}
    model = DFlash(s).eval()
    names = {gguf_name(n): n for n in model.state_dict()}
    model.load_state_dict({names[n]: torch.from_numpy(v) for n, v in tensors.items()})
    return model


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
