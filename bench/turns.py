"""A process that answers each line of JSON with another, so that several can take turns.

Used by bench/off_speed.py and bench/stock_cpu.py. Must not know: what is measured.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Worker:
    """One process; it ends when its stdin does. Its stderr is ours."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, **request: Any) -> dict[str, Any]:
        """Let it take a turn; RuntimeError if it died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
