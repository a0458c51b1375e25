"""The speculative round as Python calls it: a thin owner of a `dw_engine`.

Knows tokens, rows and positions; knows nothing of text, requests or sampling parameters.
Contract: src/include/draftwood.h. Test: tests/model/engine.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.status import check
from draftwood.engine.tree import Tree, native_tree
from draftwood.errors import IDS_HINT, UnsupportedError
from draftwood.options import is_one_of_several
from draftwood.stats import SpeculationStats

_lib = _capi.lib


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a GGUF's header says."""

    architecture: str
    n_layer_nextn: int
    can_draft_mtp: bool
    n_tensors: int
    file_bytes: int
    n_experts: int = 0
    """Of a layer; 0 where there are none."""
    n_experts_used: int = 0
    """Of a layer, by a token."""
    n_expert_layers: int = 0
    """That have experts, MTP blocks not counted."""
    expert_bytes: int = 0
    """Of all experts of these layers."""
    n_layers: int = 0
    """With experts and without, MTP blocks not counted."""
    n_vocab: int = 0
    kv_values: int = 0
    """That a token adds to the KV caches of all layers, MTP blocks included."""
    n_ctx_train: int = 0
    """Tokens of the model's own context; 0 where the header does not say."""
    n_files: int = 1
    """That the model is in; sizes are those of all."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What drafts and verifies take, in microseconds; 0.0 where not known."""

    draft_us: tuple[float, ...]
    """f64[65], by tokens drafted."""
    verify_us: tuple[float, ...]
    """f64[65], by rows."""

    def to_native(self) -> Any:
        """Return it as a dw_curve."""
        raw = _capi.Curve()
        raw.struct_size = ctypes.sizeof(raw)
        raw.draft_us[:] = self.draft_us
        raw.verify_us[:] = self.verify_us
        return raw


_HINT_OF_SEVERAL = "pass the first of the model's files; the others lie beside it, under their own names"


def probe_model(path: str) -> ModelInfo:
    """Read a GGUF's header without loading it, and check that its files are whole.

    path: of the first file.

    Errors: ModelFileError for a file that is missing, cut off or no GGUF.
    Test: tests/model/test_bad_input.py.
    """
    info = _capi.ModelInfo()
    info.struct_size = ctypes.sizeof(info)
    hint = _HINT_OF_SEVERAL if is_one_of_several(str(path)) else None
    check(_lib.dw_probe_model(os.fsencode(path), ctypes.byref(info)), hint)
    return ModelInfo(
        architecture=info.architecture.decode("utf-8", "replace"),
        n_layer_nextn=info.n_layer_nextn,
        can_draft_mtp=bool(info.can_draft_mtp),
        n_tensors=info.n_tensors,
        file_bytes=info.file_bytes,
        n_experts=info.n_experts,
        n_experts_used=info.n_experts_used,
        n_expert_layers=info.n_expert_layers,
        expert_bytes=info.expert_bytes,
        n_layers=info.n_layers,
        n_vocab=info.n_vocab,
        kv_values=info.kv_values,
        n_files=info.n_files,
        n_ctx_train=info.n_ctx_train,
    )


def probe_drafter(drafter: str, model: str) -> None:
    """Refuse a DFlash drafter that cannot draft for a model, told from the headers of both GGUFs.

    Tensors of other shapes than the header says are seen at loading only.
    Errors: ModelFileError as above; UnsupportedError for a misfit, in the words of loading it.
    Test: tests/model/test_probe_drafter.py.
    """
    try:
        check(_lib.dw_probe_drafter(os.fsencode(drafter), os.fsencode(model)))
    except UnsupportedError as error:
        hint = "name the drafter that was made for this model, or none"
        raise UnsupportedError(error.message, hint=hint) from None


def build_info() -> dict[str, Any]:
    """Return what the loaded library was built from: pin, series hash, compiler, backends."""
    info: dict[str, Any] = json.loads(_lib.dw_build_info())
    return info


class Engine:
    """One engine on one sequence of a llama_context. Free it (`close`) before the context."""

    curve_name: str | None = None
    """Under which its times are kept for later loads (curves.py); None: they are not."""

    def __init__(
        self,
        ctx: Any,
        context_params: Any,
        *,
        drafter: int,
        draft_tokens: int,
        draft_p_min: float,
        exact_rows: int,
        drafter_path: str | None = None,
        length: int = _capi.LENGTH_FIXED,
        checkpoint_bytes: int = 0,
        curve: Curve | None = None,
        tree_budget: int = 0,
        seq_id: int = 0,
        draft_vocab: int = 0,
        results: int = 0,
        queue_steps: bool = False,
        begin_drafts: bool = True,
    ) -> None:
        params = _capi.Params()
        _lib.dw_params_init(ctypes.byref(params))
        params.drafter = drafter
        params.draft_tokens = draft_tokens
        params.draft_p_min = draft_p_min
        params.exact_rows = exact_rows
        params.length = length
        params.checkpoint_bytes = checkpoint_bytes
        params.tree_budget = tree_budget
        params.seq_id = seq_id
        params.draft_vocab = draft_vocab
        params.results = results
        params.queue_steps = queue_steps
        params.begin_drafts = begin_drafts
        raw = None if curve is None else curve.to_native()  # kept until the call is over
        params.curve = None if raw is None else ctypes.pointer(raw)
        params.drafter_path = None if drafter_path is None else os.fsencode(drafter_path)
        self._handle = _capi.EngineHandle()
        self._a = ctypes.c_int32()
        self._b = ctypes.c_int32()
        self._token = _capi.Token()
        check(
            _lib.dw_engine_new(
                ctx, ctypes.byref(context_params), ctypes.byref(params), ctypes.byref(self._handle)
            )
        )

    def close(self) -> None:
        """Free the engine and its drafter. Closing twice is allowed."""
        handle, self._handle = self._handle, _capi.EngineHandle()
        _lib.dw_engine_free(handle)

    @property
    def n_past(self) -> int:
        """Positions evaluated and kept."""
        return int(_lib.dw_n_past(self._handle))

    @property
    def draft_tokens(self) -> int:
        """Tokens that a draft may have."""
        return int(_lib.dw_draft_tokens(self._handle))

    def eval(self, tokens: Sequence[int], n_past: int, *, all_logits: bool = False) -> None:
        """Evaluate `tokens` (at most n_ubatch) at positions n_past.. ; the last row can then be sampled.

        Errors: ContextFullError; UnsupportedError if the memory cannot be cut to n_past; DecodeError.
        """
        array = (_capi.Token * len(tokens))(*tokens)
        status = _lib.dw_eval(self._handle, array, len(tokens), n_past, all_logits)
        hints = {
            _capi.ERR_ARGUMENT: IDS_HINT
            if n_past <= self.n_past
            else "set n_tokens to what is evaluated, or less",
            _capi.ERR_UNSUPPORTED: "reset() and evaluate from the start, or go back less far",
        }
        check(status, hints.get(status))

    def propose(self, last: int, max_draft: int = _capi.MAX_DRAFT) -> int:
        """Draft after `last`, the token at n_past. Returns how many tokens were drafted, 0 included."""
        check(_lib.dw_propose(self._handle, last, max_draft, ctypes.byref(self._a)))
        return self._a.value

    def propose_given(self, last: int, draft: Sequence[int]) -> None:
        """Propose the caller's own draft after `last`."""
        array = (_capi.Token * len(draft))(*draft)
        check(_lib.dw_propose_given(self._handle, last, array, len(draft)))

    def propose_tree(self, tree: Tree) -> None:
        """Propose the caller's own tree, whose node 0 is the newest token.

        Errors: OptionError for a tree out of order or too large; ContextFullError; UnsupportedError.
        """
        check(_lib.dw_propose_tree(self._handle, ctypes.byref(tree.to_native())))

    def set_request(self, temperature: float = 0.0, n_top: int = 0) -> None:
        """Tell the temperature of the next requests, 0.0 for greedy, and their sampler's needs.

        n_top: how many of a row's best tokens it decides among; 0: it needs all.
        """
        params = _capi.RequestParams()
        _lib.dw_request_params_init(ctypes.byref(params))
        params.temperature, params.n_top = temperature, n_top
        check(_lib.dw_set_request(self._handle, ctypes.byref(params)))

    def verify(self) -> None:
        """Evaluate `last` and the draft in one llama_decode."""
        check(_lib.dw_verify(self._handle))

    def row(self) -> tuple[int, int] | None:
        """Return (row, n_past) of the row that `next` will sample, or None when the round has ended."""
        status = _lib.dw_row(self._handle, ctypes.byref(self._a), ctypes.byref(self._b))
        if status == _capi.ROUND_END:
            return None
        check(status)
        return self._a.value, self._b.value

    def next(self, sampler: Any) -> int:
        """Sample that row with a llama_sampler, which accepts the token. Returns the token."""
        check(_lib.dw_next(self._handle, sampler, ctypes.byref(self._token)))
        return self._token.value

    def took(self, token: int) -> None:
        """Go on as `next` does, with a token that the caller sampled from that row."""
        check(_lib.dw_took(self._handle, token))

    def draft(self) -> list[int]:
        """Return the tokens of the current draft."""
        array = (_capi.Token * _capi.MAX_DRAFT)()
        check(_lib.dw_get_draft(self._handle, array, ctypes.byref(self._a)))
        return list(array[: self._a.value])

    def tree(self) -> Tree:
        """Return the newest proposal, the newest token its node 0."""
        raw = native_tree()
        check(_lib.dw_get_tree(self._handle, ctypes.byref(raw)))
        return Tree.from_native(raw)

    @property
    def tree_refusal(self) -> str:
        """Why draft trees cannot be verified in this context; empty where they can."""
        return (_lib.dw_tree_refusal(self._handle) or b"").decode()

    def rewind(self) -> bool:
        """Make the row sampled last available again. Returns False if its logits are gone."""
        return bool(_lib.dw_rewind(self._handle) == _capi.OK)

    def last_row(self) -> int | None:
        """Return the row sampled last, which stands for `n_past`, or None if its logits are gone."""
        status = _lib.dw_last_row(self._handle, ctypes.byref(self._a))
        if status == _capi.ROUND_END:
            return None
        check(status)
        return self._a.value

    def commit(self) -> None:
        """Keep what was sampled, roll the rest back. No effect without an open round."""
        check(_lib.dw_commit(self._handle))

    def checkpoint(self) -> None:
        """Make the present position one that `trim` can come back to, if the model has recurrent layers."""
        check(_lib.dw_checkpoint(self._handle))

    def reach(self, n_keep: int) -> int:
        """Return the largest position up to n_keep that `trim` can cut to; 0 leaves only a reset."""
        return int(_lib.dw_reach(self._handle, n_keep))

    def trim(self, n_keep: int) -> bool:
        """Cut the sequence to n_keep positions. Returns False where the memory cannot go back that far."""
        status = _lib.dw_trim(self._handle, n_keep)
        if status == _capi.ERR_UNSUPPORTED:
            return False
        check(status)
        return True

    def reset(self) -> None:
        """Forget everything that was evaluated."""
        check(_lib.dw_reset(self._handle))

    def stats(self) -> SpeculationStats:
        """Return the counters since the engine was made or `stats_reset`."""
        raw = _capi.Stats()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_get_stats(self._handle, ctypes.byref(raw)))
        return SpeculationStats.from_native(raw)

    def curve(self) -> Curve:
        """Return what drafts and verifies take, as measured so far."""
        raw = _capi.Curve()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_get_curve(self._handle, ctypes.byref(raw)))
        return Curve(tuple(raw.draft_us), tuple(raw.verify_us))

    def stats_reset(self) -> None:
        """Set all counters to zero."""
        check(_lib.dw_stats_reset(self._handle))
