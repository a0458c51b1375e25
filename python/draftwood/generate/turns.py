"""Threads that share a `Llama`: one is in the library at a time, the others wait.

A call that returns its whole result is one turn, and so is each step of a generator. A generation waits
for a stream until that ends, or until it was not read for PATIENCE seconds. Then it takes the context,
which ends the stream with an error (generation.py). It does so at once in the main thread that reads the
stream itself, and after GRACE seconds in another thread that does: a pool of threads may read the next
part in any of them.
What changes the context by hand (eval, sample, reset, load_state) waits the same way. A thread that reads
a stream itself may do so between two steps, and the stream goes on from there.
Counters are read without waiting.
Must not know: what is done in a turn. Test: tests/model/test_threads.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from draftwood.load import forks

_F = TypeVar("_F", bound=Callable[..., Any])
PATIENCE = 10.0
"""Seconds after which a stream that is not read gives way."""
GRACE = 0.5
"""The same in a thread that may have to read it."""
_LOOK = 0.05  # seconds: a stream that is dropped cannot always wake those who wait


class Turns:
    """The turns on one `Llama`: `with` takes one, and waits for it. A turn within a turn is the same one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self._left: list[Generator[Any, Any, None]] = []
        self._stream: _Stream | None = None
        self._steps = 0  # that run within each other
        self.seen: dict[str, Any] = {}
        """What `without_waiting` read last, by name."""

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            while self._left:
                self._left.pop().close()
        except BaseException:
            self._lock.release()
            raise

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

    def step(self, steps: Generator[Any, Any, None], sent: Any, *, first: bool) -> Any:
        """Take a generator's step, in a turn. The first, unless within another's, waits for other streams."""
        if first and self._steps == 0:
            while (stream := self._stream) is not None and not stream.gives_way():
                self._ended.wait(_LOOK)  # others have their turns meanwhile
            self._stream = _Stream(steps)
        self._steps += 1
        try:
            return steps.send(sent)
        finally:
            self._steps -= 1
            if self._stream is not None and self._stream.steps is steps:
                self._stream.read()

    def take_context(self) -> bool:
        """Wait, in a turn, for a stream of other threads. True: it has given way, and is to be ended."""
        if self._steps > 0:
            return False  # a step's own call
        while (stream := self._stream) is not None and not stream.gives_way():
            self._ended.wait(_LOOK)
        if stream is None or stream.has_ended or stream.is_read_here():
            return False
        self._stream = None
        return True

    def end(self, steps: Generator[Any, Any, None]) -> None:
        """Close a generator, at the begin of the next turn if another thread has this one.

        Never waits: generators end wherever they are dropped, in the garbage collector of any thread, too.
        """
        if (stream := self._stream) is not None and stream.steps is steps:
            stream.has_ended = True
        with self.at_once() as mine:
            if not mine:
                self._left.append(steps)
                return
            try:
                steps.close()
            finally:
                self._ended.notify_all()

    def drop_stream(self) -> None:
        """Let who waits for the stream go on: its context is gone."""
        self._stream = None
        with self.at_once() as mine:
            if mine:
                self._ended.notify_all()


class _Stream:
    """A generator that has the context: which threads have read it, and when one last did."""

    def __init__(self, steps: Generator[Any, Any, None]) -> None:
        self.steps = steps
        self.has_ended = False
        self._readers: set[int] = set()
        self.read()

    def read(self) -> None:
        """Note who reads it, and when."""
        self._readers.add(threading.get_ident())
        self._at = time.monotonic()

    def gives_way(self) -> bool:
        """Tell whether who asks may take the context from it."""
        return self.has_ended or time.monotonic() - self._at >= self._patience()

    def is_read_here(self) -> bool:
        """Tell whether this thread alone has read it."""
        return self._readers == {threading.get_ident()}

    def _patience(self) -> float:
        if not self.is_read_here():
            return PATIENCE
        return 0.0 if threading.current_thread() is threading.main_thread() else GRACE


def in_turn(method: _F) -> _F:
    """Return the method, run in one of `self._turns`."""

    @functools.wraps(method)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        forks.require_usable()  # first: a thread of the parent may have had the turn
        with self._turns:
            return method(self, *args, **kwargs)

    return whole  # type: ignore[return-value]


@contextlib.contextmanager
def context_taken(llm: Any) -> Iterator[None]:
    """One of `llm._turns` that changes its context: it waits for streams of other threads, too."""
    forks.require_usable()
    with llm._turns:
        if llm._turns.take_context():
            llm._sampler = None  # by which the stream knows that its context is gone
        yield


def alone(method: _F) -> _F:
    """Return the method, run in a turn that changes the context."""

    @functools.wraps(method)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        with context_taken(self):
            return method(self, *args, **kwargs)

    return whole  # type: ignore[return-value]


def without_waiting(getter: _F) -> _F:
    """Return the getter; while another thread has the turn, it returns what was read last, by any thread."""

    @functools.wraps(getter)
    def glance(self: Any) -> Any:
        with self._turns.at_once() as mine:
            if mine:
                self._turns.seen[getter.__name__] = getter(self)
            return self._turns.seen[getter.__name__]

    return glance  # type: ignore[return-value]


def step_by_step(method: _F) -> _F:
    """Return the generator method with a turn for each step."""

    @functools.wraps(method)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        return _stepped(self._turns, method(self, *args, **kwargs))

    return stepped  # type: ignore[return-value]


def _stepped(turns: Turns, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    sent, first = None, True
    try:
        while True:
            forks.require_usable()
            with turns:
                try:
                    value = turns.step(steps, sent, first=first)
                except StopIteration:
                    return
            first = False
            sent = yield value
    finally:
        if not sys.is_finalizing():  # then no thread goes on, and who has the turn never gives it back
            turns.end(steps)
