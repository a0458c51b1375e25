"""Threads that share a `Llama`: one is in the library at a time, the others wait.

A call that returns its whole result is one turn, and so is each step of a generator. Between two steps others
may come in: another generation takes the context, which ends this one with an error (generation.py);
load_state and reset take it, too, as they do within one thread.
Must not know: what is done in a turn. Test: tests/model/test_threads.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from draftwood.load import forks

_F = TypeVar("_F", bound=Callable[..., Any])


class Turns:
    """The turns on one `Llama`: `with` takes one, and waits for it. A turn within a turn is the same one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._left: list[Generator[Any, Any, None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        while self._left:
            self._left.pop().close()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[bool]:
        """Take a turn without waiting; False: another thread has it."""
        mine = self._lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def end(self, steps: Generator[Any, Any, None]) -> None:
        """Close a generator, at the begin of the next turn if another thread has this one.

        Never waits: generators end wherever they are dropped, in the garbage collector of any thread, too.
        """
        with self.at_once() as mine:
            if mine:
                steps.close()
            else:
                self._left.append(steps)


def in_turn(method: _F) -> _F:
    """Return the method, run in one of `self._turns`."""

    @functools.wraps(method)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        forks.require_usable()  # first: a thread of the parent may have had the turn
        with self._turns:
            return method(self, *args, **kwargs)

    return whole  # type: ignore[return-value]


def step_by_step(method: _F) -> _F:
    """Return the generator method with a turn for each step."""

    @functools.wraps(method)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        return _stepped(self._turns, method(self, *args, **kwargs))

    return stepped  # type: ignore[return-value]


def _stepped(turns: Turns, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    sent = None
    try:
        while True:
            forks.require_usable()
            with turns:
                try:
                    value = steps.send(sent)
                except StopIteration:
                    return
            sent = yield value
    finally:
        if not sys.is_finalizing():  # then nobody goes on, and who has the turn never gives it back
            turns.end(steps)
