"""What every test starts from, whoever started pytest. Must not know: any one test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let Ctrl-C through: what a shell starts in the background (CI, say) inherits an ignored SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
