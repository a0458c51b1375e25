"""How `Llama` evaluates and generates: one context, one engine, rounds of drafts below a generator of tokens.

Upstream's other methods come to the engine through `eval` and `generate` here. Text is the same with
drafting on and off: `generate` samples the target itself at each position, with the request's own sampler
chain, and uses drafts only to evaluate several positions at once (engine.py).
Must not know: constructor arguments, text, requests. Tests: tests/model/generate, test_exact.py.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from draftwood._llama_cpp import llama as _upstream
from draftwood._llama_cpp import llama_cpp as _native
from draftwood.engine.engine import Engine
from draftwood.engine.shortage import Shortage
from draftwood.errors import ClosedError, DecodeError, OptionError, UnsupportedError, no_tokens
from draftwood.generate import rows
from draftwood.generate.processors import GuardedProcessors, WatchedGrammar, given_draft
from draftwood.generate.prompt import chunks, common_prefix, last_turn
from draftwood.generate.sampling import as_top_k, require_finite, tokens_enough
from draftwood.generate.turns import Turns, alone, step_by_step
from draftwood.load.grammars import require_grammar

# bound now: install() and the alias put our class in its place in that module
Base: Any = _upstream.Llama
_SAMPLE = inspect.signature(Base.sample)  # 0.1 ms to make: once, not per token


def _context_taken_error(sampler: Any) -> UnsupportedError:
    """sampler: of whoever has taken the context; None: not a generation (turns.py)."""
    hint = "close this generator, or load the model a second time"
    if sampler is None:
        return UnsupportedError(
            "found that eval(), sample(), reset() or load_state() in another thread has taken the context; "
            "expected a stream that is read to its end",
            hint=hint,
        )
    return UnsupportedError(
        "found that a later generate() has taken the context; expected one generation at a time", hint=hint
    )


class Generation(Base):  # type: ignore[misc]
    """llama-cpp-python's Llama with our engine, where it has one, under `eval`, `sample` and `generate`."""

    _turns: Turns
    _engine: Engine | None
    _guard: GuardedProcessors | None
    _by_turns: bool
    """Whether prompts are cut where their last turn begins: recurrent layers cannot go back elsewhere."""
    _as_given: dict[str, Any]
    """Arguments as the caller gave them, where upstream's own state has others (preparation.py)."""
    _shortage: Shortage
    _rowless: int | None = None
    """n_tokens for which the context has no row, though it ends there: a loaded state has none."""
    _rows_from: int | None = None
    """Position of the newest decode's first row, if that was an `eval` with the logits of all rows."""

    @alone
    def reset(self) -> None:
        """Forget everything that was evaluated."""
        self._rowless = None
        if self._engine is None:
            super().reset()
            return
        self.n_tokens = 0  # first: Ctrl-C may fall between any two lines
        self._requires_eval = True
        self._engine.reset()

    @alone
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate `tokens` after the first `n_tokens` of the context.

        Errors: ContextFullError (RuntimeError) when they do not fit; UnsupportedError when `n_tokens` was set
        back further than the model's memory can go.
        """
        if self._engine is None:
            self._require_memory()
            super().eval(tokens)
            self._rowless = None if tokens else self._rowless
            return
        if self.n_tokens < 0:
            raise OptionError(
                f"found n_tokens={self.n_tokens}; expected 0 or more", hint="reset(), or set n_tokens to 0"
            )
        # as given, not as raised for a draft: a prompt is cut, and so rounds, as without drafting
        n_batch = self._as_given.get("n_batch") or self.n_batch
        n_ubatch = self._as_given.get("n_ubatch") or _native.llama_n_ubatch(self._ctx.ctx)
        for chunk in chunks(list(tokens), n_batch, n_ubatch):
            n_past = self.n_tokens
            fits = chunk[: self._n_ctx - n_past]  # the engine refuses the rest with a clear error
            self.input_ids[n_past : n_past + len(fits)] = fits
            self._decoding(self._engine.eval, chunk, n_past, all_logits=self._logits_all)
            self.n_tokens = n_past + len(chunk)
            self._requires_eval, self._rowless = False, None
            self._rows_from = n_past if self._logits_all else None
            if self._logits_all:
                self._store_scores(n_past, range(len(chunk)))

    def _store_scores(self, pos: int, rows: Sequence[int]) -> None:
        for offset, row in enumerate(rows):
            logits = _native.llama_get_logits_ith(self._ctx.ctx, row)
            self.scores[pos + offset, :] = np.ctypeslib.as_array(logits, shape=(self._n_vocab,))

    def _decoding(self, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except DecodeError:  # what the context holds now is unknown, but for its checkpoints
            assert self._engine is not None
            self.n_tokens, self._requires_eval = self._engine.reach(self.n_tokens), True
            self._rowless = self.n_tokens
            self._engine.trim(self.n_tokens)
            raise

    @step_by_step
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens after the prompt `tokens`, one per step, until the caller stops.

        After the k-th token `n_tokens` is len(prompt) + k - 1, as with llama-cpp-python: the token just
        yielded is not evaluated yet. `send()` adds tokens after it. Processors see each prefix once and in
        order. Another generate() or close() ends it: UnsupportedError, ClosedError.
        Errors: OptionError for an empty prompt; ContextFullError at the end of the context; whatever a logits
        processor or stopping criterion raises.
        """
        sampling: dict[str, Any] = dict(
            top_k=as_top_k(top_k),
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            temp=temp,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            tfs_z=tfs_z,
            mirostat_mode=mirostat_mode,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            penalize_nl=penalize_nl,
            logits_processor=logits_processor,
            grammar=grammar,
        )
        if self._engine is None:
            self._require_memory()
            steps = super().generate(tokens, reset=reset, stopping_criteria=stopping_criteria, **sampling)
            yield from self._watched(steps)
            return
        self._mirostat_mu = ctypes.c_float(2.0 * mirostat_tau)
        self._sampler = sampler = self._init_sampler(**sampling)
        self._engine.set_request(max(0.0, temp), tokens_enough(**sampling))
        try:
            self._prefill([int(token) for token in tokens], reset)
            yield from self._rounds(sampler, self._guard, stopping_criteria)
        finally:
            if self._sampler is sampler:  # else a later generate() has the context
                self._settle()

    def _watched(self, steps: Any) -> Generator[int, Sequence[int] | None, None]:
        """Yield from upstream's generator, until another one has taken the context."""
        sampler = sent = None
        while True:
            try:
                token = steps.send(sent)
            except StopIteration:
                return
            sampler = sampler or self._sampler
            sent = yield token
            if self._sampler is not sampler:
                raise _context_taken_error(self._sampler)

    def _init_sampler(
        self, *args: Any, logits_processor: Any = None, grammar: Any = None, **kwargs: Any
    ) -> Any:
        require_finite(kwargs)
        if "top_k" in kwargs:
            kwargs["top_k"] = as_top_k(kwargs["top_k"])
        if grammar is not None:
            require_grammar(grammar)
        # ctypes prints and drops what a callback raises; ours is kept and raised after the C call
        watched = logits_processor is not None or grammar is not None
        self._guard = GuardedProcessors(logits_processor or []) if watched else None
        if grammar is not None and self._guard is not None:
            grammar = WatchedGrammar(grammar, self._guard)
        processors = self._guard if logits_processor is not None else None
        return super()._init_sampler(*args, logits_processor=processors, grammar=grammar, **kwargs)

    @alone
    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample a token after the first `n_tokens` of the context, or after the first idx + 1.

        Takes upstream's arguments. A generation under way is as before: its next token is the same.
        Errors: OptionError where no logits are; whatever a logits processor raises.
        """
        self._require_memory()
        given = _SAMPLE.bind(self, *args, **kwargs).arguments
        del given["self"]
        row = rows.found(self, given.get("idx"))
        token: int = super().sample(**{**given, "idx": row + self.n_tokens})
        if self._guard is not None:
            self._guard.raise_pending()
        return token

    def _require_memory(self) -> None:
        """Refuse a context that holds no text; upstream says no more than AssertionError."""
        if self._ctx.memory is not None:
            return
        if self.model_params.vocab_only:
            raise UnsupportedError(
                "found vocab_only=True, which leaves tokenize and detokenize; expected a model with weights",
                hint="leave vocab_only out",
            )
        raise UnsupportedError(
            "found a model that keeps no text, as those for embeddings do; expected one that continues text",
            hint="embed(text), of Llama(model, embedding=True)",
        )

    def _newest_row(self) -> int | None:
        """Return the row of the last decode that stands for `n_tokens` and make it the engine's next."""
        if self._engine is None:
            return None
        row = self._engine.row()
        if row is None or row[1] != self.n_tokens:
            row = self._engine.row() if self._engine.rewind() else None
        return row[0] if row is not None and row[1] == self.n_tokens else None

    def _prefill(self, prompt: list[int], reset: bool) -> None:
        """Evaluate the prompt, keeping the longest prefix that the context already holds."""
        assert self._engine is not None
        if reset and self.n_tokens > 0:
            common = common_prefix(self._input_ids, prompt)
            same = common == len(prompt) == self.n_tokens and not self._requires_eval
            if same and self._newest_row() is not None:
                return  # the logits are still there
            # at least one token must be evaluated to have logits
            keep = self._engine.reach(min(common, len(prompt) - 1))
            if keep > 0 and self._engine.trim(keep):
                self.n_tokens, self._requires_eval = keep, True
                self._eval_prompt(prompt, keep)
                return
        if reset:
            self.reset()
        if prompt:
            self._eval_prompt(prompt, 0)
        elif self.n_tokens == 0 or self._newest_row() is None:
            raise no_tokens("generate(tokenize(text)), or the BOS token: [token_bos()]")

    def _eval_prompt(self, prompt: list[int], kept: int) -> None:
        """Evaluate the prompt after its first `kept` tokens; the next one may go back to its last turn."""
        assert self._engine is not None
        if self.verbose and kept > 0:
            print(f"Llama.generate: kept {kept} tokens, {len(prompt) - kept} to evaluate", file=sys.stderr)
        turn = last_turn(prompt, self._model.vocab) if self._by_turns else 0
        if turn > kept:
            self.eval(prompt[kept:turn])
        if turn >= kept:
            self._engine.checkpoint()
        self.eval(prompt[max(turn, kept) :])

    def _rounds(
        self, sampler: Any, guard: GuardedProcessors | None, stopping_criteria: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        engine = self._engine
        assert engine is not None
        token = -1
        while True:
            row = engine.row()
            if row is None:  # never at first: the prompt left a row to sample
                self._start_round(token)
                continue
            # processors and criteria look at the prefix through n_tokens, so it is set before they run
            index, self.n_tokens = row
            if self._logits_all:
                self._store_scores(self.n_tokens - 1, [index])
            token = self._sampled(sampler, guard)
            if self.n_tokens < len(self.input_ids):
                self.input_ids[self.n_tokens] = token
            if stopping_criteria is not None and stopping_criteria(self._input_ids, self._newest_scores()):
                return
            sent = yield token
            self._require_turn(sampler)
            if sent is not None:
                self.eval([token, *sent])

    def _sampled(self, sampler: Any, guard: GuardedProcessors | None) -> int:
        """Sample the engine's row; raise what a processor raised rather than what came of it."""
        assert self._engine is not None
        try:
            return self._engine.next(sampler.sampler)
        finally:
            if guard is not None:
                guard.raise_pending()

    def _require_turn(self, sampler: Any) -> None:
        """Refuse to go on with a generation whose context is gone or was taken by a later one."""
        if self._engine is None:
            raise ClosedError(
                "found a Llama that was closed; expected it open until the generator ends",
                hint="close the generator first, or take its last token before close()",
            )
        if self._sampler is not sampler:
            raise _context_taken_error(self._sampler)

    def _start_round(self, last: int) -> None:
        engine = self._engine
        assert engine is not None
        if not engine.trim(self.n_tokens):
            raise UnsupportedError(
                f"the context was moved past position {self.n_tokens} while a generation was running; "
                "expected it untouched between two tokens",
                hint="start a new generate()",
            )
        if self.draft_model is None:
            self._decoding(engine.propose, last)
        else:
            # as upstream: from all tokens, the newest included
            drafted = self.draft_model(self.input_ids[: self.n_tokens + 1])
            self._decoding(
                engine.propose_given, last, given_draft(drafted, engine.draft_tokens, self._n_vocab)
            )
        self._decoding(engine.verify)
        self._rows_from = None

    def _newest_scores(self) -> Any:
        # without logits_all nothing is stored, and upstream hands out its first, unset row
        return self._scores[-1 if self._logits_all else 0, :]

    def _settle(self) -> None:
        """End an open round: what the caller took is kept."""
        if self._engine is not None and not sys.is_finalizing():
            self._engine.commit()
            self._shortage.tell(self._engine.stats())


Generation.sample.__signature__ = _SAMPLE  # type: ignore[attr-defined]
