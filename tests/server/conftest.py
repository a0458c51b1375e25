"""Servers for the tests, each started once: `server("--spec-type", "mtp")`. Must not know: any test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.process import Server

GetServer = Callable[..., Server]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetServer]:
    folder = tmp_path_factory.mktemp("servers")
    (folder / "slots").mkdir()
    running: dict[tuple[str, ...], Server] = {}

    def get(*flags: str) -> Server:
        if flags not in running:
            log = folder / f"{len(running)}.log"
            saves = ("--slot-save-path", f"{folder / 'slots'}/")
            running[flags] = Server(log, "--metrics", *saves, *flags)
            running[flags].wait()
        return running[flags]

    yield get
    for each in running.values():
        each.close()
