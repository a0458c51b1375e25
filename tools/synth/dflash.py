"""A DFlash drafter for a synthetic target: shape, tensors, data. Knows no files but a vocabulary's.

For a target that routes as on real text (routing.py) the first block reads the text in planted ways, by
positions alone: queries are the same in all rows, keys in all tokens, and rotation makes the scores. The
first group of heads sees the newest token only (the block's one row with a text mark) and copies its topics,
so that drafts keep to them; each other head sees the one context token at a distance of its own, so that the
random rest of the drafter works on other tokens in every row: else all rows would guess alike.

Source of names and keys: llama.cpp `src/models/dflash.cpp`, `conversion/qwen.py`; of the sizes: the public
z-lab/Qwen3.6-35B-A3B-DFlash, whose layers 1, 10, 19, 28, 37 are read behind, so the inputs of the next ones
here. Embedding and head are the target's and are not in the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import sqrt

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from synth import blocks
from synth.layout import SHARP, SWIGLU, Tensor, asked, parse_types, plantable
from synth.planting import MARKS, plant
from synth.routing import LOUD, ONE, TEXT, TOPICS, Stream, last_norm, split
from synth.spec import SynthError, SynthSpec
from synth.target import Target

RIPPLE = 0.1  # of norm weights
N_TAPS = 5
N_TOPICS = TOPICS.stop - TOPICS.start
WIDER = 1.6  # as a row cannot know the drafts before it, drafts spread about the newest token as a walk would
ROPE_BASE = 1e7
SHARP_PAIRS = 8  # rotary pairs, from the fastest, in whose scores one position stands out


# fmt: off
@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Describe the drafter of one target; the defaults are those of Qwen3.6-35B-A3B's public one.

    Test: tests/unit/test_synth_dflash.py, tests/model/test_synth_routing.py.
    """

    target: SynthSpec = field(default_factory=SynthSpec)
    layers: int = 8
    heads: int = 32
    kv_heads: int = 4       # divides heads
    head_size: int = 128    # even
    ff: int = 6144
    block: int = 16         # the newest token and 15 drafts
    types: str = "Q8_0"     # as SynthSpec.types
    seed: int = 0
    # fmt: on

    @property
    def taps(self) -> list[int]:
        """Return the target layers whose inputs are read: five, evenly spread, fewer of a shallow target."""
        n = self.target.layers
        first = 2 if n >= 8 else 1
        return sorted({round(x) for x in np.linspace(first, max(first, n - first), N_TAPS).tolist()})


RANGES = {
    "layers": (1, 511), "heads": (1, 1024), "kv_heads": (1, 1024), "head_size": (MARKS, 1024),
    "ff": (1, 1 << 20), "block": (2, 4096), "seed": (0, (1 << 63) - 1),
}  # fmt: skip


def check(spec: DrafterSpec) -> None:
    """Raise SynthError for the first thing in `spec` that cannot be; its target is checked apart."""
    for item in fields(spec):
        value, (low, high) = getattr(spec, item.name), RANGES.get(item.name, (0, 0))
        if item.name in RANGES and not (type(value) is int and low <= value <= high):
            found = f"drafter: {item.name} is {value!r}"
            raise SynthError(found, f"{low} to {high}", f"--set dflash.{item.name}={low}")
    if spec.heads % spec.kv_heads:
        found = f"drafter: heads is {spec.heads} and kv_heads is {spec.kv_heads}"
        raise SynthError(found, "kv_heads to divide heads", "--set dflash.kv_heads=1")
    if spec.kv_heads < 2 and spec.target.routing != "even":
        found = "drafter: kv_heads is 1 and its target routes as on text"
        raise SynthError(found, "at least 2: one reads topics", "--set dflash.kv_heads=2")
    if spec.head_size % 2:
        found = f"drafter: head_size is {spec.head_size}"
        raise SynthError(found, "an even number: rotary pairs", "--set dflash.head_size=128")


class Drafter:
    """Hold vocabulary and tensors of a drafter; SynthError for a spec or target that is refused."""

    arch = "dflash"

    def __init__(self, spec: DrafterSpec) -> None:
        check(spec)
        self.spec, self.target = spec, Target(spec.target)
        self.vocab, self.rules = self.target.vocab, parse_types(spec.types)
        self.tensors = list(self._layout())

    def _layout(self) -> Iterator[Tensor]:
        s, width = self.spec, self.spec.target.width
        inner, kv = s.heads * s.head_size, s.kv_heads * s.head_size
        yield self._matrix("fc.weight", (width, len(s.taps) * width))
        yield self._norm("enc.output_norm.weight", width)
        for block in range(s.layers):
            p = f"blk.{block}."
            yield self._norm(p + "attn_norm.weight", width)
            yield self._matrix(p + "attn_q.weight", (inner, width))
            yield self._matrix(p + "attn_k.weight", (kv, width))
            yield self._matrix(p + "attn_v.weight", (kv, width))
            yield self._matrix(p + "attn_output.weight", (width, inner))
            yield self._norm(p + "attn_q_norm.weight", s.head_size, SHARP)
            yield self._norm(p + "attn_k_norm.weight", s.head_size)
            yield self._norm(p + "ffn_norm.weight", width)
            yield self._matrix(p + "ffn_gate.weight", (s.ff, width))
            yield self._matrix(p + "ffn_up.weight", (s.ff, width))
            yield self._matrix(p + "ffn_down.weight", (width, s.ff), 1 / SWIGLU)
        yield self._norm("output_norm.weight", width)

    def _norm(self, name: str, size: int, mean: float = 1.0) -> Tensor:
        return Tensor(name, (size,), Type.F32, mean, RIPPLE)

    def _matrix(self, name: str, shape: tuple[int, int], gain: float = 1.0) -> Tensor:
        kind = plantable(asked(self.rules, name), shape[-1])
        return Tensor(name, shape, kind, 0.0, gain / sqrt(shape[-1]))

    def prepare(self) -> None:
        """Do nothing: its tensors share nothing."""

    def data(self, t: Tensor) -> np.ndarray:
        """Draw the data of one tensor; the first block reads topics where the target has them."""
        data = blocks.draw(t.type, t.shape, self.spec.seed, "dflash " + t.name, mean=t.mean, std=t.std)
        if self.spec.target.routing != "even":
            self._plant(t, data)
        return data

    def _plant(self, t: Tensor, data: np.ndarray) -> None:
        _, part = split(t.name)
        if part == "output_norm.weight":
            data[:MARKS] = last_norm(Stream(0.0, 1.0).rms(2 * self.spec.layers)) / WIDER
        elif part in ("fc.weight", "attn_output.weight", "ffn_down.weight"):
            data[:MARKS] = 0
        ways = {
            "fc.weight": self._context,
            "blk.0.attn_q.weight": self._queries,
            "blk.0.attn_k.weight": self._keys,
            "blk.0.attn_v.weight": self._values,
            "blk.0.attn_output.weight": self._outputs,
        }
        if t.name in ways:
            planted = ways[t.name]()
            data[: len(planted)] = 0
            plant(t.type, data[: len(planted)], planted, float(np.abs(planted).max()), 0.0)

    def _context(self) -> np.ndarray:
        """Return f32 [32 outputs, 32 inputs] of the encoder: that there is a token, and well heard."""
        ways = np.zeros((MARKS, MARKS), np.float32)
        ways[ONE, ONE] = 10.0
        return ways

    def _queries(self) -> np.ndarray:
        """Return f32 [outputs, 32]: the first group's queries, then one head for each distance."""
        s = self.spec
        ways = np.zeros((s.heads, s.head_size, MARKS), np.float32)
        group = s.heads // s.kv_heads
        ways[:group, :, ONE] = 1.0
        turns = self._frequencies() * (s.block + np.arange(group, s.heads))[:, None]
        pairs, half = turns.shape[1], s.head_size // 2
        ways[group:, :pairs, ONE], ways[group:, half : half + pairs, ONE] = np.cos(turns), -np.sin(turns)
        return ways.reshape(-1, MARKS)

    def _keys(self) -> np.ndarray:
        """Return f32 [outputs, 32]: the first head's keys are of texts, the others' of whatever token."""
        s = self.spec
        ways = np.zeros((s.kv_heads, s.head_size, MARKS), np.float32)
        ways[0, :, TEXT] = 1.0
        ways[1:, : len(self._frequencies()), ONE] = 1.0
        return ways.reshape(-1, MARKS)

    def _values(self) -> np.ndarray:
        """Return f32 [4, 32]: the topics, one unit."""
        ways = np.zeros((N_TOPICS, MARKS), np.float32)
        ways[:, TOPICS] = np.eye(N_TOPICS) * self.target.stream.start / (LOUD * self.target.embedding.std)
        return ways

    def _outputs(self) -> np.ndarray:
        """Return f32 [32 outputs, 32 inputs]: the first head's first elements become the topic marks."""
        ways = np.zeros((MARKS, MARKS), np.float32)
        ways[TOPICS, :N_TOPICS] = np.eye(N_TOPICS)
        return ways

    def _frequencies(self) -> np.ndarray:
        """Return f64 [n]: radians a position of the fastest rotary pairs, enough to tell neighbours."""
        return ROPE_BASE ** (-2.0 / self.spec.head_size * np.arange(SHARP_PAIRS))

    def describe(self, writer: GGUFWriter) -> None:
        """Add the hyperparameters that llama.cpp and the engine read."""
        s = self.spec
        writer.add_name("synthetic dflash")
        writer.add_description(f"random weights, seed {s.seed}")
        writer.add_context_length(s.target.context)
        writer.add_embedding_length(s.target.width)
        writer.add_block_count(s.layers)
        writer.add_feed_forward_length(s.ff)
        writer.add_head_count(s.heads)
        writer.add_head_count_kv(s.kv_heads)
        writer.add_key_length(s.head_size)
        writer.add_value_length(s.head_size)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(ROPE_BASE)
        writer.add_rope_dimension_count(s.head_size)
        # an M-RoPE target's drafter rotates by the first of four positions
        writer.add_rope_dimension_sections([s.head_size // 2, 0, 0, 0])
        writer.add_causal_attention(False)
        writer.add_uint32("dflash.block_size", s.block)
        writer.add_array("dflash.target_layers", s.taps)
        masks = np.flatnonzero(~self.vocab.is_text)
        writer.add_mask_token_id(int(masks[0]))
