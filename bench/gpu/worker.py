"""A process with our library in it that does what the benchmark asks, one call after the other.

A process of its own, so that a restart is one and a crash is an error in words. Must not know: what is
measured. Test: tests/model/test_bench_run.py.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.gpu.child import LAST, tail
from bench.gpu.work import BenchError


def serve(conn: Connection, log: str, model: str, drafter: str | None) -> None:
    """Answer (method, arguments) with (True, result) or (False, traceback) until told to end by None."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with tempfile.TemporaryDirectory() as curves:
        os.environ["DRAFTWOOD_CURVES"] = curves  # "auto" measures for itself
        from bench.gpu.ours import Ours, shared_weights

        ours = Ours(model, drafter)
        with shared_weights():
            while (asked := conn.recv()) is not None:
                method, arguments = asked
                try:
                    conn.send((True, getattr(ours, method)(*arguments)))
                except Exception:
                    conn.send((False, traceback.format_exc()))
            ours.close()


class Worker:
    """That process, seen from here."""

    def __init__(self, model: Path, drafter: Path | None, log: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a forked one would share the card's context
        self._conn, theirs = context.Pipe()
        self._log = log
        given = (theirs, str(log), str(model), None if drafter is None else str(drafter))
        self._process = context.Process(target=serve, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def call(self, limit: float, method: str, *arguments: Any) -> Any:
        """Return what a method of Ours returns.

        Errors: BenchError with the end of its log where it raised, died or took longer than `limit` seconds.
        """
        try:
            self._conn.send((method, arguments))
            if not self._conn.poll(limit):
                self._process.kill()
                raise BenchError(f"our process did not finish {method!r} in {limit:.0f} s\n{tail(self._log)}")
            done, result = self._conn.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            status = self._process.exitcode
            raise BenchError(
                f"our process ended with status {status} in {method!r}\n{tail(self._log)}"
            ) from error
        if not done:
            raise BenchError(f"{method!r} failed in our process:\n{result[-LAST:]}")
        return result

    def close(self) -> None:
        """End the process, by force if it must be."""
        with suppress(OSError):  # it is gone already
            self._conn.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._conn.close()
