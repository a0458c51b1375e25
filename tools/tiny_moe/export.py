"""Write a tiny-moe checkpoint as a `qwen35moe` GGUF with one nextn block.

Matrices become F16; vectors, the router and the convolution stay F32. Facts of names and layouts:
conversion/qwen.py and src/models/qwen35moe.cpp at the pin.
Must not know: how the weights were trained. Test: tests/model/test_parity.py.
Usage: python -m tools.tiny_moe.export CHECKPOINT_FOLDER TOKENIZER_JSON OUT.gguf
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from tools.tiny_moe import gguf_file
from tools.tiny_moe.gguf_file import Array, stored
from tools.tiny_moe.model import TINY, Shape, TinyMoe

ARCH = "qwen35moe"
LIMIT = 24_000_000

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


def state_of(path: Path, s: Shape = TINY) -> dict[str, Array]:
    """Read a GGUF written by `export` back into a state dict of f32 arrays: the inverse of `weights`."""
    tensors = gguf_file.read_tensors(path)
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
    gguf_file.add_about(
        w, s, "tiny-moe", "A small Qwen3.5-MoE with one trained MTP block, for tests and demos."
    )
    w.add_block_count(s.layers + 1)
    w.add_nextn_predict_layers(1)
    w.add_full_attention_interval(s.interval)
    gguf_file.add_attention(w, s, 1, s.rotary)
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


def export(state: dict[str, Array], tokenizer: Path, out: Path, s: Shape = TINY) -> int:
    """Write the GGUF of a state dict and return its size in bytes; over `LIMIT` is an error."""
    w = gguf.GGUFWriter(out, ARCH)
    add_shape(w, s)
    gguf_file.add_tokenizer(w, tokenizer)
    for name, value in weights(state, s):
        w.add_tensor(name, value)
    return gguf_file.finish(w, out, LIMIT)


if __name__ == "__main__":
    gguf_file.run(__doc__, export)
