"""Warnings point at the caller of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from draftwood import warn as module
from draftwood.generate.turns import Turns, in_turn, step_by_step

MESSAGE = "found something"


class Caller:
    def __init__(self) -> None:
        self._turns = Turns()

    @in_turn
    def whole(self) -> None:
        inside("warn(MESSAGE)")

    @step_by_step
    def steps(self) -> Iterator[int]:
        inside("warn(MESSAGE)")
        yield 1


def inside(code: str) -> None:
    """Run code as if it were the package's own."""
    exec(code, {"__name__": "draftwood.somewhere", "warn": module.warn, "MESSAGE": MESSAGE})


@pytest.mark.parametrize(
    "call",
    [
        lambda: module.warn(MESSAGE),
        lambda: inside("(lambda: warn(MESSAGE))()"),
        lambda: Caller().whole(),
        lambda: next(Caller().steps()),
    ],
)
def test_the_first_frame_outside(call):
    with pytest.warns(UserWarning, match=MESSAGE) as said:
        call()
    assert [each.filename for each in said] == [__file__]
