"""A qwen35 or qwen35moe model: hyperparameters, data of tensors. Knows no files but a vocabulary's."""

from __future__ import annotations

from math import sqrt

import numpy as np
from gguf import GGUFWriter

from synth import blocks
from synth.layout import SPREAD, Layout, Tensor
from synth.routing import QUIET, SHARES, Stream, TextRouting, token_marks
from synth.spec import SynthSpec, check
from synth.vocab import Vocab, builtin, copied

# QUIET: size of the rows of tokens that are no text: random text should not end, nor show specials
FIRST, SECOND = 6.0, 5.0  # planted logits of a token's two successors, in standard deviations of the others
GUESS = 0.25  # part of the blocks' noise that the planted MTP block takes from the hidden state


class Target:
    """Hold the vocabulary and tensors of `spec`; SynthError for a spec or vocabulary that is refused."""

    def __init__(self, spec: SynthSpec) -> None:
        check(spec)
        self.spec, self.arch = spec, spec.arch
        self.vocab: Vocab = copied(spec.vocab_file, spec.vocab) if spec.vocab_file else builtin(spec.vocab)
        layout = Layout(spec, len(self.vocab))
        self.tensors = list(layout.tensors())
        self.embedding = self.tensors[0]
        self.stream = Stream.of(self.embedding.std, spec.width, layout.gain)
        self._routing: TextRouting | None = None

    def prepare(self) -> None:
        """Make what several tensors share, before they are drawn side by side."""
        spec = self.spec
        if spec.routing in SHARES:
            self._routing = TextRouting(
                token_marks(self.vocab.is_text, spec.seed, self._ring() if spec.planted else None),
                SHARES[spec.routing],
                n_layers=spec.layers,
                embedding=self.embedding.std,
                head=SPREAD / sqrt(spec.width),
                stream=self.stream,
                seed=spec.seed,
            )

    def data(self, t: Tensor) -> np.ndarray:
        """Draw the data of one tensor: planted, or random with the rows of special tokens quietened."""
        data = self._drawn(t)
        if self._routing:
            self._routing.apply(t.name, t.type, data)
        return data

    def _drawn(self, t: Tensor) -> np.ndarray:
        spec = self.spec
        if spec.planted and t.role == "head":
            return blocks.encode(t.type, self._planted_head())
        if spec.planted and t.role == "joint":
            return blocks.encode(t.type, _planted_joint(t, spec.seed, GUESS * spec.noise / spec.width**0.5))
        # the planted MTP block's own embedding has the same rows
        source = self.embedding if spec.planted and t.role == "embedding" else t
        data = blocks.draw(t.type, t.shape, spec.seed, source.name, mean=t.mean, std=t.std)
        if t.per_token:
            quiet = np.flatnonzero(~self.vocab.is_text)
            data[quiet] = _quietened(t, data[quiet])
        return data

    def _planted_head(self) -> np.ndarray:
        """Return float32 [n_vocab, width]: a random head in which every token names two likely successors.

        Text tokens stand on one ring in random order. A token's embedding excites the head rows of its
        neighbour and, a little less, of one farther on. What the blocks add to the residual stream decides
        between the two; the MTP block, which sees mostly the embedding, guesses. Round the ring, greedy text
        takes long to repeat.
        """
        spec = self.spec
        rows = blocks.decode(self.embedding.type, self._drawn(self.embedding))
        head = blocks.uniform(rows.shape, spec.seed, "output.weight") / np.float32(spec.width**0.5)
        ring = self._ring()
        for logit, step in ((FIRST, 1), (SECOND, 1 + len(ring) // 3)):
            head[np.roll(ring, -step)] += rows[ring] * np.float32(logit / spec.width)
        head[~self.vocab.is_text] *= np.float32(QUIET)
        return head * np.float32(SPREAD)

    def _ring(self) -> np.ndarray:
        """Return the text tokens in the order that a planted model follows."""
        text = np.flatnonzero(self.vocab.is_text)
        return text[np.argsort(blocks.uniform(text.shape, self.spec.seed, "planted ring"), kind="stable")]

    def describe(self, writer: GGUFWriter) -> None:
        """Add the hyperparameters that llama.cpp reads for both architectures."""
        spec = self.spec
        writer.add_name(f"synthetic {spec.arch}")
        writer.add_description(
            f"random weights, seed {spec.seed}, planted {spec.planted}, routing {spec.routing}"
        )
        writer.add_context_length(spec.context)
        writer.add_embedding_length(spec.width)
        writer.add_block_count(spec.layers + spec.mtp)
        writer.add_head_count(spec.heads)
        writer.add_head_count_kv(spec.kv_heads)
        writer.add_key_length(spec.head_size)
        writer.add_value_length(spec.head_size)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e7)
        writer.add_rope_dimension_count(spec.rotated)
        pairs = spec.rotated // 2  # shared out over time, height, width, nearly evenly: 11, 11, 10 of 32
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        writer.add_ssm_conv_kernel(spec.conv)
        writer.add_ssm_state_size(spec.state_size)
        writer.add_ssm_group_count(spec.key_heads)
        writer.add_ssm_time_step_rank(spec.value_heads)
        writer.add_ssm_inner_size(spec.value_heads * spec.state_size)
        writer.add_full_attention_interval(spec.attention_interval)
        writer.add_vocab_size(len(self.vocab))
        if spec.is_moe:
            writer.add_expert_count(spec.experts)
            writer.add_expert_used_count(spec.top_k)
            writer.add_expert_feed_forward_length(spec.expert_ff)
            writer.add_expert_shared_feed_forward_length(spec.shared_ff)
        else:
            writer.add_feed_forward_length(spec.ff)
        if spec.mtp:
            writer.add_nextn_predict_layers(1)


def _quietened(t: Tensor, rows: np.ndarray) -> np.ndarray:
    if t.type in blocks.RANDOM:
        blocks.stamp(t.type, rows, t.std * QUIET)
        return rows
    return blocks.encode(t.type, blocks.decode(t.type, rows) * np.float32(QUIET))


def _planted_joint(t: Tensor, seed: int, noise: float) -> np.ndarray:
    """Return float32 [width, 2 width]: the embedding passes as it is, the hidden state as noise."""
    width = t.shape[0]
    hidden = blocks.uniform((width, width), seed, t.name) * np.float32(noise)
    return np.concatenate([np.eye(width, dtype=np.float32), hidden], axis=1)
