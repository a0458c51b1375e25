"""Threads that share a `Llama`: one is in the library at a time, the others wait.

A call that returns its whole result is one turn. A generator takes one for each of its steps; the context is
its own until another generation begins, which ends it with an error (generation.py).
Test: tests/model/test_threads.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def in_turn(method: _F) -> _F:
    """Return the method, run while no other thread is in one of `self`: `self._turn` is an RLock."""

    @functools.wraps(method)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return whole  # type: ignore[return-value]


def step_by_step(method: _F) -> _F:
    """Return the generator method with a turn for each step, its end included."""

    @functools.wraps(method)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, None]:
        steps = method(self, *args, **kwargs)
        sent = None
        try:
            while True:
                with self._turn:
                    try:
                        value = steps.send(sent)
                    except StopIteration:
                        return
                sent = yield value
        finally:
            with self._turn:
                steps.close()

    return stepped  # type: ignore[return-value]
