"""`Llama`: llama-cpp-python's class with our engine: how it is made, looked at, pickled and closed.

What it does between is in generation.py. Every method that is in neither is upstream's own.
Tests: tests/model/generate, tests/model/test_bad_input.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from draftwood._llama_cpp import llama_cpp as _native
from draftwood._llama_cpp.llama_tokenizer import LlamaTokenizer
from draftwood.api.chat import (
    FALLBACK,
    ChatOptions,
    answered,
    chat,
    failing_template_as_error,
    warn_of_fallback,
    with_timings,
)
from draftwood.api.chat_request import bound_request
from draftwood.api.completion import complete, with_bias
from draftwood.api.detokenize import Pieces
from draftwood.api.prompt import checked_texts, encodable_text
from draftwood.api.timings import Latest
from draftwood.engine.drafting import Target, keep_times, make_engine
from draftwood.engine.experts import ExpertPool
from draftwood.engine.readahead import ExpertReadahead
from draftwood.engine.shortage import Shortage
from draftwood.errors import ClosedError, UnsupportedError
from draftwood.generate import raw
from draftwood.generate.generation import Base, Generation
from draftwood.generate.states import check, load, mark, model_of
from draftwood.generate.turns import Turns, alone, in_turn, step_by_step, without_waiting
from draftwood.load import arguments, experts, files, fixes, forks, heat, readahead, rpc
from draftwood.load.devices import cards, machine
from draftwood.load.intercepts import Intercepts
from draftwood.load.preparation import prepare
from draftwood.options import Options, default_draft_tokens
from draftwood.speculative import Drafting, drafting_of
from draftwood.stats import ExpertStats, ReadaheadStats, SpeculationStats

fixes.apply()
raw.apply()

_DEFAULTS = Options()
_CHAT = inspect.signature(Base.create_chat_completion)
_COMPLETION = inspect.signature(Base._create_completion)
_COUNTERS = ("tree_refusal", "speculation_stats", "expert_stats", "readahead_stats")
_SPOKEN = {"none": "off", "given": "draft_model"}


class Llama(Intercepts, Generation):
    """llama-cpp-python's Llama, with drafting.

    Takes every argument of llama-cpp-python's Llama, and:
        speculation: "auto" (draft with `drafter`, else with the model's MTP block if it has one), "off",
            "mtp", "dflash", "ngram" (what followed the last tokens where they stood before in the text), or
            "tree" (as "auto" drafts, always in trees).
        speculative: a SpecConfig in place of speculation, drafter, draft_tokens and draft_p_min.
        drafter: path of a DFlash drafter's GGUF, made for this model.
        draft_tokens: longest draft of a round, 1 to 63 tokens (4; 2 with "mtp" on a CPU, 8 with "auto" and
            with trees, 16 with a draft_model of the caller's own).
        tree_budget: draft trees verified in up to so many rows, 1 to 64, the newest token's included (16 with
            "tree", and at most 16 with "auto"; else drafts are chains).
        draft_p_min: end a draft where the drafter gives its path less than this probability.
        draft_vocab: choose drafts among so many tokens: the vocabulary's first, and those that texts used of
            late (None: an eighth of the vocabulary, a quarter on a card).
        exact: on CPU, run kernels whose rows do not depend on each other's number, so that text is the same
            with drafting on and off, and after a prompt in one piece or in several. False takes llama.cpp's
            stock kernels.
        checkpoint_bytes: host memory for going back to the start of a chat's turns, where the model has
            recurrent layers: a next turn then evaluates its new tokens only. 0 keeps nothing.
        n_cpu_moe: layers, from the first, whose experts stay in host memory.
        tensor_buft_overrides: {regex of tensor names: buffer type}, as llama.cpp's --override-tensor.
        vram: bytes of the card, such as "12GiB", for everything: what other weights, caches and drafts leave
            is for experts, as expert_vram says. Left out, a model larger than its one card gets what is free.
        expert_vram: bytes of the card, such as "6GiB", for experts. All of them lie in host memory, and as
            many as fit on the card, too; a missing one is copied there in the step that needs it
            (docs/experts.md).
        expert_heat: file that keeps which experts were used most, from one run to the next.
        expert_guess: fetch a layer's experts while the layer before it computes (None: on a card).
        expert_readahead: read the experts that a step chose together from the model's file, for a model that
            is larger than memory (docs/experts.md). Left out, it is on for such a model alone.
        rpc_servers: "host:port,host:port" of ggml-rpc-servers that take layers (n_gpu_layers), before this
            machine's cards. One that goes away while it is in use ends the process.
        chat_template_kwargs, reasoning_format, parse_tool_calls: defaults of `create_chat_completion`.
    flash_attn left out is llama.cpp's `auto` where the cache is on this machine's GPUs, else off, as there.

    Errors: OptionError (ValueError) for arguments that make no sense, UnsupportedError (ValueError) when a
    drafter was asked for that this model cannot run, ModelFileError (ValueError) for a bad file, ServerError
    (ConnectionError) for an RPC server that does not answer.
    """

    def __init__(
        self,
        model_path: str,
        *,
        speculation: str = _DEFAULTS.speculation,
        speculative: Any = None,
        drafter: str | None = _DEFAULTS.drafter,
        draft_tokens: int | None = None,
        tree_budget: int | None = None,
        draft_model: Any = None,
        draft_p_min: float = _DEFAULTS.draft_p_min,
        draft_vocab: int | None = None,
        exact: bool = _DEFAULTS.exact,
        checkpoint_bytes: int = _DEFAULTS.checkpoint_bytes,
        n_cpu_moe: int = 0,
        tensor_buft_overrides: Mapping[str, str] | str | None = None,
        rpc_servers: str | None = None,
        vram: int | str | None = None,
        expert_vram: int | str | None = None,
        expert_heat: str | None = None,
        expert_guess: bool | None = None,
        expert_readahead: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_format: str | None = None,
        parse_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._turns = Turns()
        self._engine = None
        self._guard = None
        self._servers: rpc.Servers | None = None
        self._pool: ExpertPool | None = None
        self._readahead: ExpertReadahead | None = None
        self._pieces: Pieces | None = None
        self._latest = Latest()
        self._stack = contextlib.ExitStack()  # __del__ closes it, also where the arguments are refused
        asked = Drafting(speculation, drafter, draft_tokens, draft_p_min)
        if speculative is not None:
            asked = drafting_of(speculative, asked)
        draft_tokens = asked.draft_tokens
        if draft_tokens is None:
            given = draft_model is not None
            on_cpu = kwargs.get("n_gpu_layers", 0) == 0 or not (rpc_servers or cards())
            draft_tokens = default_draft_tokens(asked.speculation, tree_budget, given=given, on_cpu=on_cpu)
        self._options = Options(
            asked.speculation,  # type: ignore[arg-type]
            draft_tokens,
            asked.draft_p_min,
            exact,
            files.drafter_path(asked.drafter),
            checkpoint_bytes,
            tree_budget,
            draft_vocab,
        )
        self._shortage = Shortage()
        self._chat_options = ChatOptions(chat_template_kwargs, reasoning_format, parse_tool_calls)
        self._placement = {
            "n_cpu_moe": n_cpu_moe,
            "tensor_buft_overrides": tensor_buft_overrides,
            "rpc_servers": rpc_servers,
            "vram": vram,
            "expert_vram": expert_vram,
            "expert_heat": expert_heat,
            "expert_guess": expert_guess,
            "expert_readahead": expert_readahead,
        }
        model_path = os.fsdecode(model_path)
        forks.require_usable()
        prepared = prepare(model_path, self._options, self._placement, draft_model, kwargs, _KNOWN)
        self._plan, self._as_given, self._auto_flash = prepared.plan, prepared.given, prepared.auto_flash
        self._servers, self._tensor_overrides = prepared.servers, prepared.tensor_overrides
        self._pool, self._info = prepared.pool, prepared.info
        forks.watch(self._turns, on_card=kwargs.get("n_gpu_layers", 0) != 0 and bool(cards()))
        try:
            with (
                experts.memory_errors(self._pool, self._info),
                files.unparsable_template_as_error(model_path),
            ):
                super().__init__(model_path, **kwargs)
            self._format_is_told = kwargs.get("chat_format") is not None or self.chat_format != FALLBACK
            self._readahead = readahead.begin(self.model, prepared.read_ahead)  # before graphs are built
            if self._readahead is not None:
                self._stack.callback(self._readahead.close)  # after the engine, which is made later
            # not given to upstream, which would store the logits of the whole context
            self.draft_model = draft_model if self._plan.drafter == "given" else None
            self._pieces = Pieces(self._model.vocab)
            self._model.detokenize = self._pieces.join  # below every tokenizer of this model
            if not self.model_params.vocab_only:
                experts.check_filled(self._pool, self._placement)
            self._attach_engine()
            if (self._is_hybrid or self._is_recurrent) and self._ctx.memory is not None:
                self._stack.callback(raw.watch(self))  # not a method of ours: no cycle
            for name in _COUNTERS:
                getattr(self, name)  # for threads that look while another one generates
        except BaseException:
            self.close()
            raise

    def _attach_engine(self) -> None:
        # upstream sizes these by its argument; llama.cpp rounds the context up
        if len(self.input_ids) < self._n_ctx:
            self.input_ids: Any = np.ndarray((self._n_ctx,), dtype=np.intc)
            if self._logits_all:
                self.scores = np.ndarray((self._n_ctx, self._n_vocab), dtype=np.single)
        if not self._generates_on_engine():
            if self.draft_model is not None:
                raise UnsupportedError(
                    "found draft_model= for a model that continues no text; expected none",
                    hint="leave draft_model out",
                )
            return
        slots = self._pool.n_slots if self._pool else None
        timed = {**self.__getstate__(), "expert_slots": slots}
        target = Target(self.ctx, self.context_params, model_of(self), timed, machine())
        self._engine, self._plan = make_engine(target, self._plan, self._options)
        self._by_turns = (self._is_hybrid or self._is_recurrent) and self._options.checkpoint_bytes > 0
        self._stack.callback(self._engine.close)  # before the context; not a method of ours: no cycle
        self._keep_times = weakref.finalize(self, keep_times, self._engine, self._turns.at_once)  # or at exit
        # collected as parts of a cycle, the context may go before this object
        for last in (self._engine.close, self._keep_times):
            self._ctx._exit_stack.callback(last)

    def _generates_on_engine(self) -> bool:
        wanted = self._plan.drafter != "none" or self._options.exact
        generates = not (self.context_params.embeddings or self.model_params.vocab_only)
        model = self._model.model
        return bool(
            wanted
            and generates
            and not _native.llama_model_has_encoder(model)
            and _native.llama_get_memory(self._ctx.ctx)
        )

    def close(self) -> None:
        """Free the model. Closing twice is allowed; any other use afterwards raises ClosedError."""
        if not hasattr(self, "_turns"):
            return  # arguments that did not bind: never constructed, yet __del__ comes here
        if forks.is_lost(self._turns):
            return  # the engine is as that thread left it, within a step: not to be freed
        if sys.is_finalizing():  # a thread that has the turn never gives it back
            self._close()
        else:
            with self._turns:
                self._close()

    def _close(self) -> None:
        self._turns.drop_stream()
        with contextlib.ExitStack() as stack:  # from the last to the first, whichever of them fail
            stack.callback(self._forget)
            if self._servers is not None:
                stack.callback(self._servers.close)
            if self._pool is not None:
                stack.callback(self._pool.close)
            stack.callback(super().close)  # the engine, what reads ahead, the contexts, the model
            if self._pool is not None and (path := heat.path_of(self._placement["expert_heat"])):
                stack.callback(heat.write, path, self._pool, self._info)
            if self._engine is not None:
                stack.callback(self._keep_times)
            if self._pieces is not None:
                stack.callback(self._pieces.close)

    def _forget(self) -> None:
        self._engine = self._pool = self._readahead = None
        # upstream keeps the freed pointers and would hand them to the library
        closed: Any = _Closed()
        self._model = self._ctx = self._batch = self.tokenizer_ = closed

    @property
    def speculation(self) -> str:
        """What drafts: "mtp", "dflash", "ngram", "draft_model" (the caller's own), or "off"."""
        return _SPOKEN.get(self._plan.drafter, self._plan.drafter)

    @property
    def speculation_reason(self) -> str:
        """Why nothing is drafted; empty when a drafter runs."""
        return self._plan.reason

    @property
    @without_waiting
    def tree_refusal(self) -> str:
        """Why drafts are chains here whatever tree_budget says; empty where they can be trees."""
        return self._engine.tree_refusal if self._engine else self._plan.reason

    @property
    @without_waiting
    def speculation_stats(self) -> SpeculationStats | None:
        """Counters of the engine; None where upstream's own loop runs (exact=False without drafting).

        Never waits. While another thread generates, these are the counters as they were last read; a
        completion reads them at its begin and its end.
        """
        return self._engine.stats() if self._engine else None

    @property
    @without_waiting
    def expert_stats(self) -> ExpertStats | None:
        """Counters of the pool of experts; None without one. As last read while another thread generates."""
        return self._pool.stats() if self._pool else None

    @property
    @without_waiting
    def readahead_stats(self) -> ReadaheadStats | None:
        """Counters of the experts that are read ahead from the model's file; None where none are.

        As last read while another thread generates.
        """
        return self._readahead.stats() if self._readahead else None

    @in_turn
    def reset_speculation_stats(self) -> None:
        """Set the counters of `speculation_stats` to zero. Waits while another thread generates."""
        if self._engine:
            self._engine.stats_reset()

    def set_seed(self, seed: int) -> None:
        """Set the seed of later requests. Errors: OptionError for what is no whole number."""
        super().set_seed(arguments.checked_seed(seed))

    @property
    def last_usage(self) -> dict[str, int] | None:
        """OpenAI's `usage` of the last completion or chat, which a stream lacks; of a stream so far.

        None before the first, and with a tokenizer or `detokenize` of the caller's own.
        """
        return self._latest.usage() if self._latest.usage is not None else None

    @step_by_step
    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
        """Yield a completion or its chunks as upstream does, in linear time (completion.py)."""
        bound = _COMPLETION.bind(self, *args, **kwargs)
        bound.apply_defaults()
        request = dict(bound.arguments)
        del request["self"]
        request.update(logits_processor=with_bias(request, self._n_vocab), logit_bias=None)
        self._latest.usage = None
        # the text of another tokenizer, or of a subclass's detokenize, need not be a join of pieces
        if type(self.tokenizer_) is not LlamaTokenizer or type(self).detokenize is not Base.detokenize:
            yield from super()._create_completion(**request)
        else:
            assert self._pieces is not None
            yield from complete(self, self._pieces, request, self._latest)

    create_completion = in_turn(Base.create_completion)
    create_embedding = in_turn(Base.create_embedding)

    @in_turn
    def embed(
        self, input: Any, normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """Embed a text or several, as upstream does; without pooling one by one, for upstream mixes rows.

        Errors: OptionError for a text without tokens.
        """
        if self.context_params.embeddings:  # else upstream refuses
            input = checked_texts(self, input)
        if not isinstance(input, str) and len(input) == 0:
            return ([], 0) if return_count else []
        asked = {"normalize": normalize, "truncate": truncate}
        if isinstance(input, str) or self.pooling_type() != _native.LLAMA_POOLING_TYPE_NONE:
            return super().embed(input, return_count=return_count, **asked)
        each = [Base.embed(self, text, return_count=True, **asked) for text in input]
        rows, counts = [found for found, _ in each], [count for _, count in each]
        return (rows, sum(counts)) if return_count else rows

    @in_turn
    def create_chat_completion(
        self,
        *args: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_format: str | None = None,
        parse_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Answer a list of messages: upstream's arguments and result, with `timings`, and chat.ChatOptions.

        Errors: OptionError for messages that are none; OptionError, UnsupportedError for options that the
        template or the chat format cannot serve.
        """
        request = bound_request(_CHAT, self, *args, **kwargs)
        asked = ChatOptions(chat_template_kwargs, reasoning_format, parse_tool_calls)
        options = asked.over(self._chat_options)
        self._latest.timings = None
        if not self._format_is_told and self.chat_format == FALLBACK:
            self._format_is_told = True
            warn_of_fallback()
        with failing_template_as_error(), encodable_text():
            theirs, plain = super().create_chat_completion, options == ChatOptions()
            result = answered(request, lambda each: theirs(**each) if plain else chat(self, each, options))
            return with_timings(self._latest, result)

    @in_turn
    def save_state(self) -> Any:
        """Return a LlamaState of what is evaluated; it knows its model."""
        return mark(self, super().save_state())

    @alone
    def load_state(self, state: Any) -> None:
        """Go back to a saved state. Errors: StateError for one that does not fit (states.py)."""
        check(self, state)  # one that is refused here changes nothing
        self._requires_eval = True
        load(self, state)
        self._rowless = self.n_tokens

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor's arguments: a pickled Llama loads its model again."""
        state: dict[str, Any] = super().__getstate__()
        return {
            **state,
            **self._as_given,
            **asdict(self._options),
            **self._placement,
            **asdict(self._chat_options),
        }


class _Closed:
    """Stands where something was that is freed."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("found a Llama that was closed; expected an open one", hint="load the model again")


def _joined_signature(theirs: Any, ours: Any) -> inspect.Signature:
    """Upstream's signature with our keywords after its own, before its **kwargs."""
    parameters = list(inspect.signature(theirs).parameters.values())
    known = {p.name for p in parameters} | {"args", "kwargs"}
    added = [p for name, p in inspect.signature(ours).parameters.items() if name not in known]
    rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    return inspect.Signature([*(p for p in parameters if p not in rest), *added, *rest])


def _sign(ours: Any, theirs: Any) -> None:
    ours.__signature__ = _joined_signature(theirs, ours)


_sign(Llama.__init__, Base.__init__)
_sign(Llama.create_chat_completion, Base.create_chat_completion)
_KNOWN = frozenset(inspect.signature(Llama.__init__).parameters) - {"self", "kwargs"}
