"""src/include/draftwood-testing.h from Python, and calls of draftwood.h that only tests and benchmarks make.

tests/unit/test_capi.py compares the signatures with the header. Must not know: what any test expects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from draftwood.engine import _capi
from draftwood.engine.engine import Curve, Engine
from draftwood.engine.experts import ExpertPool
from draftwood.engine.status import check
from draftwood.engine.tree import Tree, native_tree
from draftwood.errors import OptionError

FUSE_NOWHERE = 0
FUSE_ON_GPU = 1
FUSE_EVERYWHERE = 2

SOURCE_DRAFTER = 0
SOURCE_NGRAM = 1

CostModelHandle = ctypes.c_void_p
AcceptedLogHandle = ctypes.c_void_p
ThreadChoiceHandle = ctypes.c_void_p
BatchModelHandle = ctypes.c_void_p

_lib = _capi.lib
_P = ctypes.POINTER
_STATUS = ctypes.c_int
_I32, _I64, _F64, _BOOL = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_bool
_MODEL = CostModelHandle

# name -> (result, arguments)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dw_next_scheduled": (_STATUS, [_capi.EngineHandle, ctypes.c_void_p, _BOOL, _P(_capi.Token)]),
    "dw_replay": (_STATUS, [_capi.EngineHandle, _I32, _P(_F64)]),
    "dw_limit_memory": (_STATUS, [_capi.EngineHandle, _I64, _I64, _I64]),
    "dw_fuse": (_STATUS, [_capi.EngineHandle, _I32]),
    "dw_fused": (_STATUS, [_capi.EngineHandle, ctypes.c_bool, _P(_I32)]),
    "dw_kq_masks": (
        _STATUS,
        [
            *(_capi.EngineHandle, _I32, _I32, _I32, ctypes.c_bool, ctypes.c_bool),
            *(_P(_I32), _P(_I32), _I32, _P(ctypes.c_float), _P(ctypes.c_float), _P(ctypes.c_bool)),
        ],
    ),
    "dw_n_filled_masks": (_I64, []),
    "dw_end_of_cells": (_STATUS, [_capi.EngineHandle, _BOOL, _P(_I32)]),
    "dw_remove_from": (_STATUS, [_capi.EngineHandle, _I32, _I32]),
    "dw_expert_limit_host": (_STATUS, [_capi.PoolHandle, _I64]),
    "dw_accepted_log_new": (_STATUS, [_capi.EngineHandle, _P(AcceptedLogHandle)]),
    "dw_accepted_log_free": (None, [AcceptedLogHandle]),
    "dw_accepted_log_get": (_STATUS, [AcceptedLogHandle, _P(_I32), _P(_capi.Token), _P(_I32), _P(_I32)]),
    "dw_tree_from_positions": (
        _STATUS,
        [_I32, _P(_I32), _P(ctypes.c_float), _I32, _I32, _I32, _I32, ctypes.c_float, _P(_capi.Tree)],
    ),
    "dw_tree_merge": (_STATUS, [_P(_capi.Tree), _P(_capi.Tree)]),
    "dw_tree_select": (_STATUS, [_P(_capi.Tree), _I32, _I32, _P(_capi.Tree)]),
    "dw_tree_bucket": (_I32, [_I32]),
    "dw_recent_vocab": (
        _STATUS,
        [_I32, _I32, _P(_capi.Token), _I32, _P(_I32), _P(_capi.Token)],
    ),
    "dw_thread_choice_new": (_STATUS, [_P(ThreadChoiceHandle)]),
    "dw_thread_choice_free": (None, [ThreadChoiceHandle]),
    "dw_thread_choice_verify": (_STATUS, [ThreadChoiceHandle, _I32, _P(_I64), _P(_BOOL), _P(_BOOL)]),
    "dw_cost_model_new": (_STATUS, [_I32, _BOOL, _BOOL, _P(_MODEL)]),
    "dw_cost_model_free": (None, [_MODEL]),
    "dw_cost_model_set_curve": (_STATUS, [_MODEL, _P(_capi.Curve)]),
    "dw_cost_model_get_curve": (_STATUS, [_MODEL, _P(_capi.Curve)]),
    "dw_cost_model_update": (_STATUS, [_MODEL, _BOOL]),
    "dw_cost_model_add_draft_time": (_STATUS, [_MODEL, _I32, _I64]),
    "dw_cost_model_add_verify_time": (_STATUS, [_MODEL, _I32, _I64]),
    "dw_cost_model_add_acceptance": (_STATUS, [_MODEL, _I32, _I32, _I32]),
    "dw_cost_model_add_draft": (_STATUS, [_MODEL, _I32, _I64]),
    "dw_cost_model_add_round": (_STATUS, [_MODEL, _BOOL, _I32, _I32, _I64]),
    "dw_cost_model_add_prompt": (_STATUS, [_MODEL, _I32]),
    "dw_cost_model_cost_behind_draft": (_STATUS, [_MODEL, _P(_F64)]),
    "dw_cost_model_cost_of_return": (_STATUS, [_MODEL, _P(_F64)]),
    "dw_cost_model_add_branches": (_STATUS, [_MODEL, _P(_F64), _I32, _I32]),
    "dw_cost_model_is_outdated": (_STATUS, [_MODEL, _P(_BOOL)]),
    "dw_cost_model_choose": (_STATUS, [_MODEL, _I32, _I32, _P(_I32), _P(_I32)]),
    "dw_cost_model_plain_step_comes": (_STATUS, [_MODEL, _P(_BOOL)]),
    "dw_cost_model_pays_to_branch": (_STATUS, [_MODEL, _I32, _I32, _P(_BOOL)]),
    "dw_cost_model_tree_size": (_STATUS, [_MODEL, _I32, _I32, _P(_F64), _I32, _P(_I32)]),
    "dw_cost_model_expect": (_STATUS, [_MODEL, _I32, _I32, _P(_F64), _P(_F64)]),
    "dw_batch_model_new": (_STATUS, [_I32, _BOOL, _P(BatchModelHandle)]),
    "dw_batch_model_free": (None, [BatchModelHandle]),
    "dw_batch_model_add_verify": (_STATUS, [BatchModelHandle, _I32, _I32, _I64]),
    "dw_batch_model_add_draft": (_STATUS, [BatchModelHandle, _I32, _I32, _I64]),
    "dw_batch_model_choose": (_STATUS, [BatchModelHandle, _MODEL, _P(_F64), _P(_I32), _I32, _P(_I32)]),
    "dw_load_rounds": (_STATUS, [_I32, _I32, _I32, _I64, _I64, _I32, _I32, _P(_I32)]),
}

for _name, (_restype, _argtypes) in SIGNATURES.items():
    _function = getattr(_lib, _name)
    _function.restype = _restype
    _function.argtypes = _argtypes


def propose_all(engines: Sequence[Engine], last: Sequence[int], most: Sequence[int]) -> list[int]:
    """Draft up to most[i] tokens after last[i] by engines[i]; return how many each drafted.

    The engines are of sequences of one context, whose drafters work together where they can.
    """
    n = len(engines)
    handles = (_capi.EngineHandle * n)(*(engine._handle for engine in engines))
    tokens, limits = (_capi.Token * n)(*last), (_I32 * n)(*most)
    drafted = (_I32 * n)()
    check(_lib.dw_propose_all(handles, tokens, limits, drafted, n))
    return list(drafted)


def verify_all(engines: Sequence[Engine]) -> None:
    """Evaluate the proposals of several engines, on sequences of one context, in one llama_decode."""
    handles = (_capi.EngineHandle * len(engines))(*(engine._handle for engine in engines))
    check(_lib.dw_verify_all(handles, len(engines)))


def next_scheduled(engine: Engine, sampler: Any, *, accept: bool) -> int:
    """Sample a row as `Engine.next` does, then accept the most probable draft or none.

    The text means nothing.
    """
    check(_lib.dw_next_scheduled(engine._handle, sampler, accept, ctypes.byref(engine._token)))
    return engine._token.value


FUSED_PARTS = (
    "experts", "feed forward", "delta inputs", "delta front", "delta heads", "delta tree", "delta step",
    "attention inputs", "attention heads", "flash attention", "delta output", "attention output",
    "draft input", "feature keys", "norm", "product", "gates", "guesses", "attention gates",
)  # fmt: skip


def fuse(engine: Engine, where: int) -> None:
    """Say where layers of the target and its drafter are made of a few ops, from the next graph on."""
    check(_lib.dw_fuse(engine._handle, where))


def fused(engine: Engine, *, of_drafter: bool = False) -> dict[str, int]:
    """Return how many of each part the newest graph has, the target's or its drafter's."""
    n = (_I32 * len(FUSED_PARTS))()
    check(_lib.dw_fused(engine._handle, of_drafter, n))
    return dict(zip(FUSED_PARTS, n, strict=True))


def end_of_cells(engine: Engine, *, of_drafter: bool = False) -> int:
    """Return the number of the last cell in use, plus one, of the engine's KV cache or its drafter's."""
    end = ctypes.c_int32()
    check(_lib.dw_end_of_cells(engine._handle, of_drafter, ctypes.byref(end)))
    return end.value


def recent_vocab(size: int, n_vocab: int, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places that the tokens of a text are given, and the tokens held in the end."""
    places, held = (_I32 * len(tokens))(), (_capi.Token * max(size, 1))()
    text = (_capi.Token * len(tokens))(*tokens)
    check(_lib.dw_recent_vocab(size, n_vocab, text, len(tokens), places, held))
    return list(places), list(held)


def replay(engine: Engine, n_times: int) -> float:
    """Run the open round's verify n_times again. Return the seconds of one run on its device."""
    micros = ctypes.c_double()
    check(_lib.dw_replay(engine._handle, n_times, ctypes.byref(micros)))
    return micros.value * 1e-6


def limit_memory(
    engine: Engine, *, drafter: int = 1 << 62, graphs: int = 1 << 62, trees: int = 1 << 62
) -> None:
    """Limit the bytes that engines of this engine's model hold from now on."""
    check(_lib.dw_limit_memory(engine._handle, drafter, graphs, trees))


def limit_expert_host(pool: ExpertPool, n_bytes: int) -> None:
    """Limit the bytes of host memory that a pool's experts have from now on."""
    check(_lib.dw_expert_limit_host(pool._handle, n_bytes))


class AcceptedLog:
    """Tokens of the rounds that engines of a model commit from now on, as (sequence, token, position)."""

    def __init__(self, engine: Engine) -> None:
        self._handle = AcceptedLogHandle()
        check(_lib.dw_accepted_log_new(engine._handle, ctypes.byref(self._handle)))

    def __del__(self) -> None:
        _lib.dw_accepted_log_free(self._handle)

    def entries(self, most: int = 4096) -> list[tuple[int, int, int]]:
        """Return what was accepted so far."""
        seqs, tokens, positions = ((_I32 * most)() for _ in range(3))
        n = _I32(most)
        check(_lib.dw_accepted_log_get(self._handle, seqs, tokens, positions, ctypes.byref(n)))
        assert n.value <= most
        return list(zip(seqs[: n.value], tokens[: n.value], positions[: n.value], strict=True))


def from_positions(
    root: int,
    positions: Sequence[Sequence[tuple[int, float]]],
    budget: int,
    *,
    spine: int = 0,
    beside: float = 0.0,
) -> Tree:
    """Return the most probable tree of at most `budget` nodes.

    Its candidates are (token, log-probability) by depth, best first, whatever comes before them. The first
    `spine` nodes of the path of all bests are kept; under nodes beside it `beside` is added to each step.
    Errors: OptionError for a budget out of range or positions of unequal length.
    """
    n_each = len(positions[0]) if positions else 0
    for position in positions:
        if len(position) != n_each:
            raise OptionError(
                f"found positions of {n_each} and {len(position)} candidates; expected {n_each}",
                hint="cut all positions to the shortest",
            )
    flat = [pair for position in positions for pair in position]
    tokens = (ctypes.c_int32 * len(flat))(*(token for token, _ in flat))
    log_probs = (ctypes.c_float * len(flat))(*(log_prob for _, log_prob in flat))
    raw = native_tree()
    check(
        _lib.dw_tree_from_positions(
            root, tokens, log_probs, len(positions), n_each, budget, spine, beside, ctypes.byref(raw)
        )
    )
    return Tree.from_native(raw)


def merge(tree: Tree, other: Tree) -> Tree:
    """Return all nodes of both, what both have folded. Errors: OptionError where the roots differ."""
    raw = tree.to_native()
    check(_lib.dw_tree_merge(ctypes.byref(raw), ctypes.byref(other.to_native())))
    return Tree.from_native(raw)


def select(tree: Tree, budget: int, *, spine: int = 0) -> Tree:
    """Return the `budget` most probable nodes, `spine` of the most probable path in any case, by depth."""
    raw = native_tree()
    check(_lib.dw_tree_select(ctypes.byref(tree.to_native()), budget, spine, ctypes.byref(raw)))
    return Tree.from_native(raw)


def bucket(n_nodes: int) -> int:
    """Return how many rows a tree of n_nodes is verified in."""
    return int(_lib.dw_tree_bucket(n_nodes))


class ThreadChoice:
    """Which threads verifies run on, without a context. Contract: src/llama/thread_choice.h."""

    def __init__(self) -> None:
        self._handle = ThreadChoiceHandle()
        check(_lib.dw_thread_choice_new(ctypes.byref(self._handle)))

    def __del__(self) -> None:
        _lib.dw_thread_choice_free(self._handle)

    def verify(self, n_rows: int, batch_us: int, few_us: int) -> tuple[bool, bool]:
        """Run a verify that takes so long on either count; return (on n_threads, is a trial)."""
        us = (_I64 * 2)(batch_us, few_us)
        on_n_threads, is_trial = ctypes.c_bool(), ctypes.c_bool()
        check(
            _lib.dw_thread_choice_verify(
                self._handle, n_rows, us, ctypes.byref(on_n_threads), ctypes.byref(is_trial)
            )
        )
        return on_n_threads.value, is_trial.value


class BatchModel:
    """How far each sequence of a batch drafts, without a context. Contract: src/round/batch_model.h."""

    def __init__(self, solo: CostModel, *, n_warmup: int = 0, shares_cores: bool = True) -> None:
        self._handle = BatchModelHandle()
        self._solo = solo
        check(_lib.dw_batch_model_new(n_warmup, shares_cores, ctypes.byref(self._handle)))

    def __del__(self) -> None:
        _lib.dw_batch_model_free(self._handle)

    def add_verify(self, n_sequences: int, n_rows: int, micros: float) -> None:
        """Add the time of a graph with n_rows rows of each sequence."""
        check(_lib.dw_batch_model_add_verify(self._handle, n_sequences, n_rows, round(micros)))

    def add_draft(self, n_sequences: int, n_tokens: int, micros: float) -> None:
        """Add the time of drafts that were made together."""
        check(_lib.dw_batch_model_add_draft(self._handle, n_sequences, n_tokens, round(micros)))

    def choose(self, acceptance: Sequence[float], longest: Sequence[int]) -> list[int]:
        """Return the tokens of each sequence's draft, whose tokens are accepted with this probability."""
        n = len(acceptance)
        rates, most, found = (_F64 * n)(*acceptance), (_I32 * n)(*longest), (_I32 * n)()
        check(_lib.dw_batch_model_choose(self._handle, self._solo._handle, rates, most, n, found))
        return list(found)


def load_rounds(
    longest: int, n_warmup: int, *, slow: tuple[int, int], fast_us: int, busy: tuple[int, int] = (0, 1)
) -> dict[int, int]:
    """Return the rounds that a load measures, by tokens drafted.

    slow: (rounds, microseconds); the first rounds of each size take so long, later ones fast_us.
    busy: (rounds, times); the first rounds of all take so many times as long.
    """
    rounds = (ctypes.c_int32 * _capi.CURVE_SIZE)()
    check(_lib.dw_load_rounds(longest, n_warmup, *slow, fast_us, *busy, rounds))
    return {n: count for n, count in enumerate(rounds) if count}


class CostModel:
    """The cost model of speculation="auto" without an engine. Contract: src/round/cost_model.h."""

    def __init__(
        self,
        *,
        n_warmup: int = 0,
        shares_cores: bool = True,
        copies_experts: bool = False,
        curve: Curve | None = None,
    ) -> None:
        self._handle = CostModelHandle()
        check(_lib.dw_cost_model_new(n_warmup, shares_cores, copies_experts, ctypes.byref(self._handle)))
        if curve is not None:
            self.set_curve(curve)

    def __del__(self) -> None:
        _lib.dw_cost_model_free(self._handle)

    def set_curve(self, curve: Curve) -> None:
        """Take a curve that another process measured."""
        check(_lib.dw_cost_model_set_curve(self._handle, ctypes.byref(curve.to_native())))

    def curve(self) -> Curve:
        """Return the curve, without times since the last update."""
        raw = _capi.Curve()
        raw.struct_size = ctypes.sizeof(raw)
        check(_lib.dw_cost_model_get_curve(self._handle, ctypes.byref(raw)))
        return Curve(tuple(raw.draft_us), tuple(raw.verify_us))

    def update(self, *, at_load: bool = False) -> None:
        """Take new times into the curve."""
        check(_lib.dw_cost_model_update(self._handle, at_load))

    def add_draft(self, n_tokens: int, micros: float) -> None:
        """Add the time of a draft."""
        check(_lib.dw_cost_model_add_draft_time(self._handle, n_tokens, round(micros)))

    def add_verify(self, n_rows: int, micros: float) -> None:
        """Add the time of a verify."""
        check(_lib.dw_cost_model_add_verify_time(self._handle, n_rows, round(micros)))

    def add_acceptance(self, n_judged: int, n_accepted: int, source: int = SOURCE_DRAFTER) -> None:
        """Add what became of a draft's most probable path."""
        check(_lib.dw_cost_model_add_acceptance(self._handle, source, n_judged, n_accepted))

    def session_draft(self, n_tokens: int, micros: float) -> None:
        """Add a draft as a session does."""
        check(_lib.dw_cost_model_add_draft(self._handle, n_tokens, round(micros)))

    def session_round(self, n_rows: int, micros: float, *, drafted: bool = False, n_tokens: int = 1) -> None:
        """Add a round as a session does. drafted: by the drafter. n_tokens: that it accepted."""
        check(_lib.dw_cost_model_add_round(self._handle, drafted, n_rows, n_tokens, round(micros)))

    def session_prompt(self, n_tokens: int) -> None:
        """Add a prompt as a session does."""
        check(_lib.dw_cost_model_add_prompt(self._handle, n_tokens))

    def cost_behind_draft(self) -> float:
        """Return the microseconds that a draft costs the round behind it."""
        micros = ctypes.c_double()
        check(_lib.dw_cost_model_cost_behind_draft(self._handle, ctypes.byref(micros)))
        return micros.value

    def cost_of_return(self) -> float:
        """Return the microseconds that the next draft takes longer than one behind a draft."""
        micros = ctypes.c_double()
        check(_lib.dw_cost_model_cost_of_return(self._handle, ctypes.byref(micros)))
        return micros.value

    def add_branches(self, probabilities: Sequence[float], n_accepted: int) -> None:
        """Add what became of a tree's branches."""
        n = len(probabilities)
        array = (ctypes.c_double * n)(*probabilities)
        check(_lib.dw_cost_model_add_branches(self._handle, array, n, n_accepted))

    def is_outdated(self) -> bool:
        """Return whether the machine has become much slower than the curve says."""
        found = ctypes.c_bool()
        check(_lib.dw_cost_model_is_outdated(self._handle, ctypes.byref(found)))
        return found.value

    def choose(self, longest: int, longest_ngram: int = 0) -> tuple[int, int]:
        """Return (source, tokens) of the next round; 0 tokens: a plain step."""
        source, n_tokens = ctypes.c_int32(), ctypes.c_int32()
        status = _lib.dw_cost_model_choose(
            self._handle, longest, longest_ngram, ctypes.byref(source), ctypes.byref(n_tokens)
        )
        check(status)
        return source.value, n_tokens.value

    def plain_step_comes(self) -> bool:
        """Return whether the next choice will be a plain step, if nothing changes."""
        found = ctypes.c_bool()
        check(_lib.dw_cost_model_plain_step_comes(self._handle, ctypes.byref(found)))
        return found.value

    def pays_to_branch(self, n_tokens: int, source: int = SOURCE_DRAFTER) -> bool:
        """Return whether branches beside a path of n_tokens may be worth their rows."""
        found = ctypes.c_bool()
        check(_lib.dw_cost_model_pays_to_branch(self._handle, source, n_tokens, ctypes.byref(found)))
        return found.value

    def tree_size(self, n_tokens: int, probabilities: Sequence[float], source: int = SOURCE_DRAFTER) -> int:
        """Return the nodes of the tree around a path of n_tokens."""
        n, nodes = len(probabilities), ctypes.c_int32()
        array = (ctypes.c_double * n)(*probabilities)
        status = _lib.dw_cost_model_tree_size(self._handle, source, n_tokens, array, n, ctypes.byref(nodes))
        check(status)
        return nodes.value

    def expect(self, n_tokens: int, source: int = SOURCE_DRAFTER) -> tuple[float, float]:
        """Return the expected microseconds and tokens of a round with a draft of n_tokens."""
        micros, tokens = ctypes.c_double(), ctypes.c_double()
        status = _lib.dw_cost_model_expect(
            self._handle, source, n_tokens, ctypes.byref(micros), ctypes.byref(tokens)
        )
        check(status)
        return micros.value, tokens.value
