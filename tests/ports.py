"""Ports for servers that tests start. Must not know: any test."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress

_LEAST, _MOST = 10_000, 32_000  # Linux takes those of connections from above
_WORKERS = 16  # of pytest-xdist, at most
_chance = random.SystemRandom()  # the usual one begins anew in tests


def free_port() -> int:
    """Return a port of loopback that nobody listened on just now, and that no other worker returns."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    while True:
        port = _chance.randrange(_LEAST, _MOST, _WORKERS) + worker
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
