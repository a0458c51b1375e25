"""Weights that make a mixture of experts route as on real text: which numbers go where, and why.

The first 32 elements of the residual stream are marks. The embedding sets them, no block writes them (their
rows in every output projection are zero), so that all routers read the token's own marks:

    0       one       the same in all tokens; routers turn it into each expert's popularity
    1       text      the same in all tokens but specials
    2..5    topics    two points on circles; routers turn them into the experts of a subject
    6..31   own       the token's own values; routers turn them into the token's own experts

The head turns topics into logits that prefer tokens of nearby topics, so text drifts along the circles, one a
few tokens wide and one some hundred; the MTP block passes the marks of its token on. What else a router reads
is the random rest of the stream: the context. RMS norms rescale all marks alike, so among experts only the
context's part hangs on how loud the stream has become.

Shares and steps were fitted to what was measured of Qwen3.6-35B-A3B (40 layers, 256 experts, top-8): 22.1,
35.9, 56.3 distinct experts in 4, 8, 16 tokens of code (20.7, 32.8, 51.0 of prose), 49 % hits of an LRU cache
of 21. With routing=loose tokens have less in common: 70 % hits of an LRU cache of half of the experts, where
routing=text has 91 %. Must not know: files, the other weights.
Test: tests/unit/test_synth_routing.py, tests/model/test_synth_routing.py; on a real model: tools/routing.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from gguf import GGMLQuantizationType as Type

from synth import blocks
from synth.planting import MARKS, plant

ONE, TEXT, OWN = 0, 1, 6


@dataclass(frozen=True, slots=True)
class Circle:
    """Describe one topic: how far a token's step goes along it (radians)."""

    first: int  # its two marks
    step: float

    @property
    def marks(self) -> slice:
        """Name its cosine and sine."""
        return slice(self.first, self.first + 2)

    @property
    def pull(self) -> float:
        """Return the logits between a token of the same topic and one at a right angle.

        The best of n normal logits wins as if by Gumbel noise of scale 3 / sqrt(2 ln n), 0.6 to 0.8 for a
        whole vocabulary and its fitting part; sampling at temperature 1 has the scale 1.
        """
        return 0.8 / self.step**2


CIRCLES = (Circle(2, 0.47), Circle(4, 0.12))
TOPICS = slice(2, 6)


@dataclass(frozen=True, slots=True)
class Shares:
    """Say what router scores consist of; all shares add up to one."""

    popular: float
    topics: tuple[float, float]
    """Of each circle."""
    token: float
    context: float


SHARES = {
    "text": Shares(popular=0.10, topics=(0.44, 0.12), token=0.25, context=0.09),
    "loose": Shares(popular=0.03, topics=(0.09, 0.07), token=0.43, context=0.38),
}
"""By what SynthSpec.routing says."""
SCORE = 1.5  # standard deviation of router scores
LOUD = 3.8  # marks within +-this, in standard deviations of the other elements of an embedding
OWN_SQUARE = 1 / 3  # mean square of an own mark
MARK_SQUARES = 2 + len(CIRCLES) + (MARKS - OWN) * OWN_SQUARE  # of a text token, in squares of the loudest
HEAD = 4.0  # loudest element that a row of the head has for a topic
QUIET = 0.1  # how loud the rest of a special token's embedding is


def token_marks(is_text: np.ndarray, seed: int, ring: np.ndarray | None = None) -> np.ndarray:
    """Return f32 [n_tokens, 32] within -1..1: the marks of every token.

    is_text: bool [n_tokens]. ring: text tokens in an order that the model was made to follow, in thirds that
    run alike (target.py): topics then drift along each third instead of being independent.
    """
    marks = np.zeros((len(is_text), MARKS), np.float32)
    marks[:, ONE], marks[:, TEXT] = 1.0, is_text
    text = np.flatnonzero(is_text) if ring is None else ring
    for circle in CIRCLES:
        drawn = blocks.uniform(text.shape, seed, f"topic {circle.first}").astype(np.float64)
        if ring is None:
            angle = drawn * (np.pi / sqrt(3))  # uniform over the whole circle
        else:
            third = max(1, len(ring) // 3)
            angle = np.cumsum(drawn[:third] * circle.step)[np.arange(len(ring)) % third]
        marks[text, circle.first], marks[text, circle.first + 1] = np.cos(angle), np.sin(angle)
    own = blocks.uniform((len(is_text), MARKS - OWN), seed, "own marks")
    marks[:, OWN:] = own * np.float32(sqrt(1 / 3))
    return marks


@dataclass(frozen=True)
class Stream:
    """Say how loud the residual stream is (root mean square): at its start, and what a half-block adds."""

    start: float
    gain: float

    @classmethod
    def of(cls, embedding: float, width: int, gain: float) -> Stream:
        """Return that of a model whose embeddings spread by `embedding`, marks left out."""
        rest, marks = width - MARKS, MARK_SQUARES * LOUD**2
        return cls(embedding * sqrt((rest + marks) / width), gain)

    def rms(self, halves: int) -> float:
        """Return how loud it is after so many half-blocks (attention or feed-forward)."""
        return sqrt(self.start**2 + halves * self.gain**2)


class TextRouting:
    """Plant the marks into the tensors of one model; `apply` is what to call.

    n_layers: trunk blocks. embedding: standard deviation of embedding rows. values: `token_marks`.
    """

    def __init__(
        self,
        values: np.ndarray,
        shares: Shares,
        n_layers: int,
        embedding: float,
        stream: Stream,
        head: float,
        seed: int,
    ) -> None:
        self.values, self.n_layers, self.stream, self.seed = values, n_layers, stream, seed
        self.shares = shares
        self.embedding, self.head, self.loudest = embedding, head, LOUD * embedding
        self.quiet = np.flatnonzero(values[:, TEXT] == 0)

    def apply(self, name: str, kind: Type, data: np.ndarray) -> None:
        """Plant into the encoded rows of a tensor, in place; those without a part in it stay as they are."""
        block, part = split(name)
        if part in ("token_embd.weight", "nextn.embed_tokens.weight"):
            self._embedding(kind, data)
        elif part in ("output.weight", "nextn.shared_head_head.weight"):
            self._head(kind, data)
        elif part in OUTPUTS:
            data[..., :MARKS, :] = 0
        elif part == "ffn_gate_inp.weight":
            self._router(data, name, block)
        elif part in ("output_norm.weight", "nextn.shared_head_norm.weight"):
            self._last_norm(data)
        elif part == "nextn.eh_proj.weight":
            self._joint(kind, data)
        elif part == "nextn.hnorm.weight":
            data[:MARKS] = 0.0  # the trunk's marks end here; the token's go on
        elif part == "nextn.enorm.weight":
            data[:MARKS] = 1.0

    def _embedding(self, kind: Type, data: np.ndarray) -> None:
        plant(kind, data, self.values * self.loudest, self.loudest, self.embedding)
        rows = data[self.quiet]
        plant(kind, rows, self.values[self.quiet] * self.loudest, self.loudest, self.embedding * QUIET)
        data[self.quiet] = rows

    def _head(self, kind: Type, data: np.ndarray) -> None:
        values = np.zeros_like(self.values)
        values[:, TOPICS] = self.values[:, TOPICS] * HEAD
        plant(kind, data, values, HEAD, self.head)
        rows = data[self.quiet]
        plant(kind, rows, values[self.quiet], HEAD, self.head * QUIET)
        data[self.quiet] = rows

    def _last_norm(self, data: np.ndarray) -> None:
        data[:MARKS] = last_norm(self._end() / self.loudest)

    def _router(self, data: np.ndarray, name: str, block: int) -> None:
        n, at, shares = len(data), self.stream.rms(2 * block + 1), self.shares
        if block >= self.n_layers:  # see _joint
            at = self._end() * self._mtp_rms(1) / self._mtp_rms(2)
        columns = np.zeros((n, MARKS), np.float32)
        columns[:, ONE] = blocks.normal((n,), self.seed, name + " popular") * sqrt(shares.popular)
        for circle, share in zip(CIRCLES, shares.topics, strict=True):
            drawn = blocks.normal((n, 2), self.seed, f"{name} {circle.first}")
            columns[:, circle.marks] = drawn * sqrt(share)
        own = blocks.uniform((n, MARKS - OWN), self.seed, name + " own")
        columns[:, OWN:] = own * sqrt(shares.token / (OWN_SQUARE * (MARKS - OWN)))
        data *= np.float32(SCORE * sqrt(shares.context))
        data[:, :MARKS] = columns * np.float32(SCORE * at / self.loudest)

    def _joint(self, kind: Type, data: np.ndarray) -> None:
        """Let the token's marks through, as loud beside the rest as at the end of the trunk."""
        each = self._mtp_rms(2) * self.stream.start / self._end()
        data[:MARKS] = 0
        plant(kind, data[:MARKS], np.eye(MARKS, dtype=np.float32) * np.float32(each), each, 0.0)

    def _end(self) -> float:
        """Return how loud the trunk's stream is at its end."""
        return self.stream.rms(2 * self.n_layers)

    def _mtp_rms(self, halves: int) -> float:
        """Return how loud the MTP block's stream is, were its marks those of the trunk's end."""
        return Stream(1.0, self.stream.gain).rms(halves)


OUTPUTS = ("attn_output.weight", "ssm_out.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")


def last_norm(loudness: float) -> np.ndarray:
    """Return f32 [32]: the weights of the norm before the head, where marks are 1 / `loudness` loud."""
    weights = np.zeros(MARKS, np.float32)
    for circle in CIRCLES:
        weights[circle.marks] = circle.pull / HEAD * loudness
    return weights


def split(name: str) -> tuple[int, str]:
    """Return block number (-1: none) and the rest of a tensor's name."""
    if not name.startswith("blk."):
        return -1, name
    _, number, part = name.split(".", 2)
    return int(number), part
