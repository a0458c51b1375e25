"""What every test starts from, whoever started pytest. Must not know: any one test."""

from __future__ import annotations

import os
import signal
import tempfile


def pytest_configure() -> None:
    """Keep the user's cache and this run apart: no test reads times of another run, nor leaves its own."""
    os.environ.setdefault("DRAFTWOOD_CURVES", tempfile.mkdtemp(prefix="draftwood-curves-"))
    _let_ctrl_c_through()


def _let_ctrl_c_through() -> None:
    """What a shell starts in the background (CI, say) inherits an ignored SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
