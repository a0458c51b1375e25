"""Which layers of a file are made of fused parts on a CUDA card; which parts stay llama.cpp's, and why.

Told from tensors alone, for the graphs that llama.cpp builds of two architectures. The rules are those of
src/decode and src/ops/layer-parts. What a context really has is `speculation_stats.fused_parts`.
Tests: tests/unit/test_fused.py (rules, words), tests/model/test_fused_layers.py (files and their graphs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # at run time they would load the library
    from draftwood.engine.engine import ModelInfo
    from draftwood.load.header import Tensor

DIRECT_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
BYTE_TILED_TYPES = ("Q4_0", "IQ4_NL", "MXFP4", "Q3_K", "IQ3_XXS", "IQ3_S", "IQ2_S", "IQ2_XS", "IQ2_XXS")
PRODUCT_TYPES = (*DIRECT_TYPES, *BYTE_TILED_TYPES)
BYTE_TILE = 256
FLOATS = ("F32", "F16", "BF16")
MAX_WIDTH, MAX_EXPERTS, MAX_USED = 16384, 512, 16
STATE_SIZES = (32, 64, 128)
MAX_HEAD = 256
HEAD_SIZES = (64, 128, 256)
TAPS = (4,)
ARCHITECTURES = ("qwen35", "qwen35moe")

_Lengths = tuple[int, ...] | range
_ROW: _Lengths = range(32, 2**31, 32)
_WIDTH: _Lengths = range(32, MAX_WIDTH + 1, 32)


class _Part(NamedTuple):
    """Weights that a part multiplies by, what it reads as F32, and how many values rows may have."""

    products: str
    f32: str = ""
    rows: dict[str, _Lengths] = {}


_DELTA_NET = {
    "delta inputs": _Part(
        "attn_qkv attn_gate ssm_beta ssm_alpha", "attn_norm ssm_dt.bias ssm_a", {"attn_norm": _WIDTH}
    ),
    "delta front": _Part("", "ssm_conv1d", {"ssm_conv1d": TAPS, "ssm_norm": range(32, MAX_HEAD + 1, 32)}),
    "delta step": _Part("", "", {"ssm_norm": STATE_SIZES}),
    "delta output": _Part("ssm_out", "ssm_norm", {"ssm_norm": _ROW, "attn_norm": _ROW}),
}
_ATTENTION = {
    "attention inputs": _Part("attn_q attn_k attn_v", "attn_norm", {"attn_norm": _WIDTH}),
    "attention heads": _Part("", "attn_q_norm attn_k_norm", {"attn_q_norm": range(2, MAX_HEAD + 1)}),
    "flash attention": _Part("", "", {"attn_q_norm": HEAD_SIZES}),
    "attention output": _Part("attn_output", "", {"attn_q_norm": _ROW, "attn_norm": _ROW}),
}
_DRAFT_INPUT = _Part(
    "nextn.eh_proj", "nextn.enorm nextn.hnorm", {"nextn.hnorm": range(32, MAX_WIDTH // 2 + 1, 32)}
)
_ROUTERS = "ffn_gate_inp ffn_gate_inp_shexp"
_OTHERS = f"ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp {_ROUTERS}"
_NORM = "post_attention_norm"
_DENSE = _Part("ffn_gate ffn_up ffn_down", _NORM, {_NORM: _WIDTH, "ffn_down": _ROW})
_OF_EXPERTS = {_NORM: _WIDTH, "ffn_down_exps": _ROW, "ffn_down_shexp": _ROW}
_EXPERTS = _Part(f"ffn_gate_exps ffn_up_exps {_OTHERS}", _NORM, _OF_EXPERTS)
_MERGED = _Part(f"ffn_gate_up_exps {_OTHERS}", _NORM, _OF_EXPERTS)
_ALIKE = (
    ("ffn_gate", "ffn_up"),
    ("ffn_gate_exps", "ffn_up_exps"),
    ("ffn_gate_shexp", "ffn_up_shexp"),
    ("ffn_gate_inp", "ffn_gate_inp_shexp"),
)
_OF_A_CONTEXT = (
    "attention heads: only with flash attention and a KV cache of F16, F32 or Q8_0; attention: of F16 or Q8_0"
)

Reason = tuple[str, str]
"""Words, and the tensor that llama-quantize would mend or ""."""


def told(tensors: dict[str, Tensor], info: ModelInfo) -> dict[str, Any]:
    """Return {"layers": n, "declined": [{"part", "layers", "reason", "mend"}], "reason": why it is not told}.

    The output head and the norm in front of it are in no layer.
    """
    if info.architecture not in ARCHITECTURES:
        reason = f"architecture '{info.architecture}'"
        return {"layers": 0, "declined": [], "reason": reason}
    width = {"output_norm": _WIDTH}
    ends = {
        "output norm": _Part("", "output_norm", width),
        "output head": _Part("output" if "output" in tensors else "token_embd", "", width),
    }
    found: dict[tuple[str, Reason], list[int]] = {
        (name, why): [] for name, part in ends.items() for why in _reasons(part, tensors)
    }
    by_layer = _by_layer(tensors)
    for i in range(info.n_layers):
        for key in _of_layer(by_layer.get(i, {}), info):
            found.setdefault(key, []).append(i)
    for i, own in by_layer.items():
        if "nextn.eh_proj" in own:
            for why in _reasons(_DRAFT_INPUT, own):
                found.setdefault(("draft input", why), []).append(i)
    declined = [
        {"part": part, "layers": layers, "reason": reason, "mend": mend}
        for (part, (reason, mend)), layers in found.items()
    ]
    return {"layers": info.n_layers, "declined": declined, "reason": ""}


def _by_layer(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return each layer's tensors by their own names."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        block, _, rest = name.partition(".")
        number, _, own = rest.partition(".")
        if block == "blk" and number.isdecimal():
            found.setdefault(int(number), {})[own] = tensor
    return found


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


def _reasons(part: _Part, own: dict[str, Tensor]) -> Iterator[Reason]:
    products, f32 = part.products.split(), part.f32.split()
    missing = [name for name in dict.fromkeys((*products, *f32, *part.rows)) if name not in own]
    if missing:
        yield f"the file has no {', '.join(missing)}", ""
        return
    for name in (*products, *f32):
        is_weights = name in products and name not in _ROUTERS.split()
        types = PRODUCT_TYPES if is_weights else FLOATS if name in products else ("F32",)
        if own[name].type not in types:
            what = "fused products take" if is_weights else "expected"
            yield f"{name} is {own[name].type}; {what} {', '.join(types)}", name if is_weights else ""
        elif own[name].type in BYTE_TILED_TYPES and own[name].shape[0] % BYTE_TILE:
            yield (
                f"rows of {name} have {own[name].shape[0]} values; expected a multiple of {BYTE_TILE} for "
                f"{own[name].type}",
                name,
            )
    for name, allowed in part.rows.items():
        if own[name].shape[0] not in allowed:
            yield f"rows of {name} have {own[name].shape[0]} values; expected {_lengths(allowed)}", ""
    for a, b in _ALIKE:
        if a in products and own[a].type != own[b].type:
            yield (
                f"{a} is {own[a].type} and {b} is {own[b].type}; expected one type",
                "" if b in _ROUTERS else b,
            )


def _lengths(allowed: _Lengths) -> str:
    if not isinstance(allowed, range):
        return ", ".join(str(n) for n in allowed)
    if allowed.step == 1:
        return f"{allowed[0]} to {allowed[-1]}"
    most = f", {allowed[-1]} at most" if allowed is not _ROW else ""
    return f"a multiple of {allowed.step}{most}"


def lines(found: dict[str, Any]) -> list[str]:
    """Return as text what `told` found: that all is fused, or a line for each reason and a hint."""
    if found["reason"]:
        return [f"not told for {found['reason']}; speculation_stats.fused_parts counts those of a context"]
    n, declined = found["layers"], found["declined"]
    if not declined:
        return [f"all {n} (on a CUDA card)", _OF_A_CONTEXT]
    whole = n - len({i for each in declined for i in each["layers"] if i < n})  # then comes an MTP block
    said = [f"{whole} of {n} (on a CUDA card); llama.cpp computes these parts:"]
    for each in declined:
        of = f" of layer{'s' * (len(each['layers']) > 1)} {_ranges(each['layers'])}" if each["layers"] else ""
        said.append(f"{each['part']}{of}: {each['reason']}")
    mends = dict.fromkeys(each["mend"] for each in declined if each["mend"])
    if mends:
        flags = " ".join(f"--tensor-type '{_pattern(name)}=TYPE'" for name in mends)
        said.append(f"hint: for speed, llama-quantize {flags} on the F16 file; the text is right either way")
    return said


def _pattern(name: str) -> str:
    """Return what llama-quantize finds this tensor by, and no other."""
    return rf"{'^' if name in ('output', 'token_embd') else '[.]'}{name}[.]weight"


def _ranges(numbers: list[int]) -> str:
    """Write [0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ", ".join("-".join(str(n) for n in run) for run in runs)
