"""ctypes signatures of src/include/draftwood.h and draftwood-experts.h, and what the library needs first.

tests/unit/test_capi.py compares them with the header. Functions that only tests and benchmarks call:
bench/testing_api.py. The library is the libllama that draftwood._llama_cpp has loaded: our sources are
linked into it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from draftwood._llama_cpp import llama_cpp as _llama
from draftwood.engine import cuda_libraries

lib: Any = _llama._lib
cuda = cuda_libraries.load(Path(lib._name).parent)

API_VERSION = 25
MAX_DRAFT = 63
MAX_TREE = 64
CURVE_SIZE = 65
MAX_EXPERTS = 1024
MAX_BEST = 64

OK = 0
ROUND_END = 1
ERR_ARGUMENT = 2
ERR_UNSUPPORTED = 3
ERR_STATE = 4
ERR_CONTEXT = 5
ERR_DECODE = 6
ERR_FILE = 7
ERR_INTERNAL = 8
ERR_MEMORY = 9

DRAFTER_NONE = 0
DRAFTER_MTP = 1
DRAFTER_NGRAM = 2
DRAFTER_DFLASH = 3
DRAFTER_GIVEN = 4

LENGTH_FIXED = 0
LENGTH_AUTO = 1

RESULTS_AUTO = 0
RESULTS_TOP = 1

EXPERTS_FREQUENCY = 0
EXPERTS_LRU = 1

Token = ctypes.c_int32
EngineHandle = ctypes.c_void_p
PoolHandle = ctypes.c_void_p
ReadaheadHandle = ctypes.c_void_p


class Curve(ctypes.Structure):
    """dw_curve."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_int32),
        ("draft_us", ctypes.c_double * CURVE_SIZE),
        ("verify_us", ctypes.c_double * CURVE_SIZE),
    ]


class Params(ctypes.Structure):
    """dw_params."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("drafter", ctypes.c_int32),
        ("draft_tokens", ctypes.c_int32),
        ("draft_p_min", ctypes.c_float),
        ("exact_rows", ctypes.c_int32),
        ("drafter_path", ctypes.c_char_p),
        ("length", ctypes.c_int32),
        ("checkpoint_bytes", ctypes.c_int64),
        ("curve", ctypes.POINTER(Curve)),
        ("tree_budget", ctypes.c_int32),
        ("seq_id", ctypes.c_int32),
        ("draft_vocab", ctypes.c_int32),
        ("results", ctypes.c_int32),
        ("queue_steps", ctypes.c_int32),
        ("begin_drafts", ctypes.c_int32),
    ]


class RequestParams(ctypes.Structure):
    """dw_request_params."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("temperature", ctypes.c_float),
        ("n_top", ctypes.c_int32),
    ]


class Tree(ctypes.Structure):
    """dw_tree."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n", ctypes.c_int32),
        ("tokens", ctypes.c_int32 * MAX_TREE),
        ("parents", ctypes.c_int32 * MAX_TREE),
        ("log_probs", ctypes.c_float * MAX_TREE),
    ]


class Stats(ctypes.Structure):
    """dw_stats."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("reserved", ctypes.c_int32),
        ("n_rounds", ctypes.c_int64),
        ("n_drafted", ctypes.c_int64),
        ("n_accepted", ctypes.c_int64),
        ("n_emitted", ctypes.c_int64),
        ("n_prompt", ctypes.c_int64),
        ("n_exact_batches", ctypes.c_int64),
        ("n_cold_rounds", ctypes.c_int64),
        ("n_failed_drafts", ctypes.c_int64),
        ("n_paused_rounds", ctypes.c_int64),
        ("n_ngram_rounds", ctypes.c_int64),
        ("n_tree_rounds", ctypes.c_int64),
        ("n_padding", ctypes.c_int64),
        ("n_step_threads", ctypes.c_int64),
        ("n_restored", ctypes.c_int64),
        ("n_checkpoints", ctypes.c_int64),
        ("checkpoint_bytes", ctypes.c_int64),
        ("drafter_bytes", ctypes.c_int64),
        ("graph_bytes", ctypes.c_int64),
        ("tree_bytes", ctypes.c_int64),
        ("row_limit", ctypes.c_int64),
        ("draft_vocab", ctypes.c_int64),
        ("n_shared_rounds", ctypes.c_int64),
        ("n_ahead_rounds", ctypes.c_int64),
        ("n_begun_drafts", ctypes.c_int64),
        ("n_queued_steps", ctypes.c_int64),
        ("n_dropped_steps", ctypes.c_int64),
        ("n_joint_rounds", ctypes.c_int64),
        ("n_logits_rows", ctypes.c_int64),
        ("n_launches", ctypes.c_int64),
        ("n_replays", ctypes.c_int64),
        ("n_fused_parts", ctypes.c_int64),
        ("t_draft_us", ctypes.c_int64),
        ("t_verify_us", ctypes.c_int64),
        ("t_eval_us", ctypes.c_int64),
        ("t_sample_us", ctypes.c_int64),
        ("t_commit_us", ctypes.c_int64),
        ("drafted_at", ctypes.c_int64 * MAX_DRAFT),
        ("accepted_at", ctypes.c_int64 * MAX_DRAFT),
    ]


class ModelInfo(ctypes.Structure):
    """dw_model_info."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n_layer_nextn", ctypes.c_int32),
        ("can_draft_mtp", ctypes.c_int32),
        ("n_tensors", ctypes.c_int32),
        ("file_bytes", ctypes.c_int64),
        ("architecture", ctypes.c_char * 64),
        ("n_experts", ctypes.c_int32),
        ("n_experts_used", ctypes.c_int32),
        ("n_expert_layers", ctypes.c_int32),
        ("n_layers", ctypes.c_int32),
        ("n_vocab", ctypes.c_int32),
        ("n_ctx_train", ctypes.c_int32),
        ("expert_bytes", ctypes.c_int64),
        ("kv_values", ctypes.c_int64),
        ("n_files", ctypes.c_int32),
    ]


class ExpertParams(ctypes.Structure):
    """dw_expert_params."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n_slots", ctypes.c_int32),
        ("policy", ctypes.c_int32),
        ("stage", ctypes.c_int32),
        ("guess", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("device", ctypes.c_char_p),
    ]


class ExpertStats(ctypes.Structure):
    """dw_expert_stats."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n_layers", ctypes.c_int32),
        ("n_experts", ctypes.c_int32),
        ("n_slots", ctypes.c_int32),
        ("n_steps", ctypes.c_int64),
        ("n_hits", ctypes.c_int64),
        ("n_misses", ctypes.c_int64),
        ("n_in_place", ctypes.c_int64),
        ("bytes_missed", ctypes.c_int64),
        ("host_bytes", ctypes.c_int64),
        ("device_bytes", ctypes.c_int64),
        ("stage_bytes", ctypes.c_int64),
        ("n_beside", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("n_guessed", ctypes.c_int64),
        ("n_right", ctypes.c_int64),
        ("n_late", ctypes.c_int64),
    ]


class ExpertLayer(ctypes.Structure):
    """dw_expert_layer."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n_experts", ctypes.c_int32),
        ("n_slots", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("expert_bytes", ctypes.c_int64),
        ("n_hits", ctypes.c_int64),
        ("n_misses", ctypes.c_int64),
        ("n_in_place", ctypes.c_int64),
        ("heat", ctypes.c_uint32 * MAX_EXPERTS),
        ("slot_of", ctypes.c_int32 * MAX_EXPERTS),
    ]


class ReadaheadStats(ctypes.Structure):
    """dw_readahead_stats."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("n_layers", ctypes.c_int32),
        ("n_steps", ctypes.c_int64),
        ("n_experts_used", ctypes.c_int64),
        ("n_experts_read", ctypes.c_int64),
        ("bytes_read", ctypes.c_int64),
        ("expert_bytes", ctypes.c_int64),
    ]


_P = ctypes.POINTER
_STATUS = ctypes.c_int
_I32P = _P(ctypes.c_int32)

# name -> (result, arguments)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "dw_api_version": (ctypes.c_int32, []),
    "dw_last_error": (ctypes.c_char_p, []),
    "dw_build_info": (ctypes.c_char_p, []),
    "dw_probe_model": (_STATUS, [ctypes.c_char_p, _P(ModelInfo)]),
    "dw_probe_drafter": (_STATUS, [ctypes.c_char_p, ctypes.c_char_p]),
    "dw_params_init": (None, [_P(Params)]),
    "dw_engine_new": (
        _STATUS,
        [ctypes.c_void_p, _P(_llama.llama_context_params), _P(Params), _P(EngineHandle)],
    ),
    "dw_engine_free": (None, [EngineHandle]),
    "dw_eval": (_STATUS, [EngineHandle, _P(Token), ctypes.c_int32, ctypes.c_int32, ctypes.c_bool]),
    "dw_propose": (_STATUS, [EngineHandle, Token, ctypes.c_int32, _I32P]),
    "dw_propose_all": (
        _STATUS,
        [_P(EngineHandle), _P(Token), _P(ctypes.c_int32), _P(ctypes.c_int32), ctypes.c_int32],
    ),
    "dw_propose_given": (_STATUS, [EngineHandle, Token, _P(Token), ctypes.c_int32]),
    "dw_propose_tree": (_STATUS, [EngineHandle, _P(Tree)]),
    "dw_request_params_init": (None, [_P(RequestParams)]),
    "dw_set_request": (_STATUS, [EngineHandle, _P(RequestParams)]),
    "dw_verify": (_STATUS, [EngineHandle]),
    "dw_verify_all": (_STATUS, [_P(EngineHandle), ctypes.c_int32]),
    "dw_row": (_STATUS, [EngineHandle, _I32P, _I32P]),
    "dw_best": (
        _STATUS,
        [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, _P(Token), _P(ctypes.c_float), _P(ctypes.c_bool)],
    ),
    "dw_took": (_STATUS, [EngineHandle, Token]),
    "dw_took_scheduled": (_STATUS, [EngineHandle, Token]),
    "dw_next": (_STATUS, [EngineHandle, ctypes.c_void_p, _P(Token)]),
    "dw_rewind": (_STATUS, [EngineHandle]),
    "dw_last_row": (_STATUS, [EngineHandle, _I32P]),
    "dw_commit": (_STATUS, [EngineHandle]),
    "dw_checkpoint": (_STATUS, [EngineHandle]),
    "dw_reach": (ctypes.c_int32, [EngineHandle, ctypes.c_int32]),
    "dw_trim": (_STATUS, [EngineHandle, ctypes.c_int32]),
    "dw_restore": (_STATUS, [EngineHandle, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32]),
    "dw_drafter_memory": (_STATUS, [EngineHandle, _P(ctypes.c_void_p)]),
    "dw_reset": (_STATUS, [EngineHandle]),
    "dw_n_past": (ctypes.c_int32, [EngineHandle]),
    "dw_draft_tokens": (ctypes.c_int32, [EngineHandle]),
    "dw_get_draft": (_STATUS, [EngineHandle, _P(Token), _I32P]),
    "dw_get_tree": (_STATUS, [EngineHandle, _P(Tree)]),
    "dw_tree_refusal": (ctypes.c_char_p, [EngineHandle]),
    "dw_get_stats": (_STATUS, [EngineHandle, _P(Stats)]),
    "dw_get_curve": (_STATUS, [EngineHandle, _P(Curve)]),
    "dw_stats_reset": (_STATUS, [EngineHandle]),
    "dw_expert_params_init": (None, [_P(ExpertParams)]),
    "dw_expert_pool_new": (_STATUS, [_P(ExpertParams), _P(PoolHandle)]),
    "dw_expert_pool_free": (None, [PoolHandle]),
    "dw_expert_pool_buffer_type": (ctypes.c_void_p, [PoolHandle]),
    "dw_expert_set_heat": (_STATUS, [PoolHandle, ctypes.c_int32, _P(ctypes.c_uint32), ctypes.c_int32]),
    "dw_expert_refused": (_STATUS, [PoolHandle, _P(ctypes.c_int64), _P(ctypes.c_bool)]),
    "dw_expert_get_stats": (_STATUS, [PoolHandle, _P(ExpertStats)]),
    "dw_expert_get_layer": (_STATUS, [PoolHandle, ctypes.c_int32, _P(ExpertLayer)]),
    "dw_expert_readahead_new": (_STATUS, [ctypes.c_void_p, _P(ReadaheadHandle)]),
    "dw_expert_readahead_free": (None, [ReadaheadHandle]),
    "dw_expert_readahead_get_stats": (_STATUS, [ReadaheadHandle, _P(ReadaheadStats)]),
}

for _name, (_restype, _argtypes) in SIGNATURES.items():
    _function = getattr(lib, _name)
    _function.restype = _restype
    _function.argtypes = _argtypes

if lib.dw_api_version() != API_VERSION:
    raise ImportError(
        f"the loaded libllama has draftwood API version {lib.dw_api_version()}, this package expects "
        f"{API_VERSION}.\n\nhint: reinstall draftwood, and unset DRAFTWOOD_LIB_PATH if it is set"
    )
