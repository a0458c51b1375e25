"""What a long step shows and how Ctrl-C is noticed: a bar on stderr, and a flag. Knows nothing of models."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

DELAY = 1.0
"""Seconds a step may take before its bar appears."""


class Bar:
    """A progress bar on stderr, in a `with` block; it appears after DELAY, and only on a terminal.

    It draws from threads of its own, so it moves while a C call runs.
    """

    def __init__(self, label: str, *, wanted: bool = True, delay: float = DELAY) -> None:
        self._label = label
        self._fraction = 0.0
        self._lock = threading.Lock()
        self._done = False
        self._progress: Any = None
        self._timer = threading.Timer(delay, self._appear) if wanted and sys.stderr.isatty() else None

    def update(self, fraction: float) -> None:
        """Say how much is done, 0 to 1."""
        self._fraction = fraction
        with self._lock:
            if self._progress is not None:
                self._progress.update(self._progress.task_ids[0], completed=fraction)

    def __enter__(self) -> Bar:
        if self._timer is not None:
            # llama-cpp-python points fd 2 elsewhere while it loads a model; this copy stays the terminal
            self._terminal = os.fdopen(os.dup(sys.stderr.fileno()), "w")
            self._timer.daemon = True
            self._timer.start()
        return self

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with self._lock:
            if self._done:
                return
            self._progress = Progress(
                *columns,
                console=Console(file=self._terminal),
                transient=True,
                redirect_stdout=False,  # they may be swapped while the bar lives
                redirect_stderr=False,
            )
            self._progress.add_task(self._label, total=1.0, completed=self._fraction)
            self._progress.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        with self._lock:
            self._done = True
            if self._progress is not None:
                self._progress.stop()
        self._timer.join()
        self._terminal.close()


class Interrupt:
    """Ctrl-C as a flag, in a `with` block: an exception could strike inside a C callback and be lost there.

    `raised` is looked at between tokens. A second Ctrl-C raises KeyboardInterrupt wherever it strikes, unless
    `patient` is set: a chat goes on with the same model.
    """

    def __init__(self) -> None:
        self.raised = False
        self.patient = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.raised:
            raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.patient:
            self.check()
        self.raised = True

    def __enter__(self) -> Interrupt:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)
