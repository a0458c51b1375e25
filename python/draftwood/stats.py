"""Counters as users read them: `llm.speculation_stats`, `expert_stats`, `readahead_stats`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


def _text(stats: Any, first: str) -> str:
    """Return the most useful property, then the counters as repr() shows them."""
    return f"{first}={getattr(stats, first):.3g}, {stats!r}"


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Counters since the model was loaded or `reset_speculation_stats()`, and sizes as they are now.

    A round is one verify. A plain step is a round whose draft is empty.
    Test: tests/model/generate/test_same_text.py.
    """

    rounds: int
    """Verifies, plain steps included."""
    drafted: int
    """Draft tokens that were verified, those of all branches."""
    accepted: int
    """Of these, tokens that were kept."""
    emitted: int
    """Tokens that were sampled."""
    prompt_tokens: int
    """Prompt tokens that were evaluated. Those kept from an earlier turn are not counted."""
    exact_batches: int
    """Batches of the model that ran row-exact CPU kernels."""
    cold_rounds: int
    """Rounds without a draft because the drafter lacked the hidden state before the root."""
    failed_drafts: int
    """Times that the drafter failed, while it drafted or read kept tokens. Fewer tokens are drafted then."""
    paused_rounds: int
    """Rounds without a draft because speculation="auto" expected plain decode to be faster."""
    ngram_rounds: int
    """Rounds that speculation="auto" gave to n-grams instead of the drafter."""
    tree_rounds: int
    """Rounds whose draft branched."""
    padding: int
    """Rows that were added to draft trees so that a kept graph fits them."""
    step_thread_rounds: int
    """Rounds of several rows that ran on n_threads instead of n_threads_batch: it was faster, or tried."""
    restored: int
    """Times that a checkpoint took recurrent layers back to a prefix."""
    checkpoints: int
    """Checkpoints that are held now."""
    checkpoint_bytes: int
    """Host memory of these checkpoints, bytes. Limit: the argument of this name."""
    drafter_bytes: int
    """Memory of drafters now, bytes: KV caches, buffers and short heads, of all engines of the model."""
    graph_bytes: int
    """Memory of kept graphs now, bytes, of all engines of the model. Limit: 512 MiB; the least recently used
    graph is dropped."""
    tree_bytes: int
    """Memory of draft trees now, bytes, of all engines of the model: factors of recurrent states."""
    row_limit: int
    """Rows that a verify may have after a larger one found no memory. 0: no limit."""
    draft_vocab: int
    """Tokens that drafts are chosen from. 0: the whole vocabulary."""
    shared_rounds: int
    """Rounds since a graph found no memory of its own. From then on graphs share one place, and each round
    builds its graph anew."""
    ahead_rounds: int
    """Rounds whose draft went into the verify on the card, before the host knew its tokens."""
    begun_drafts: int
    """Drafts that began behind the verify before, while the host still looked at it."""
    queued_steps: int
    """Rounds whose step was queued on the card before the host knew its token."""
    dropped_steps: int
    """Steps that were queued and never taken: the text ended, or something else came before them."""
    joint_rounds: int
    """Rounds whose draft was made together with drafts of other sequences. 0 in a `Llama`: it has one."""
    logits_rows: int
    """Rows that were sampled from all their logits, copied to the host. Other rows needed their best tokens
    only."""
    gpu_launches: int
    """Graphs that GPUs computed, by the whole process."""
    gpu_replays: int
    """Of these, replays of a captured CUDA graph."""
    fused_parts: int
    """Parts of layers that are one op in the newest graph of a few rows (docs/ops.md). 0 on a CPU."""
    drafted_by_depth: tuple[int, ...]
    """Rounds whose draft was at least so deep: [0] one token, [1] two tokens."""
    accepted_by_depth: tuple[int, ...]
    """Of these, rounds that kept the token at this depth."""
    draft_seconds: float
    """Time of drafting, seconds. A draft that stays on the card counts until it is queued."""
    verify_seconds: float
    """Time of verifies, seconds. It includes the rest of a draft that stays on the card."""
    prompt_seconds: float
    """Time of evaluating prompts, seconds."""
    sample_seconds: float
    """Time of sampling, seconds."""
    commit_seconds: float
    """Time of keeping accepted tokens and removing the others, seconds."""

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
            begun_drafts=raw.n_begun_drafts,
            queued_steps=raw.n_queued_steps,
            dropped_steps=raw.n_dropped_steps,
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
    """Counters of an expert pool since the model was loaded, and its sizes.

    All but `steps` are sums over layers. A step counts an expert once a layer, however many rows chose it.
    Test: tests/model/test_expert_pool.py.
    """

    layers: int
    """Layers whose experts are in the pool."""
    experts: int
    """Experts of these layers."""
    slots: int
    """Experts that the device has room for."""
    steps: int
    """Decodes, batches of prompts included."""
    hits: int
    """Chosen experts that were in a slot."""
    misses: int
    """Chosen experts that were copied into a slot."""
    in_place: int
    """Chosen experts that were read from host memory: in prompts, or if a step chose more than slots."""
    bytes_missed: int
    """Bytes that were read from host memory, for `misses`, `in_place` and `guessed`."""
    host_bytes: int
    """Host memory of all experts, bytes."""
    device_bytes: int
    """Memory of the slots, bytes."""
    stage_bytes: int
    """Memory of the card that experts of prompts pass through, bytes. 0: prompts read host memory."""
    layers_beside: int
    """Layers with work beside which copies run in a second queue, as on a card with guesses."""
    guessed: int
    """Experts that were fetched before their router had chosen."""
    right: int
    """Of these, experts that the router then chose. They count as hits."""
    late: int
    """Waits for a copy that were given up: the expert was read from host memory. A profiler can cause it."""

    @property
    def hit_rate(self) -> float:
        """Part of the chosen experts that were in a slot, 0.0 to 1.0. 0.0 before the first step."""
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
            raw.n_guessed, raw.n_right, raw.n_late,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadaheadStats:
    """Counters of experts that are read ahead from a mapped file, since the model was loaded.

    All but `steps` are sums over layers. A step counts an expert once a layer, however many rows chose it.
    `experts_read` and `bytes_read` are 0 if the process neither owns the file nor may write it: Linux hides
    which pages are in memory. Test: tests/model/test_expert_readahead.py.
    """

    layers: int
    """Layers with experts in a mapped file, those of an MTP block included."""
    steps: int
    """Decodes, batches of prompts included."""
    experts_used: int
    """Experts that were chosen."""
    experts_read: int
    """Of these, experts with pages that were not in memory."""
    bytes_read: int
    """Bytes of these pages."""
    expert_bytes: int
    """Bytes of all experts of these layers."""

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
    """What a pool knows of a layer. Its counters are those of ExpertStats."""

    slots: int
    """Experts that the device has room for."""
    expert_bytes: int
    """Bytes of one expert."""
    hits: int
    """Chosen experts that were in a slot."""
    misses: int
    """Chosen experts that were copied into a slot."""
    in_place: int
    """Chosen experts that were read from host memory."""
    heat: tuple[int, ...]
    """Recent uses of each expert, in 1/256 of a use."""
    slot_of: tuple[int, ...]
    """Slot of each expert. -1: it is in host memory alone."""

    @classmethod
    def from_native(cls, raw: Any) -> ExpertLayer:
        """Read a dw_expert_layer."""
        n = raw.n_experts
        return cls(
            raw.n_slots, raw.expert_bytes, raw.n_hits, raw.n_misses, raw.n_in_place,
            tuple(raw.heat[:n]), tuple(raw.slot_of[:n]),
        )  # fmt: skip
