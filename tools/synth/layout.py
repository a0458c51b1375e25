"""The tensors of a synthetic model, in file order: name, shape, type, and the spread of its random values.

Shapes are row-major as in numpy: the reverse of ggml's order, [outputs, inputs] for matrices.
Source: llama.cpp `src/models/qwen35.cpp` and `qwen35moe.cpp`, load_arch_tensors.

Spreads keep a random model lively: a matrix turns unit inputs into unit outputs, a block adds about one unit
to the residual stream, embeddings are small beside that (a tied head would else repeat the current token),
queries are sharp so that attention does not average the context away, and logits spread by `SPREAD` units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod, sqrt

from gguf import GGMLQuantizationType as Type

from synth.blocks import FLOATS, RANDOM, fitting, n_bytes
from synth.planting import PLANTABLE
from synth.spec import SynthError, SynthSpec

SPREAD = 3.0  # standard deviation of logits
SHARP = 3.0  # weight of the query norm: the standard deviation of attention scores
SWIGLU = 0.6  # root mean square of silu(a) b for unit a, b
HALF = 0.54  # the same of sigmoid(a)
TYPES = {kind.name: kind for kind in (*FLOATS, *RANDOM)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Name one tensor; values are uniform about `mean` with standard deviation `std`."""

    name: str
    shape: tuple[int, ...]
    type: Type
    mean: float
    std: float
    role: str = ""  # "embedding" and "head" have a row per token; "joint" lets the MTP block's two inputs in

    @property
    def per_token(self) -> bool:
        """Tell whether rows belong to tokens of the vocabulary."""
        return self.role in ("embedding", "head")

    @property
    def params(self) -> int:
        """Count the elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Count the bytes of the data, without padding."""
        return n_bytes(self.type, self.shape)


class Layout:
    """List the tensors of `spec` with `n_vocab` tokens; call `tensors()`.

    Errors: SynthError for an unknown type.
    Test: tests/unit/test_synth_shapes.py (names and shapes of each variant).
    """

    def __init__(self, spec: SynthSpec, n_vocab: int) -> None:
        self.spec, self.n_vocab = spec, n_vocab
        self.rules = parse_types(spec.types)
        # planted: all blocks together are `noise` beside a unit embedding; else each is one unit
        self.gain = spec.noise / sqrt(2 * spec.layers) if spec.planted else 1.0
        self.ripple = 0.1 * min(1.0, spec.noise) if spec.planted else 0.1  # of norm weights

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor in file order."""
        spec = self.spec
        yield self._table("token_embd.weight", "embedding")
        yield self._norm("output_norm.weight", spec.width)
        if not spec.tied:
            yield self._table("output.weight", "head")
        for block in range(spec.layers + spec.mtp):
            yield from self._block(block)

    def _block(self, block: int) -> Iterator[Tensor]:
        p, spec = f"blk.{block}.", self.spec
        yield self._norm(p + "attn_norm.weight", spec.width)
        yield self._norm(p + "post_attention_norm.weight", spec.width)
        yield from self._attention(p) if spec.is_attention(block) else self._delta_net(p)
        yield from self._experts(p) if spec.is_moe else self._dense(p)
        if block >= spec.layers:
            yield from self._nextn(p + "nextn.")

    def _attention(self, p: str) -> Iterator[Tensor]:
        s = self.spec
        # query and gate, head by head
        yield self._matrix(p + "attn_q.weight", (2 * s.heads * s.head_size, s.width))
        yield self._matrix(p + "attn_k.weight", (s.kv_heads * s.head_size, s.width))
        yield self._matrix(p + "attn_v.weight", (s.kv_heads * s.head_size, s.width))
        yield self._matrix(p + "attn_output.weight", (s.width, s.heads * s.head_size), self.gain / HALF)
        yield self._norm(p + "attn_q_norm.weight", s.head_size, SHARP)
        yield self._norm(p + "attn_k_norm.weight", s.head_size)

    def _delta_net(self, p: str) -> Iterator[Tensor]:
        s = self.spec
        values = s.value_heads * s.state_size
        channels = 2 * s.key_heads * s.state_size + values
        yield self._matrix(p + "attn_qkv.weight", (channels, s.width))
        yield self._matrix(p + "attn_gate.weight", (values, s.width))
        yield Tensor(p + "ssm_conv1d.weight", (channels, s.conv), Type.F32, 0.0, 1 / sqrt(s.conv))
        yield Tensor(p + "ssm_dt.bias", (s.value_heads,), Type.F32, 0.0, 0.5)
        # -0.99 to -0.01: memories short and long
        yield Tensor(p + "ssm_a", (s.value_heads,), Type.F32, -0.5, 0.28)
        yield self._matrix(p + "ssm_beta.weight", (s.value_heads, s.width))
        yield self._matrix(p + "ssm_alpha.weight", (s.value_heads, s.width))
        yield self._norm(p + "ssm_norm.weight", s.state_size)
        yield self._matrix(p + "ssm_out.weight", (s.width, values), self.gain / SWIGLU)

    def _dense(self, p: str) -> Iterator[Tensor]:
        s = self.spec
        yield self._matrix(p + "ffn_gate.weight", (s.ff, s.width))
        yield self._matrix(p + "ffn_up.weight", (s.ff, s.width))
        yield self._matrix(p + "ffn_down.weight", (s.width, s.ff), self.gain / SWIGLU)

    def _experts(self, p: str) -> Iterator[Tensor]:
        s, down = self.spec, self.gain / SWIGLU * sqrt(0.5)  # routed and shared make one unit together
        yield Tensor(p + "ffn_gate_inp.weight", (s.experts, s.width), Type.F32, 0.0, 1 / sqrt(s.width))
        if s.merged_experts:
            yield self._matrix(p + "ffn_gate_up_exps.weight", (s.experts, 2 * s.expert_ff, s.width))
        else:
            yield self._matrix(p + "ffn_gate_exps.weight", (s.experts, s.expert_ff, s.width))
            yield self._matrix(p + "ffn_up_exps.weight", (s.experts, s.expert_ff, s.width))
        routed = down * sqrt(s.top_k)
        yield self._matrix(p + "ffn_down_exps.weight", (s.experts, s.width, s.expert_ff), routed)
        yield Tensor(p + "ffn_gate_inp_shexp.weight", (s.width,), Type.F32, 0.0, 1 / sqrt(s.width))
        yield self._matrix(p + "ffn_gate_shexp.weight", (s.shared_ff, s.width))
        yield self._matrix(p + "ffn_up_shexp.weight", (s.shared_ff, s.width))
        yield self._matrix(p + "ffn_down_shexp.weight", (s.width, s.shared_ff), down / HALF)

    def _nextn(self, p: str) -> Iterator[Tensor]:
        s = self.spec
        # inputs: the normed embedding, then the normed hidden state
        yield self._matrix(p + "eh_proj.weight", (s.width, 2 * s.width), role="joint")
        yield self._norm(p + "enorm.weight", s.width)
        yield self._norm(p + "hnorm.weight", s.width)
        if s.nextn_norm:
            yield self._norm(p + "shared_head_norm.weight", s.width)
        if s.nextn_embed:
            yield self._table(p + "embed_tokens.weight", "embedding")
        if s.nextn_head:
            yield self._table(p + "shared_head_head.weight", "head")

    def _norm(self, name: str, size: int, mean: float = 1.0) -> Tensor:
        return Tensor(name, (size,), Type.F32, mean, self.ripple)

    def _matrix(self, name: str, shape: tuple[int, ...], gain: float = 1.0, role: str = "") -> Tensor:
        return Tensor(name, shape, self._type(name, shape[-1], role), 0.0, gain / sqrt(shape[-1]), role)

    def _table(self, name: str, role: str) -> Tensor:
        width, planted = self.spec.width, self.spec.planted > 0 and role == "embedding"
        kind = self._type("token_embd.weight" if planted else name, width, role)  # planted embeddings are one
        return Tensor(name, (self.n_vocab, width), kind, 0.0, 1.0 if planted else SPREAD / sqrt(width), role)

    def _type(self, name: str, row: int, role: str) -> Type:
        """Take the type of the first rule that matches, or what fits the row and can be planted into."""
        kind = asked(self.rules, name)
        if self.spec.planted and role in ("head", "joint") and kind not in FLOATS:
            kind = Type.Q8_0  # there is no encoder of whole K-quants here
        return plantable(kind, row) if self.spec.routing != "even" and role else fitting(kind, row)


def asked(rules: list[tuple[str, Type]], name: str) -> Type:
    """Return the type of the first rule that matches."""
    return next(kind for pattern, kind in rules if fnmatchcase(name, pattern))


def plantable(kind: Type, row: int) -> Type:
    """Return what rows of `row` elements take where `kind` is asked for and marks are planted into them."""
    kind = fitting(kind, row)
    return kind if kind in PLANTABLE else fitting(Type.Q8_0, row)


def parse_types(text: str) -> list[tuple[str, Type]]:
    """Split "PATTERN=TYPE,...,TYPE" into (shell pattern, type) rules, the first match wins; or SynthError."""
    rules = []
    for part in text.split(","):
        pattern, _, kind = part.strip().rpartition("=")
        if kind not in TYPES:
            known = f"one of {', '.join(TYPES)}"
            raise SynthError(f"types: {kind!r} is no weight type", known, "--set types=Q4_K")
        rules.append((pattern or "*", TYPES[kind]))
    if rules[-1][0] != "*":
        found = f"types: {text!r} leaves out the other tensors"
        raise SynthError(found, "a type without a pattern at the end", f"--set types={text},F16")
    return rules
