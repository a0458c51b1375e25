"""Engines on bare contexts for the tests of the C API, and an oracle that knows the plain continuation.

Random weights accept almost no drafts, so a wrong roll-back would never show. The oracle drafts the true
continuation with one wrong token at a chosen depth: every accepted length then really happens.
Knows no test. Shapes: logits f32[n_vocab]; a `Run` holds row i for the token at position len(prompt) - 1 + i.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from draftwood._llama_cpp import llama_cpp as native
from draftwood._llama_cpp._internals import LlamaSampler
from draftwood._llama_cpp._logger import set_verbose
from draftwood.engine import _capi
from draftwood.engine.engine import Engine, probe_model
from draftwood.engine.experts import ExpertPool
from draftwood.load.placement import pooled_layers, tensor_overrides

PROMPT = (3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64)


@dataclass(frozen=True)
class Run:
    """What a plain greedy run gave: `tokens[i]` is the best of `rows[i]`."""

    prompt: tuple[int, ...]
    tokens: list[int]
    rows: list[np.ndarray]

    def wrong(self, i: int) -> int:
        """Return a token that does not follow `tokens[:i]`."""
        return (self.tokens[i] + 1) % len(self.rows[i])


class Rig:
    """One model, one context, at most one engine; `close()` frees them in the right order."""

    def __init__(
        self,
        path: Path | str,
        *,
        drafter: int = _capi.DRAFTER_NONE,
        draft_tokens: int = 5,
        n_rs_seq: int = 0,
        n_ctx: int = 256,
        n_ubatch: int = 128,
        n_batch: int | None = None,
        exact_rows: int = 64,
        draft_p_min: float = 0.0,
        n_threads: int = 1,
        tree_budget: int = 0,
        draft_vocab: int = 0,
        flash: bool = False,
        type_kv: int | None = None,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        results: int = 0,
        queue_steps: bool = False,
        begin_drafts: bool = True,
        engine: bool = True,
        cb_eval: Any = None,
        pool: ExpertPool | None = None,
        context: dict[str, Any] | None = None,
    ) -> None:
        """Context: fields of llama_context_params that have no argument here."""
        model_params = native.llama_model_default_params()
        model_params.load_mtp = drafter == _capi.DRAFTER_MTP
        model_params.use_extra_bufts = False
        pooled = pooled_layers(probe_model(str(path)), pool) if pool is not None else ()
        self._overrides = tensor_overrides(0, None, pooled=pooled)
        if self._overrides is not None:
            model_params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        set_verbose(False)
        native.llama_backend_init()
        self.model = native.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model is not None, path
        self.params = native.llama_context_default_params()
        self.params.n_ctx = n_ctx
        self.params.n_batch, self.params.n_ubatch = n_batch or n_ubatch, n_ubatch
        self.params.n_threads = self.params.n_threads_batch = n_threads
        self.params.n_rs_seq = n_rs_seq
        self.params.n_seq_max = n_seq_max
        self.params.kv_unified = kv_unified
        self.params.flash_attn_type = (
            native.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else native.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        if type_kv is not None:
            self.params.type_k = self.params.type_v = type_kv
        if cb_eval is not None:
            self.params.cb_eval = cb_eval
        for name, value in (context or {}).items():
            setattr(self.params, name, value)
        self.ctx = native.llama_init_from_model(self.model, self.params)
        assert self.ctx is not None, path
        self.n_vocab = native.llama_vocab_n_tokens(native.llama_model_get_vocab(self.model))
        self.sampler = native.llama_sampler_init_greedy()
        self.settings = {
            "drafter": drafter,
            "draft_tokens": draft_tokens,
            "exact_rows": exact_rows,
            "draft_p_min": draft_p_min,
            "tree_budget": tree_budget,
            "draft_vocab": draft_vocab,
            "results": results,
            "queue_steps": queue_steps,
            "begin_drafts": begin_drafts,
        }
        self.engine: Any = None
        if engine:
            self.attach()

    def attach(self) -> Engine:
        self.engine = Engine(self.ctx, self.params, **self.settings)
        return self.engine

    def detach(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        if self.ctx is not None:
            self.detach()
            native.llama_sampler_free(self.sampler)
            native.llama_free(self.ctx)
            native.llama_model_free(self.model)
            self.ctx = None

    @property
    def memory(self) -> Any:
        return native.llama_get_memory(self.ctx)

    @property
    def held(self) -> int:
        """Positions that the context's memory really holds."""
        return native.llama_memory_seq_pos_max(self.memory, 0) + 1

    def logits(self, row: int = -1) -> np.ndarray:
        pointer = native.llama_get_logits_ith(self.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,)).copy()

    def sample(self) -> tuple[int, np.ndarray]:
        """Sample the engine's next row; return the token and the row."""
        row, _ = self.engine.row()
        logits = self.logits(row)
        return self.engine.next(self.sampler), logits

    def start(self, prompt: Sequence[int] = PROMPT) -> int:
        """Evaluate a prompt from nothing and return the first token."""
        self.engine.reset()
        self.engine.eval(prompt, 0)
        return self.engine.next(self.sampler)

    def open_round(self, run: Run, n: int = 5, take: int = 0) -> None:
        """After the first token verify a right draft of n tokens and sample `take` of its rows."""
        self.engine.propose_given(run.tokens[0], run.tokens[1 : 1 + n])
        self.engine.verify()
        for _ in range(take):
            self.sample()

    def plain(self, last: int, n: int) -> tuple[list[int], list[np.ndarray]]:
        """Take n plain steps after `last`; return their tokens and rows."""
        tokens, rows = [], []
        for _ in range(n):
            self.engine.propose_given(last, [])
            self.engine.verify()
            last, row = self.sample()
            tokens.append(last)
            rows.append(row)
        self.engine.commit()
        return tokens, rows

    def reference(self, n: int, prompt: Sequence[int] = PROMPT) -> Run:
        """Run plainly from nothing for n tokens."""
        self.engine.reset()
        self.engine.eval(prompt, 0)
        first, row = self.sample()
        tokens, rows = self.plain(first, n - 1)
        return Run(tuple(prompt), [first, *tokens], [row, *rows])

    def raw_decode(self, tokens: Sequence[int], at: int | None = None) -> int:
        """llama_decode by a caller that knows no engine; at=None leaves the position to llama.cpp."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = native.llama_batch_get_one(array, len(tokens))
        if at is not None:
            positions = (ctypes.c_int32 * len(tokens))(*range(at, at + len(tokens)))
            batch.pos = positions
        return int(native.llama_decode(self.ctx, batch))

    def save(self) -> bytes:
        size = native.llama_state_get_size(self.ctx)
        buffer = (ctypes.c_uint8 * size)()
        written = native.llama_state_get_data(self.ctx, buffer, size)
        return bytes(buffer[:written])

    def load(self, state: bytes) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert native.llama_state_set_data(self.ctx, buffer, len(state)) == len(state)


def hooked_sampler(hook: Callable[[], None]) -> LlamaSampler:
    """Return a greedy chain (its handle is `.sampler`) that calls `hook` before each choice."""
    chain = LlamaSampler()
    chain.add_custom(lambda _: hook())
    chain.add_greedy()
    return chain


def check_next(rig: Rig, run: Run, i: int) -> None:
    """Check that the next row and its token are the run's i-th, bit for bit."""
    token, logits = rig.sample()
    assert token == run.tokens[i], f"token {i}"
    assert np.array_equal(logits, run.rows[i]), f"row {i}"


def follow(rig: Rig, run: Run, done: int, accept: int, take: int | None = None, depth: int = 5) -> int:
    """Run one oracle round after `done` emitted tokens of `run` and check all that it shows.

    The draft is true for `accept` tokens and then wrong; `take` tokens are sampled (all: accept + 1).
    Returns how many tokens of the run are emitted afterwards.
    """
    true = run.tokens[done : done + depth]
    draft = true[:accept]
    if accept < depth:
        draft = [*draft, run.wrong(done + accept), *true[accept + 1 :]]
    rig.engine.propose_given(run.tokens[done - 1], draft)
    assert rig.engine.draft() == draft
    rig.engine.verify()
    wanted = accept + 1 if take is None else take
    for i in range(wanted):
        row = rig.engine.row()
        assert row is not None, f"the walk ended after {i} of {wanted} tokens"
        assert row[1] == len(run.prompt) + done + i
        check_next(rig, run, done + i)
    if wanted == accept + 1:
        assert rig.engine.row() is None
    rig.engine.commit()
    kept = len(run.prompt) + done - 1 + max(wanted, 1)
    assert rig.engine.n_past == kept
    assert rig.held == kept
    return done + wanted


def check_plain(rig: Rig, run: Run, done: int, n: int = 20) -> None:
    """Check that n plain steps after `done` tokens give the run's tokens and rows, bit for bit."""
    tokens, rows = rig.plain(run.tokens[done - 1], n)
    assert tokens == run.tokens[done : done + n]
    for i, row in enumerate(rows):
        assert np.array_equal(row, run.rows[done + i]), f"row {done + i}, {i} after the round"


def write_llama(path: Path, like: str, *, width: int = 64, blocks: int = 3, has_bias: bool = False) -> None:
    """Write a random F32 model of architecture "llama" with the tokenizer of the GGUF `like`.

    has_bias: of attention's outputs.
    """
    fields = {
        name: field for name, field in gguf.GGUFReader(like).fields.items() if name.startswith("tokenizer.")
    }
    tokens = fields["tokenizer.ggml.tokens"].contents()
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(4096)
    out.add_embedding_length(width)
    out.add_block_count(blocks)
    out.add_feed_forward_length(2 * width)
    out.add_head_count(4)
    out.add_head_count_kv(4)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("qwen2")
    out.add_token_list(tokens)
    out.add_token_types(fields["tokenizer.ggml.token_type"].contents())
    out.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    out.add_eos_token_id(len(tokens) - 1)
    chance = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weight = chance.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        out.add_tensor(f"{name}.weight", weight.astype(np.float32))

    add("token_embd", len(tokens), width)
    add("output_norm", width)
    add("output", len(tokens), width)
    for i in range(blocks):
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}", width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}", width, width)
        if has_bias:
            bias = chance.standard_normal(width).astype(np.float32)
            out.add_tensor(f"blk.{i}.attn_output.bias", bias)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{i}.{name}", 2 * width, width)
        add(f"blk.{i}.ffn_down", width, 2 * width)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
