"""Write a DFlash drafter as a `dflash` GGUF, and read one back.

Matrices become F16, norms stay F32; embedding and output are the target's and are not in the file, the
vocabulary is. Facts of names and keys: conversion/qwen.py and src/models/dflash.cpp at the pin.
Must not know: how the weights were trained. Test: tests/model/test_dflash_parity.py.
Usage: python -m tools.tiny_moe.dflash_export CHECKPOINT_FOLDER TOKENIZER_JSON OUT.gguf
"""

from __future__ import annotations

from pathlib import Path

import gguf
import torch

from tools.tiny_moe import gguf_file
from tools.tiny_moe.dflash import DRAFT, DFlash, DraftShape
from tools.tiny_moe.gguf_file import Array, stored

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
    gguf_file.add_about(w, s, "tiny-moe DFlash", "A small DFlash drafter for tiny-moe, for tests and demos.")
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.ff)
    gguf_file.add_attention(w, s, s.kv_heads, s.head_dim)
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
    gguf_file.add_tokenizer(w, tokenizer)
    for name, value in state.items():
        w.add_tensor(gguf_name(name), stored(name, value))
    return gguf_file.finish(w, out, LIMIT)


def load(path: Path, s: DraftShape = DRAFT) -> DFlash:
    """Build the torch drafter with the weights of a GGUF written by `export`, every one used."""
    model = DFlash(s).eval()
    names = {gguf_name(n): n for n in model.state_dict()}
    model.load_state_dict({names[n]: torch.from_numpy(v) for n, v in gguf_file.read_tensors(path).items()})
    return model


if __name__ == "__main__":
    gguf_file.run(__doc__, export)
