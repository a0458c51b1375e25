"""Counters of the speculative round, as users read them: `llm.speculation_stats`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def _text(stats: Any, first: str) -> str:
    """Return counters as their repr has them, behind the property that says most."""
    return f"{first}={getattr(stats, first):.3g}, {stats!r}"


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the model was loaded or `reset_speculation_stats()`. Times are in seconds.

    A round is one verify; a plain step is a round whose draft is empty.
    Test: tests/model/generate/test_same_text.py.
    """

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    prompt_tokens: int
    exact_batches: int
    """Batches of the target that ran row-exact CPU kernels."""
    cold_rounds: int
    """Rounds without a draft because the drafter lacked the hidden state before the root."""
    failed_drafts: int
    """Times the drafter failed, while drafting or reading kept tokens: less is drafted then."""
    paused_rounds: int
    """Rounds without a draft because speculation="auto" expected plain decode to be faster."""
    ngram_rounds: int
    """Rounds that speculation="auto" gave to n-grams instead of the drafter."""
    tree_rounds: int
    """Rounds whose draft branched."""
    padding: int
    """Rows beyond the nodes of such drafts, up to a size whose graph is kept."""
    step_thread_rounds: int
    """Rounds of several rows that ran on n_threads: faster there than on n_threads_batch, or tried."""
    restored: int
    """Times that a checkpoint took recurrent layers back to a prefix."""
    checkpoints: int
    """Held now, and the memory they take:"""
    checkpoint_bytes: int
    drafter_bytes: int
    """Held now beside llama.cpp's own memory, by all engines of the model: drafters, graphs, draft trees."""
    graph_bytes: int
    """At most 512 MiB: the least recently used graph goes."""
    tree_bytes: int
    row_limit: int
    """Rows that a verify may have since a larger one found no memory for its graph; 0: as many as asked."""
    draft_vocab: int
    """Tokens that the drafter's output head has; 0: the whole vocabulary."""
    shared_rounds: int
    """Rounds since a graph found no memory of its own: all take turns in one place, built each time."""
    ahead_rounds: int
    """Rounds whose draft went into the verify on its device, before the host knew it."""
    joint_rounds: int
    """Rounds whose draft was made together with those of other sequences; 0 in a `Llama`, which has one."""
    logits_rows: int
    """Rows sampled from all their logits, copied to the host; others needed their best tokens only."""
    gpu_launches: int
    """Graphs that GPUs computed in this process, and those of them that replayed a captured CUDA graph:"""
    gpu_replays: int
    fused_parts: int
    """Parts of layers that are one op in the newest graph of a few rows; 0 on a CPU (docs/ops.md)."""
    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    prompt_seconds: float
    sample_seconds: float
    commit_seconds: float

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens a round yields, the bonus token included; 0.0 before the first round.

        The first token of a request comes from the prompt's own evaluation and belongs to no round.
        """
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counters and `tokens_per_round`, ready for JSON."""
        return {**asdict(self), "tokens_per_round": self.tokens_per_round}

    def __str__(self) -> str:
        """Return `tokens_per_round`, and the counters as repr() has them."""
        return _text(self, "tokens_per_round")

    @classmethod
    def from_native(cls, raw: Any) -> SpeculationStats:
        """Convert a `dw_stats`."""
        deepest = max((i + 1 for i, n in enumerate(raw.drafted_at) if n), default=0)
        return cls(
            rounds=raw.n_rounds,
            drafted=raw.n_drafted,
            accepted=raw.n_accepted,
            emitted=raw.n_emitted,
            prompt_tokens=raw.n_prompt,
            exact_batches=raw.n_exact_batches,
            cold_rounds=raw.n_cold_rounds,
            failed_drafts=raw.n_failed_drafts,
            paused_rounds=raw.n_paused_rounds,
            ngram_rounds=raw.n_ngram_rounds,
            tree_rounds=raw.n_tree_rounds,
            padding=raw.n_padding,
            step_thread_rounds=raw.n_step_threads,
            restored=raw.n_restored,
            checkpoints=raw.n_checkpoints,
            checkpoint_bytes=raw.checkpoint_bytes,
            drafter_bytes=raw.drafter_bytes,
            graph_bytes=raw.graph_bytes,
            tree_bytes=raw.tree_bytes,
            row_limit=raw.row_limit,
            draft_vocab=raw.draft_vocab,
            shared_rounds=raw.n_shared_rounds,
            ahead_rounds=raw.n_ahead_rounds,
            joint_rounds=raw.n_joint_rounds,
            logits_rows=raw.n_logits_rows,
            gpu_launches=raw.n_launches,
            gpu_replays=raw.n_replays,
            fused_parts=raw.n_fused_parts,
            drafted_by_depth=tuple(raw.drafted_at[:deepest]),
            accepted_by_depth=tuple(raw.accepted_at[:deepest]),
            draft_seconds=raw.t_draft_us * 1e-6,
            verify_seconds=raw.t_verify_us * 1e-6,
            prompt_seconds=raw.t_eval_us * 1e-6,
            sample_seconds=raw.t_sample_us * 1e-6,
            commit_seconds=raw.t_commit_us * 1e-6,
        )


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Counters of an expert pool since the model was loaded: sums over its layers.

    A step's experts are counted once a layer, however many rows chose them.
    Test: tests/model/test_expert_pool.py.
    """

    layers: int
    experts: int
    slots: int
    steps: int
    """Of one layer: decodes, prompts' batches included."""
    hits: int
    """Experts that were in a slot."""
    misses: int
    """Experts that were copied into one."""
    in_place: int
    """Experts that were read from host memory: in prompts, and where a step has more experts than slots."""
    bytes_missed: int
    """That came from host memory for these two, and for guesses."""
    host_bytes: int
    """That all experts take in host memory."""
    device_bytes: int
    """That the slots take."""
    stage_bytes: int
    """That experts of prompts take on their way; 0: prompts read host memory in place."""
    layers_beside: int
    """Layers whose missing experts are copied beside their other work, as a card does it with guesses."""
    guessed: int
    """Experts that were fetched before their router had chosen."""
    right: int
    """Of these, those that it then chose; they are hits."""

    @property
    def hit_rate(self) -> float:
        """The part of experts that were in a slot; 0.0 before the first step."""
        asked = self.hits + self.misses + self.in_place
        return self.hits / asked if asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counters and `hit_rate`, ready for JSON."""
        return {**asdict(self), "hit_rate": self.hit_rate}

    def __str__(self) -> str:
        """Return `hit_rate`, and the counters as repr() has them."""
        return _text(self, "hit_rate")

    @classmethod
    def from_native(cls, raw: Any) -> ExpertStats:
        """Read a dw_expert_stats."""
        return cls(
            raw.n_layers, raw.n_experts, raw.n_slots, raw.n_steps, raw.n_hits, raw.n_misses, raw.n_in_place,
            raw.bytes_missed, raw.host_bytes, raw.device_bytes, raw.stage_bytes, raw.n_beside,
            raw.n_guessed, raw.n_right,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadaheadStats:
    """Counters of experts that are read ahead from a mapped file, since the load: sums over layers.

    A step's experts are counted once a layer, however many rows chose them.
    Test: tests/model/test_expert_readahead.py.
    """

    layers: int
    """That have experts in a mapped file, an MTP block included."""
    steps: int
    """Of one layer: decodes, prompts' batches included."""
    experts_used: int
    """Experts that steps chose."""
    experts_read: int
    """Of these, experts with pages that were not in memory."""
    bytes_read: int
    """Such pages. Both are 0 where Linux hides it: the process neither owns the file nor may write it."""
    expert_bytes: int
    """That all experts of these layers take."""

    def to_dict(self) -> dict[str, Any]:
        """Return the counters, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_native(cls, raw: Any) -> ReadaheadStats:
        """Read a dw_readahead_stats."""
        counted = (raw.n_steps, raw.n_experts_used, raw.n_experts_read, raw.bytes_read)
        return cls(raw.n_layers, *counted, raw.expert_bytes)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """What a pool knows of a layer."""

    slots: int
    expert_bytes: int
    """Of one expert."""
    hits: int
    misses: int
    in_place: int
    heat: tuple[int, ...]
    """By expert: uses of late, in 1/256."""
    slot_of: tuple[int, ...]
    """By expert: its slot, or -1 where it is in host memory alone."""

    @classmethod
    def from_native(cls, raw: Any) -> ExpertLayer:
        """Read a dw_expert_layer."""
        n = raw.n_experts
        return cls(
            raw.n_slots, raw.expert_bytes, raw.n_hits, raw.n_misses, raw.n_in_place,
            tuple(raw.heat[:n]), tuple(raw.slot_of[:n]),
        )  # fmt: skip
