"""What llama.cpp complained of, so that an error can say why something failed.

With verbose=False nothing else shows it. Upstream's table of levels is older than llama.cpp's, and takes
errors for debugging. A callback that the caller has set with llama_log_set hears it instead of us.
Must not know: what was tried. Test: tests/model/test_contexts.py.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from typing import Any

from draftwood._llama_cpp import _logger
from draftwood._llama_cpp import llama_cpp as _native

_WARN, _ERROR = 3, 4  # GGML_LOG_LEVEL_* of ggml.h at the pin
_MOST = 3  # lines; the first say most
_heard = threading.local()


@_native.llama_log_callback  # type: ignore[misc]
def _listen(level: int, text: bytes, user_data: Any) -> None:
    if level == _ERROR:
        _heard.lines = [*_lines(), text.decode("utf-8", "replace")][:_MOST]
    if level == _WARN and _logger.logger.level >= logging.ERROR:  # upstream prints it, though not verbose
        if text == getattr(_heard, "warning", None):
            return  # a drafter's context warns as its target's did
        _heard.warning = text
    _logger.llama_log_callback(level, text, user_data)


def listen() -> None:
    """Hear what llama.cpp logs, and hand it on to upstream's callback."""
    _native.llama_log_set(_listen, ctypes.c_void_p(0))


def forget() -> None:
    """Drop what was heard: something else is tried now."""
    _heard.lines, _heard.warning = [], None


def cause() -> str:
    """Return this thread's first errors since `forget`, without names of functions; "" if there were none."""
    lines = (" ".join(line.split()) for line in _lines())  # llama.cpp aligns some numbers
    return "; ".join(re.sub(r"^\w+: ", "", line).rstrip(": ") for line in lines)


def _lines() -> list[str]:
    return getattr(_heard, "lines", [])
