"""What every test starts from, whoever started pytest. Must not know: any one test."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile

import pytest

# pools of tests lie on the CPU, many of the least size
_POOLS = ("slots of experts lie in plain memory", r"experts get .* and take ")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache and this run apart: no test reads times of another run, nor leaves its own."""
    for words in _POOLS:
        config.addinivalue_line("filterwarnings", f"ignore:{words}:UserWarning")
    os.environ.setdefault("DRAFTWOOD_CURVES", tempfile.mkdtemp(prefix="draftwood-curves-"))
    _let_ctrl_c_through()
    _let_examples_take_time()


def _let_ctrl_c_through() -> None:
    """What a shell starts in the background (CI, say) inherits an ignored SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _let_examples_take_time() -> None:
    """As much as other processes leave them. There is no Hypothesis where tests/gpu runs."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("loaded")
