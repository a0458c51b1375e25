"""One line that says how far a long step is: rewritten on a terminal, now and then a new line in a log.

pip captures what a build backend prints and shows it only if the build fails. Where stderr is no terminal,
the line therefore goes to the controlling terminal, below the line that pip has there.
Must not know which step it is. Entry points: `Status`, `times`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType

LOG_SECONDS = 60.0  # between two lines where there is no terminal

# How text is put on a terminal: in the cursor's line, or in the line below. The latter leaves the cursor
# where it was: go down (the screen scrolls if it must), up again, save the place; write below; restore it.
_HERE, _HERE_CLEAR = "\r{}\x1b[K", "\r\x1b[K"
_BELOW, _BELOW_CLEAR = "\x1bD\x1b[A\x1b7\x1b[B\r{}\x1b[K\x1b8", "\x1b7\x1b[B\r\x1b[K\x1b8"


class Status:
    """The line of one step; `with Status() as status` ends it with the block, however that ends.

    A terminal that goes away is no error: lines then go to stderr. Test: tests/unit/test_progress.py.
    """

    def __init__(self) -> None:
        self._terminal: int | None = None  # its file descriptor
        self._below = False
        self._next_log = 0.0
        if os.environ.get("TERM", "") in ("", "dumb"):
            return
        if sys.stderr.isatty():
            self._terminal = sys.stderr.fileno()
        else:
            self._terminal, self._below = _controlling_terminal(), True

    def line(self, text: str) -> None:
        """Show `text` in place of the last one; without a terminal print it, at most once a minute."""
        if self._terminal is not None:
            self._write((_BELOW if self._below else _HERE).format(text[: _columns(self._terminal) - 1]))
        if self._terminal is None and time.monotonic() >= self._next_log:
            self._next_log = time.monotonic() + LOG_SECONDS
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def done(self) -> None:
        """Remove the line from the terminal; lines in a log stay. A later `line` shows nothing."""
        if self._terminal is not None:
            self._write(_BELOW_CLEAR if self._below else _HERE_CLEAR)
        if self._terminal is not None and self._below:
            os.close(self._terminal)
        self._terminal, self._next_log = None, float("inf")

    def _write(self, text: str) -> None:
        assert self._terminal is not None
        try:
            os.write(self._terminal, text.encode("utf-8", "replace"))
        except OSError:
            self._terminal = None

    def __enter__(self) -> Status:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done()


def _controlling_terminal() -> int | None:
    """Open the terminal that this process was started from; None without one, and in the background."""
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.tcgetpgrp(terminal) == os.getpgrp():
            return terminal
    except OSError:
        pass
    os.close(terminal)
    return None


def _columns(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns or 80
    except OSError:
        return 80


def clock(seconds: float) -> str:
    """Write a duration as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def times(elapsed: float, share: float) -> str:
    """Return how long a step took and, from 1 % on, how long it still takes by the share that is done."""
    if not 0.01 <= share < 1:
        return clock(elapsed)
    return f"{clock(elapsed)}, {clock(elapsed / share - elapsed)} left"
