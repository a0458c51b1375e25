"""Ways to spread a model over cards (`split_mode`) that llama.cpp would end the process on, or not load.

Must not know: models, contexts. Test: tests/unit/test_split.py; on cards tests/gpu/test_two_cards.py.
"""

from __future__ import annotations

from typing import Any

from draftwood.errors import OptionError, UnsupportedError
from draftwood.load.devices import cards, describe, finds
from draftwood.options import TENSOR_SPLIT

_MODES = range(4)  # LLAMA_SPLIT_MODE_NONE, _LAYER, _ROW, _TENSOR, llama.h at the pin
_BY_ROWS = 2
_HINT = "split_mode=1, by layers, is the default"


def check(kwargs: dict[str, Any], rpc_servers: str | None) -> None:
    """Refuse a `split_mode` that cannot run. Errors: OptionError, UnsupportedError."""
    mode = kwargs.get("split_mode", 1)
    if mode not in _MODES:
        raise OptionError(f"split_mode is {mode!r}; expected 0 to {len(_MODES) - 1}", hint=_HINT)
    if mode == TENSOR_SPLIT:
        _check_tensors(kwargs, rpc_servers)
    if kwargs.get("n_gpu_layers", 0) == 0:
        return
    if mode == _BY_ROWS:
        for card in cards():
            if not finds(card, b"ggml_backend_split_buffer_type"):
                raise UnsupportedError(
                    f"found split_mode={_BY_ROWS}; the {describe(card)['backend']} backend of this llama.cpp "
                    "splits no tensor by rows",
                    hint=_HINT,
                )


def _check_tensors(kwargs: dict[str, Any], rpc_servers: str | None) -> None:
    if rpc_servers is not None:
        raise UnsupportedError(
            f"found rpc_servers= beside split_mode={TENSOR_SPLIT}; expected servers that take whole layers",
            hint=_HINT,
        )
    if not cards():
        raise UnsupportedError(
            f"found no card beside split_mode={TENSOR_SPLIT}; expected one or more", hint=_HINT
        )
    if kwargs.get("flash_attn") is False:
        raise UnsupportedError(
            f"found flash_attn=False beside split_mode={TENSOR_SPLIT}; expected flash attention",
            hint=f"leave flash_attn out; {_HINT}",
        )
