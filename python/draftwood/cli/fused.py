"""Which layers of a file are made of fused parts on a CUDA card; which parts stay llama.cpp's, and why.

Told from tensors alone, for the graphs that llama.cpp builds of two architectures. The rules are those of
src/decode and src/ops/layer-parts. What a context really has is `speculation_stats.fused_parts`.
Tests: tests/unit/test_fused.py (rules, words), tests/model/test_fused_layers.py (files and their graphs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they would load the library
    from draftwood.engine.engine import ModelInfo
    from draftwood.load.header import Tensor

PRODUCT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
FLOATS = ("F32", "F16", "BF16")
MAX_WIDTH, MAX_EXPERTS, MAX_USED = 16384, 512, 16
STATE_SIZES = (32, 64, 128)
TAPS = (4,)
ARCHITECTURES = ("qwen35", "qwen35moe")

# part -> weights that it multiplies by, and what it reads as F32
_DELTA_NET = {
    "delta inputs": ("attn_qkv attn_gate ssm_beta ssm_alpha", "attn_norm ssm_dt.bias ssm_a"),
    "delta front": ("", "ssm_conv1d ssm_norm"),
    "delta step": ("", "ssm_norm"),
    "delta output": ("ssm_out", "ssm_norm"),
}
_ATTENTION = {
    "attention inputs": ("attn_q attn_k attn_v", "attn_norm"),
    "attention output": ("attn_output", "attn_q_norm"),
}
_ROUTERS = "ffn_gate_inp ffn_gate_inp_shexp"
_OTHERS = f"ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp {_ROUTERS}"
_DENSE = ("ffn_gate ffn_up ffn_down", "post_attention_norm")
_EXPERTS = (f"ffn_gate_exps ffn_up_exps {_OTHERS}", "post_attention_norm")
_MERGED = (f"ffn_gate_up_exps {_OTHERS}", "post_attention_norm")
_ALIKE = (
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
    ("ffn_gate_inp", "ffn_gate_inp_shexp"),
)

# tensor -> values that a row may have
_LENGTHS: dict[str, tuple[int, ...] | range] = {
    **dict.fromkeys(("attn_norm", "post_attention_norm", "output_norm"), range(32, MAX_WIDTH + 1, 32)),
    **dict.fromkeys(("attn_q_norm", "ffn_down", "ffn_down_exps", "ffn_down_shexp"), range(32, 2**31, 32)),
    "ssm_conv1d": TAPS,
    "ssm_norm": STATE_SIZES,
}

Reason = tuple[str, str]
"""Words, and the tensor that another type would mend or ""."""


def told(tensors: dict[str, Tensor] | None, info: ModelInfo) -> dict[str, Any]:
    """Return {"layers": n, "declined": [{"part", "layers", "reason", "mend"}], "reason": why it is not told}.

    The output head is in no layer. tensors: None for one of several files.
    """
    if tensors is None or info.architecture not in ARCHITECTURES:
        reason = "one of several files" if tensors is None else f"architecture '{info.architecture}'"
        return {"layers": 0, "declined": [], "reason": reason}
    head = ("output" if "output" in tensors else "token_embd", "output_norm")
    found: dict[tuple[str, Reason], list[int]] = {}
    for of_head in _reasons(head, tensors):
        found["output head", of_head] = []
    for i in range(info.n_layers):
        prefix = f"blk.{i}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        for key in _of_layer(own, info):
            found.setdefault(key, []).append(i)
    declined = [
        {"part": part, "layers": layers, "reason": reason, "mend": mend}
        for (part, (reason, mend)), layers in found.items()
    ]
    return {"layers": info.n_layers, "declined": declined, "reason": ""}


def _of_layer(own: dict[str, Tensor], info: ModelInfo) -> Iterator[tuple[str, Reason]]:
    parts = dict(_DELTA_NET if "ssm_conv1d" in own else _ATTENTION)
    if info.architecture == "qwen35moe":
        parts["experts"] = _MERGED if "ffn_gate_up_exps" in own else _EXPERTS
        if info.n_experts > MAX_EXPERTS:
            yield "experts", (f"there are {info.n_experts}; expected {MAX_EXPERTS} at most", "")
        if info.n_experts_used > MAX_USED:
            yield "experts", (f"a token has {info.n_experts_used}; expected {MAX_USED} at most", "")
    else:
        parts["feed forward"] = _DENSE
    for name, part in parts.items():
        yield from ((name, reason) for reason in _reasons(part, own))


def _reasons(part: tuple[str, str], own: dict[str, Tensor]) -> Iterator[Reason]:
    products, f32 = (names.split() for names in part)
    missing = [name for name in (*products, *f32) if name not in own]
    if missing:
        yield f"the file has no {', '.join(missing)}", ""
        return
    for name in (*products, *f32):
        types = FLOATS if name in _ROUTERS.split() else PRODUCT_TYPES if name in products else ("F32",)
        kind, length = own[name].type, own[name].shape[0]
        if kind not in types:
            what = "fused products take" if types == PRODUCT_TYPES else "expected"
            yield f"{name} is {kind}; {what} {', '.join(types)}", name
        if length not in _LENGTHS.get(name, (length,)):
            yield f"rows of {name} have {length} values; expected {_lengths(_LENGTHS[name])}", ""
    for a, b in _ALIKE:
        if a in products and own[a].type != own[b].type:
            yield f"{a} is {own[a].type} and {b} is {own[b].type}; expected one type", b


def _lengths(allowed: tuple[int, ...] | range) -> str:
    if isinstance(allowed, range):
        most = f", {MAX_WIDTH} at most" if allowed.stop == MAX_WIDTH + 1 else ""
        return f"a multiple of 32{most}"
    return ", ".join(str(n) for n in allowed)


def lines(found: dict[str, Any]) -> list[str]:
    """Return in words what `told` found: all in one line, or a line for each reason and a hint."""
    if found["reason"]:
        return [f"not told for {found['reason']}; speculation_stats.fused_parts counts those of a context"]
    n, declined = found["layers"], found["declined"]
    if not declined:
        return [f"all {n} (on a CUDA card)"]
    whole = n - len({i for each in declined for i in each["layers"]})
    said = [f"{whole} of {n} (on a CUDA card); llama.cpp computes these parts:"]
    for each in declined:
        of = f" of layer{'s' * (len(each['layers']) > 1)} {_ranges(each['layers'])}" if each["layers"] else ""
        said.append(f"{each['part']}{of}: {each['reason']}")
    mends = dict.fromkeys(each["mend"] for each in declined if each["mend"])
    if mends:
        flags = " ".join(f"--tensor-type {name}=TYPE" for name in mends)
        said.append(f"hint: for more speed, llama-quantize {flags}; the text is right either way")
    return said


def _ranges(numbers: list[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(str(n) for n in run) for run in runs)
