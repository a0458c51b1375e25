"""The line of progress: rewritten on a terminal, even where stderr is captured; once a minute in a log."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import progress
import pytest
from progress import Status, clock, times

PATH = f"import os, sys; sys.path.insert(0, {str(Path(progress.__file__).resolve().parent)!r})\n"
LINES = "with Status() as status:\n    status.line('one')\n    status.line('two')\n"
# What a shell does for what it starts: stdin's terminal becomes the controlling one.
CONTROL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


def shown(code: str, *, stderr_too: bool = False, columns: int = 80, term: str = "xterm") -> tuple[str, str]:
    """Run code in a session of its own; returns what the terminal at its stdin shows, and what stderr got."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        done = subprocess.run(
            [sys.executable, "-c", f"{PATH}from progress import Status\n{code}"],
            env=os.environ | {"TERM": term},
            stdin=theirs,
            stderr=theirs if stderr_too else subprocess.PIPE,
            start_new_session=True,
            check=True,
        )
        os.write(theirs, b"|")  # the end: the kernel hands over what was written before in pieces
        seen = b""
        while not seen.endswith(b"|"):
            seen += os.read(ours, 1 << 16)
        return seen.decode().removesuffix("|"), (done.stderr or b"").decode()
    finally:
        os.close(ours)
        os.close(theirs)


def below(text: str) -> str:
    return f"\x1bD\x1b[A\x1b7\x1b[B\r{text}\x1b[K\x1b8"


# ---- where the line goes ----


def test_on_a_terminal() -> None:
    assert shown(LINES, stderr_too=True) == ("\rone\x1b[K\rtwo\x1b[K\r\x1b[K", "")


def test_behind_a_captured_stderr() -> None:
    clear = "\x1b7\x1b[B\r\x1b[K\x1b8"
    assert shown(CONTROL + LINES) == (below("one") + below("two") + clear, "")


def test_in_the_background() -> None:
    """A terminal that somebody else works at is left alone."""
    fork = "child = os.fork()\nif child:\n    os.waitpid(child, 0)\n    os._exit(0)\nos.setpgrp()\n"
    assert shown(CONTROL + fork + LINES) == ("", "one\n")


def test_without_a_terminal() -> None:
    assert shown(LINES) == ("", "one\n")


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_rewrite(term: str) -> None:
    assert shown(LINES, stderr_too=True, term=term) == ("one\r\n", "")


def test_a_line_never_wraps() -> None:
    text, _ = shown("Status().line('0123456789' * 3)", stderr_too=True, columns=20)
    assert text == "\r0123456789012345678\x1b[K"


def test_an_error_ends_the_line() -> None:
    code = "with Status() as status:\n    status.line('one')\n    1 / 0\n"
    code = "import contextlib\nwith contextlib.suppress(ArithmeticError), " + code.removeprefix("with ")
    assert shown(code, stderr_too=True) == ("\rone\x1b[K\r\x1b[K", "")


def test_a_terminal_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pty.openpty()
    try:
        monkeypatch.setenv("TERM", "xterm")
        with monkeypatch.context() as patch:
            patch.setattr(sys.stderr, "isatty", lambda: True)
            patch.setattr(sys.stderr, "fileno", lambda: theirs)
            status = Status()
        os.close(ours)
        status.line("one")
        status.done()
    finally:
        os.close(theirs)
    assert capfd.readouterr().err == "one\n"


# ---- a log ----


def test_a_log_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Status() as status:
        for second in range(130):
            now = 1000.0 + second
            status.line(f"second {second}")
    status.line("after the end")
    assert capsys.readouterr().err == "second 0\nsecond 60\nsecond 120\n"


# ---- times ----


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (5.9, "0:05"), (754, "12:34"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "1:00"), (0.001, "1:00"), (0.25, "1:00, 3:00 left"), (1, "1:00"), (1.2, "1:00")]
)
def test_times(share: float, text: str) -> None:
    assert times(60, share) == text
