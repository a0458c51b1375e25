"""What a synthetic model looks like: its fields, their limits, the named presets. Knows no tensors, no files.

Limits are those of the pin's graphs (llama.cpp `src/models/qwen35.cpp`, `qwen35moe.cpp`,
`delta-net-base.cpp`, `src/llama-model.cpp`): what breaks one there ends the process, so it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

ARCHS = ("qwen35moe", "qwen35")
ROUTINGS = ("even", "text", "loose")
MIN_TEXT_WIDTH = 128


class SynthError(ValueError):
    """A model that the pin cannot load or this tool cannot write: what was found, expected, and the fix."""

    def __init__(self, found: str, expected: str, hint: str) -> None:
        super().__init__(f"{found}, expected {expected}.\n\nhint: {hint}")


# fmt: off
@dataclass(frozen=True, slots=True)
class SynthSpec:
    """Describe one synthetic model; the defaults are a small mixture of experts with an MTP block.

    Expert fields count for qwen35moe only, `ff` for qwen35 only. Sizes are in elements.
    Source: llama.cpp `src/models/qwen35moe.cpp`, load_arch_hparams and load_arch_tensors.
    Test: tests/unit/test_synth_shapes.py, tests/model/test_synth_gguf.py.
    """

    arch: str = "qwen35moe"
    layers: int = 4               # trunk blocks, at least attention_interval; the MTP block comes on top
    mtp: bool = True              # one NextN block behind the trunk (the pin runs one at most)
    width: int = 256              # residual stream
    heads: int = 4                # query heads of attention blocks
    kv_heads: int = 2             # divides heads
    head_size: int = 64           # even
    rope_dims: int = 0            # even, at most head_size; 0: a quarter of it
    attention_interval: int = 4   # every n-th block is attention, the others are delta nets; at least 2
    state_size: int = 64          # delta-net head; CUDA has kernels for 16, 32, 64, 128
    key_heads: int = 2            # delta-net query and key heads; divides value_heads
    value_heads: int = 4
    conv: int = 4                 # taps of the causal convolution; CUDA has kernels for 3, 4, 5, 9, 15
    experts: int = 8
    top_k: int = 2
    expert_ff: int = 64
    shared_ff: int = 64           # the shared expert is not optional at the pin
    ff: int = 512                 # dense feed-forward
    merged_experts: bool = False  # one ffn_gate_up_exps tensor instead of two
    tied: bool = False            # no output.weight, the embedding serves as head
    nextn_norm: bool = True       # own shared_head_norm; without it the MTP block takes output_norm
    nextn_embed: bool = False     # own embed_tokens for the MTP block
    nextn_head: bool = False      # own shared_head_head for the MTP block
    types: str = "F16"            # "Q4_K", or with exceptions "output.weight=Q6_K,*attn_v*=Q6_K,Q4_K"
    vocab: int = 384              # tokens; with vocab_file at least that file's, the rest padding
    vocab_file: str = ""          # GGUF to copy tokenizer.* from; empty: the built-in byte-level BPE
    context: int = 4096           # trained context that the file claims
    planted: float = 0.0          # 0: off; to 1: how much of the next token the current one decides, so that
                                  # MTP drafts are accepted (0.5: about two of three)
    routing: str = "even"         # "text": experts as on real text; "loose": less local; routing.py
    seed: int = 0                 # of every weight; same spec, same bytes
    # fmt: on

    @property
    def is_moe(self) -> bool:
        """Tell whether blocks hold routed experts."""
        return self.arch == "qwen35moe"

    @property
    def rotated(self) -> int:
        """Return the number of rotated dimensions of a head, 0 replaced by its meaning."""
        return self.rope_dims or max(2, self.head_size // 8 * 2)

    @property
    def noise(self) -> float:
        """Return how loud all planted blocks together are beside an embedding of one."""
        return (1 - self.planted) / self.planted if self.planted else 0.0

    def is_attention(self, block: int) -> bool:
        """Tell whether block `block` (from 0, the MTP block last) is attention rather than a delta net."""
        return block >= self.layers or (block + 1) % self.attention_interval == 0


MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS, the MTP block included
RANGES = {
    "layers": (2, MAX_BLOCKS - 1), "width": (8, 1 << 16), "heads": (1, 1024), "kv_heads": (1, 1024),
    "head_size": (2, 1024), "rope_dims": (0, 1024), "attention_interval": (2, MAX_BLOCKS - 1),
    "state_size": (1, 512), "key_heads": (1, 1024), "value_heads": (1, 1024), "conv": (2, 32),
    "vocab": (1, 1 << 20), "context": (64, 1 << 24), "seed": (0, (1 << 63) - 1),
}  # fmt: skip
MOE_RANGES = {"experts": (1, 1024), "top_k": (1, 1024), "expert_ff": (1, 1 << 20), "shared_ff": (1, 1 << 20)}
DENSE_RANGES = {"ff": (1, 1 << 20)}


def check(spec: SynthSpec) -> None:
    """Raise SynthError for the first thing in `spec` that the pin would not load."""
    for found, expected, hint in _problems(spec):
        raise SynthError(f"synthetic model: {found}", expected, hint)


def _problems(spec: SynthSpec) -> Iterator[tuple[str, str, str]]:
    """Yield (found, expected, hint) for each broken limit, coarse ones first: later ones divide."""
    if spec.arch not in ARCHS:
        yield f"arch is {spec.arch!r}", " or ".join(ARCHS), f"--set arch={ARCHS[0]}"
    for field in fields(spec):
        value, kind = getattr(spec, field.name), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            yield f"{field.name} is {value!r}", f"a value of type {kind.__name__}", "--list shows all fields"
    for name, (low, high) in (RANGES | (MOE_RANGES if spec.is_moe else DENSE_RANGES)).items():
        if not low <= getattr(spec, name) <= high:
            yield f"{name} is {getattr(spec, name)}", f"{low} to {high}", f"--set {name}={low}"
    yield from _relations(spec)


def _relations(spec: SynthSpec) -> Iterator[tuple[str, str, str]]:
    """Yield what single ranges cannot say: sizes that must divide, fields that exclude each other."""
    for whole, part in (("heads", "kv_heads"), ("value_heads", "key_heads")):
        n, d = getattr(spec, whole), getattr(spec, part)
        if n % d:
            yield f"{whole} is {n} and {part} is {d}", f"{part} to divide {whole}", f"--set {part}=1"
    if spec.attention_interval > spec.layers:
        found = f"attention_interval is {spec.attention_interval} with {spec.layers} layers"
        expected = "an attention block among them: the pin's hybrid cache needs both kinds"
        yield found, expected, f"--set attention_interval={spec.layers}, or more layers"
    for name in ("head_size", "rope_dims"):
        if getattr(spec, name) % 2:
            yield f"{name} is {getattr(spec, name)}", "an even number: rotary pairs", f"--set {name}=64"
    if spec.rope_dims > spec.head_size:
        found = f"rope_dims is {spec.rope_dims} and head_size is {spec.head_size}"
        yield found, "rope_dims at most head_size", "--set rope_dims=0 takes a quarter of head_size"
    if spec.is_moe and spec.top_k > spec.experts:
        yield f"top_k is {spec.top_k} of {spec.experts} experts", "top_k at most experts", "--set top_k=1"
    if spec.merged_experts and not spec.is_moe:
        yield "merged_experts is set for a dense model", "a mixture of experts", "--set arch=qwen35moe"
    for name in ("nextn_embed", "nextn_head"):
        if getattr(spec, name) and not spec.mtp:
            yield f"{name} is set without an MTP block", "mtp to be true as well", "--set mtp=true"
    if not (spec.planted == 0 or 0.05 <= spec.planted <= 1):
        yield f"planted is {spec.planted}", "0, or 0.05 to 1", "--set planted=0.5"
    yield from _of_routing(spec)
    if spec.planted and spec.tied:
        expected = "a head of its own: a tied one would only repeat the current token"
        yield "planted is set for a tied model", expected, "--set tied=false"


def _of_routing(spec: SynthSpec) -> Iterator[tuple[str, str, str]]:
    if spec.routing not in ROUTINGS:
        yield f"routing is {spec.routing!r}", " or ".join(ROUTINGS), f"--set routing={ROUTINGS[0]}"
    if spec.routing == "even":
        return
    if not spec.is_moe:
        yield f"routing is {spec.routing} for a dense model", "a mixture of experts", "--set arch=qwen35moe"
    if spec.tied:
        yield f"routing is {spec.routing} for a tied model", "a head of its own", "--set tied=false"
    if spec.width < MIN_TEXT_WIDTH:
        expected = f"at least {MIN_TEXT_WIDTH}: 32 elements of the stream are taken"
        found = f"routing is {spec.routing} and width is {spec.width}"
        yield found, expected, f"--set width={MIN_TEXT_WIDTH}"


_DENSE = SynthSpec(arch="qwen35", mtp=False)
_MOE = SynthSpec(mtp=False)
_MIX = (
    "*attn_q.weight=Q5_K,*attn_k.weight=IQ4_XS,*attn_v.weight=Q6_K,*attn_qkv.weight=IQ4_XS,"
    "*up_exps.weight=Q5_K,blk.0.ffn_down_exps.weight=Q5_K,blk.1.ffn_down_exps.weight=IQ4_XS,blk.2.ffn_down_exps.weight=Q6_K,"
    "*shexp.weight=BF16,*ssm_*.weight=Q8_0,output.weight=F32,Q4_K"
)
_A3B = (
    "output.weight=Q6_K,*attn_v.weight=Q6_K,*ffn_down_shexp.weight=Q6_K,"
    "blk.*[13579].ffn_down_exps.weight=Q6_K,*ssm_alpha.weight=Q8_0,*ssm_beta.weight=Q8_0,*eh_proj.weight=Q8_0,Q4_K"
)
_A3B_3 = (
    "output.weight=Q6_K,*ffn_down_exps.weight=IQ3_S,*ffn_*_exps.weight=IQ3_XXS,*shexp.weight=Q6_K,"
    "*ssm_*.weight=Q8_0,*eh_proj.weight=Q8_0,Q5_K"
)
_35B = SynthSpec(  # 20.1 GiB
    layers=40, width=2048, heads=16, kv_heads=2, head_size=256, state_size=128, key_heads=16,
    value_heads=32, experts=256, top_k=8, expert_ff=512, shared_ff=512, types=_A3B, vocab=248320,
    context=262144, routing="text",
)  # fmt: skip

PRESETS: dict[str, SynthSpec] = {
    "moe-mtp": replace(_MOE, mtp=True),
    "moe-plain": _MOE,
    "dense-mtp": replace(_DENSE, mtp=True),
    "dense-plain": _DENSE,
    # no size a power of two, no row a multiple of 32: every quantised type falls back to F16
    "odd": SynthSpec(
        layers=5, width=136, heads=6, kv_heads=3, head_size=44, rope_dims=18, attention_interval=3,
        state_size=24, key_heads=3, value_heads=9, conv=5, experts=7, top_k=3, expert_ff=40, shared_ff=24,
        types="Q4_K", vocab=389,
    ),
    "gqa": SynthSpec(heads=8, kv_heads=1, head_size=32, key_heads=1, value_heads=8, state_size=32),
    "q8": SynthSpec(types="Q8_0"),
    "q4k": SynthSpec(
        width=512, expert_ff=256, shared_ff=256, state_size=128, types="output.weight=Q6_K,Q4_K"
    ),
    # as files of 3 bits are made: experts of little, what all tokens take of more
    "q3k": SynthSpec(
        width=512, expert_ff=256, shared_ff=256, state_size=128,
        types="output.weight=Q6_K,*down_exps.weight=Q3_K,*exps.weight=IQ3_XXS,*ssm_out.weight=Q8_0,*attn_v.weight=IQ3_S,Q4_K",
    ),
    "tied-mtp": SynthSpec(tied=True),
    "mtp-heads": SynthSpec(nextn_embed=True, nextn_head=True, nextn_norm=False),
    # every type at once; rows of 288 make each K-quant and IQ4_XS take its 32-block substitute
    "mix": SynthSpec(width=512, expert_ff=288, shared_ff=256, types=_MIX),
    "merged": SynthSpec(merged_experts=True, experts=12, top_k=5, types="Q8_0"),
    "real-heads": SynthSpec(
        heads=2, kv_heads=1, head_size=256, state_size=128, key_heads=1, value_heads=2, types="BF16"
    ),
    "small-heads": SynthSpec(
        heads=16, kv_heads=4, head_size=16, state_size=16, key_heads=4, value_heads=16, types="F32"
    ),
    "deep": SynthSpec(layers=12, width=192, expert_ff=32, shared_ff=32, experts=16, top_k=4),
    "much-attention": replace(_DENSE, mtp=True, layers=5, attention_interval=2),
    "little-attention": replace(_DENSE, mtp=True, layers=9, attention_interval=8, conv=3, width=160),
    "dense-tied-q8": replace(_DENSE, mtp=True, tied=True, nextn_norm=False, types="Q8_0"),
    "planted-moe": SynthSpec(planted=0.5),
    "planted-dense": replace(_DENSE, mtp=True, planted=0.5),
    "text-moe": SynthSpec(
        experts=256, top_k=8, expert_ff=32, vocab=8192, types="output.weight=Q6_K,*eh_proj.weight=Q8_0,Q4_K",
        routing="text",
    ),
    "35b-a3b": _35B,
    "35b-a3b-loose": replace(_35B, routing="loose"),
    "35b-a3b-3-bits": replace(_35B, types=_A3B_3),  # as files for cards of 16 GB are made
}  # fmt: skip
