"""Processes of the command line: `draftwood`, and `draftwood serve` with a client.

Must not know: what any test expects.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ports import free_port

# llama-cpp-python keeps two files on /dev/null open to the end
COMMAND = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-m", "draftwood"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}


@contextmanager
def serving(
    *arguments: str, n_ctx: int = 512, stderr: int = subprocess.PIPE
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the address and the process of a `draftwood serve` that starts, and kill it behind the block."""
    port = str(free_port())
    options = ["--port", port, "--threads", "1", "-c", str(n_ctx), "--no-warmup"]
    command = [*COMMAND, "serve", *arguments, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": stderr, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **pipes) as it:
        try:
            yield f"http://127.0.0.1:{port}", it
        finally:
            it.kill()


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the server answers. Errors: OSError."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def ready(address: str, process: subprocess.Popen[str]) -> None:
    """Wait until the server has loaded its model."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            assert ask(f"{address}/health") == {"status": "ok"}
            return
        except OSError:  # not listening, or 503 while the model loads
            time.sleep(0.1)
    pytest.fail("llama-server was not ready within 180 s")
