"""Processes that were forked from one with a `Llama`.

OpenMP's threads do not come along: a child that evaluates waits for them for ever. They are ended before a
fork, and the next evaluation of parent and child makes new ones. The child gets an error where they cannot be
ended, where layers are on a card, and where another thread was in the library: it is missing in the child.
Must not know: `Llama`. Test: tests/model/test_forks.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from draftwood.engine import _capi
from draftwood.errors import UnsupportedError

_SOFT = 1  # omp_pause_soft of omp.h
_FIX = 'multiprocessing.get_context("spawn"), or make the first Llama in the child'


class Turns(Protocol):
    """Who may use a `Llama` (generate/turns.py)."""

    def at_once(self) -> AbstractContextManager[bool]:
        """Take a turn without waiting; False: another thread has it."""


class _State:
    """What this process knows of itself and its parent."""

    watching = False
    on_card = False
    ended = True
    """Whether the threads were ended before the last fork."""
    found = ""
    """What keeps this child from evaluating."""
    turns: weakref.WeakSet[Turns] = weakref.WeakSet()
    lost: weakref.WeakSet[Turns] = weakref.WeakSet()
    """Turns that a thread had which is missing in this child."""


def watch(turns: Turns, *, on_card: bool) -> None:
    """Take care of forks from now on. turns: of a new `Llama`. on_card: whether layers are on a card."""
    _State.turns.add(turns)
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


def is_lost(turns: Turns) -> bool:
    """Tell whether the thread that has the turn is missing: who waits for it waits for ever."""
    return turns in _State.lost


def _before() -> None:
    _State.ended = _end_threads()


def _in_child() -> None:
    _State.lost.update([each for each in _State.turns if not _free(each)])
    if _State.on_card:
        _State.found = "layers on a card, whose driver does not work in forked children"
    elif not _State.ended:
        _State.found = "OpenMP threads, which do not work in forked children"
    elif _State.lost:
        _State.found = "a Llama at work in another thread, which is missing in forked children"


def _free(turns: Turns) -> bool:
    with turns.at_once() as mine:
        return mine


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
