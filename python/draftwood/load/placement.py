"""Which memory tensors are loaded into: llama.cpp's own --n-cpu-moe and --override-tensor, as arguments.

Must not know: models, contexts. Tests: tests/unit/test_placement.py, tests/model/test_api_placement.py.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwood.coerce import as_int
from draftwood.engine.engine import ModelInfo
from draftwood.engine.experts import ExpertPool
from draftwood.errors import OptionError
from draftwood.load.devices import buffer_types, cards, describe

_EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_POOLED = r"blk\.{}\.ffn_(up|down|gate|gate_up)_exps\.weight$"
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
_EXAMPLE = 'tensor_buft_overrides={r"ffn_.*_exps": "CPU"} keeps experts in host memory'


class _Override(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def checked_n_cpu_moe(n_cpu_moe: Any) -> int:
    """Return n_cpu_moe as an int. Errors: OptionError for what is no number of layers."""
    number = as_int(n_cpu_moe)
    if number is None or number < 0:
        raise OptionError(
            f"n_cpu_moe is {n_cpu_moe!r}; expected a number of layers, 0 or more",
            hint="n_cpu_moe=99 for the experts of all layers, 0 for none",
        )
    return number


def tensor_overrides(
    n_cpu_moe: int,
    overrides: Mapping[str, str] | str | None,
    ours: Mapping[str, str] | None = None,
    pooled: Sequence[tuple[int, int]] = (),
    n_layers: int = _MAX_LAYERS,
) -> Any:
    """Return the array that `llama_model_params.tensor_buft_overrides` points to, or None; keep it alive.

    n_cpu_moe: experts of that many first layers stay in host memory. overrides: {regex of tensor names: type
    of buffer}, or llama.cpp's "regex=name,regex=name"; they go first, `ours` next. pooled: layers with a type
    of buffer for their experts (`pooled_layers`). n_layers: of the model, MTP blocks included; llama.cpp
    compares each row with each tensor. Errors: OptionError for a regex or a name that is none; the message
    lists the names of this machine.
    """
    wanted = list(_pairs(overrides).items())
    wanted += [(_EXPERTS.format(layer), "CPU") for layer in range(min(n_cpu_moe, n_layers))]
    wanted += (ours or {}).items()
    if not wanted and not pooled:
        return None
    types = buffer_types()
    rows = []
    for pattern, name in wanted:
        if name not in types:
            raise OptionError(
                f"tensor_buft_overrides names the buffer type {name!r}; expected one of "
                f"{', '.join(map(repr, types))}",
                hint=_EXAMPLE,
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise OptionError(
                f"tensor_buft_overrides has {pattern!r}, which is no regular expression: {error}",
                hint=_EXAMPLE,
            ) from None
        rows.append(_Override(pattern.encode(), types[name]))
    rows += [_Override(_POOLED.format(layer).encode(), buffer_type) for layer, buffer_type in pooled]
    return (_Override * (len(rows) + 1))(*rows)  # ends with a row of null pointers


def pooled_layers(info: ModelInfo, pool: ExpertPool) -> list[tuple[int, int]]:
    """Return the layers whose experts go into a pool, with its buffer type.

    An MTP block's experts stay with the other weights: they are used in every round.
    """
    return [(layer, pool.buffer_type) for layer in range(info.n_layers)]


def all_layers(n_gpu_layers: int, info: ModelInfo) -> bool:
    """Tell whether llama.cpp puts the whole model on the card: all layers, and the output as one more.

    Its rule is n_gpu_layers > n_layer_all (llama-context.cpp), which counts MTP blocks.
    """
    return n_gpu_layers < 0 or n_gpu_layers > info.n_layers + info.n_layer_nextn


def embeddings_on_card(n_gpu_layers: int, info: ModelInfo, needed: Callable[[], int]) -> dict[str, str]:
    """Return the override that puts token embeddings on the one CUDA card that has room for all beside them.

    llama.cpp leaves them in host memory, so that each decode begins on the CPU, and a drafted token must come
    to the host before it is verified. needed: bytes of the card that model and context take. Cards are not
    looked at for a model with layers elsewhere.
    """
    if not all_layers(n_gpu_layers, info):
        return {}
    found = [describe(card) for card in cards()]
    if len(found) != 1 or found[0]["backend"] != "CUDA" or found[0]["memory_free"] < needed():
        return {}
    return {r"^token_embd\.weight$": found[0]["name"]}


def _pairs(overrides: Mapping[str, str] | str | None) -> dict[str, str]:
    if isinstance(overrides, str):
        parts = [part.partition("=") for part in overrides.split(",")]
        if not all(sign for _, sign, _ in parts):
            raise OptionError(
                f"tensor_buft_overrides is {overrides!r}; expected regex=name,regex=name", hint=_EXAMPLE
            )
        return {pattern: name for pattern, _, name in parts}
    if overrides is None or isinstance(overrides, Mapping):
        return dict(overrides or {})
    raise OptionError(
        f"tensor_buft_overrides is {overrides!r}; expected a dict of regex to name, or text", hint=_EXAMPLE
    )
