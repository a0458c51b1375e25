"""Processes that were forked from one with a `Llama`.

OpenMP's threads do not come along: a child that evaluates waits for them for ever. They are ended before a
fork, and the next evaluation of parent and child makes new ones. Where they cannot be ended, and where layers
are on a card, the child gets an error. Must not know: `Llama`. Test: tests/model/test_forks.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from draftwood.engine import _capi
from draftwood.errors import UnsupportedError

_SOFT = 1  # omp_pause_soft of omp.h
_FIX = 'multiprocessing.get_context("spawn"), or make the first Llama in the child'


class _State:
    """What this process knows of itself and its parent."""

    watching = False
    on_card = False
    ended = True
    """Whether the threads were ended before the last fork."""
    found = ""
    """What keeps this child from evaluating."""


def watch(*, on_card: bool) -> None:
    """Take care of forks from now on. on_card: whether layers are on a card."""
    _State.on_card = _State.on_card or on_card
    if not _State.watching:
        _State.watching = True
        os.register_at_fork(before=_before, after_in_child=_in_child)


def require_usable() -> None:
    """Refuse to evaluate in a child that cannot. Errors: UnsupportedError."""
    if _State.found:
        raise UnsupportedError(
            f"found a process that was forked from one with {_State.found}; expected one started anew",
            hint=_FIX,
        )


def _before() -> None:
    _State.ended = _end_threads()


def _in_child() -> None:
    if _State.on_card:
        _State.found = "layers on a card, whose driver does not work in forked children"
    elif not _State.ended:
        _State.found = "OpenMP threads, which do not work in forked children"


@functools.cache
def _runtime() -> str:
    """Return GCC's OpenMP runtime: a wheel's own copy (tools/repair_wheel.sh), or the system's."""
    copies = sorted(Path(_capi.lib._name).parent.glob("libgomp-*.so*"))
    return str(copies[0]) if copies else "libgomp.so.1"


def _end_threads() -> bool:
    """End the threads of this thread's OpenMP pool; False: that is not possible."""
    try:
        runtime = ctypes.CDLL(_runtime(), mode=os.RTLD_NOLOAD)
    except OSError:
        return True  # another runtime: LLVM's makes its threads anew by itself
    try:
        return bool(runtime.omp_pause_resource_all(_SOFT) == 0)
    except AttributeError:  # of GCC before 9
        return False
