"""Ports for servers that tests start. Must not know: any test."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of loopback that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
