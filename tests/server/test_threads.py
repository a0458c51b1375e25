"""The server's second thread: it answers while a batch is decoded, and costs a token nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.conftest import GetServer
from tests.server.process import Server


def changes_of_threads(server: Server) -> int:
    """Return how often the main thread, which decodes, has waited for something."""
    status = Path(f"/proc/{server.process.pid}/status").read_text("ascii")
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.parametrize("spec_type", ["plain", "none"])
def test_a_token_changes_no_threads(server: GetServer, spec_type: str) -> None:
    one = server("-np", "1", "-c", "512", "--spec-type", spec_type)
    one.complete("def add(a, b):", n_predict=8, ignore_eos=True)
    before = changes_of_threads(one)
    one.complete("def add(a, b):", n_predict=200, ignore_eos=True)
    assert changes_of_threads(one) - before < 100


@pytest.mark.parametrize("path", ["/slots", "/metrics"])
def test_state_is_told_in_the_middle_of_a_batch(server: GetServer, path: str) -> None:
    one = server("-np", "1", "-c", "4096", "-b", "4096", "-ub", "4096", "--spec-type", "plain")
    with ThreadPoolExecutor(1) as client:
        reply = client.submit(one.complete, [5] * 4000, n_predict=1, cache_prompt=False)
        while not one.get("/slots")[0]["is_processing"]:
            assert not reply.done(), "the prompt was evaluated before anything could be asked"
        begin = time.monotonic()
        waits = []
        while not reply.done():
            asked = time.monotonic()
            one.get(path)
            waits.append(time.monotonic() - asked)
        took = time.monotonic() - begin
    assert len(waits) >= 3
    assert max(waits[:-1]) < took / 3  # the last one may meet the end of the batch
