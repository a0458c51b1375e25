"""A pytest plugin beside llama-server's own tests: no network, tiny-moe for a model, replies recorded.

run.py loads it into the suite's own pytest and leaves `settings.json` beside the suite. Must not know: any
test, what drafts.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

# written by run.py into the folder where pytest starts
SETTINGS = json.loads(Path("settings.json").read_text("utf-8"))
MODEL = Path(SETTINGS["model"])


def _download(url: str, *_: Any, **__: Any) -> str:
    if url.rpartition("/")[2] not in SETTINGS["downloads"]:
        raise RuntimeError(f"found a download of {url}; expected none, this run is offline")
    return str(MODEL)


# the one use that the suite has for this package
sys.modules["wget"] = types.ModuleType("wget")

import utils  # noqa: E402 (the suite's)

# ---- offline, on tiny-moe ----


def _fill_cache() -> None:
    """Lay out llama.cpp's cache of downloads: the names that the suite asks for lead to tiny-moe."""
    cache = Path(SETTINGS["cache"])
    shutil.rmtree(cache, ignore_errors=True)
    for repository, file in SETTINGS["models"].items():
        commit = "0" * 40
        folder = cache / f"models--{repository.replace('/', '--')}"
        path = folder / "snapshots" / commit / file
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        path.parent.mkdir(parents=True)
        path.symlink_to(MODEL)


def _loopback(host: Any, *rest: Any, **named: Any) -> Any:
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"found a request to {host}; expected loopback, this run is offline")
    return _getaddrinfo(host, *rest, **named)


def _changed(name: str, **values: Any) -> None:
    """Give a preset what its own model has in the header and tiny-moe has not."""
    preset = getattr(utils.ServerPreset, name)

    def make() -> Any:
        server = preset()
        for key, value in values.items():
            setattr(server, key, value)
        return server

    setattr(utils.ServerPreset, name, staticmethod(make))


_getaddrinfo, socket.getaddrinfo = socket.getaddrinfo, _loopback
utils.download_file = _download
utils.ServerPreset.load_all = staticmethod(lambda: None)  # it downloads every model
_changed("bert_bge_small", pooling="mean")
_changed("bert_bge_small_with_fa", pooling="mean")
_changed("tinyllama_infill", server_path=SETTINGS["infill_server"])

# ---- what was sent and received ----

_lock = threading.Lock()
_running = ""


def _write(record: dict[str, Any]) -> None:
    with _lock, open(SETTINGS["records"], "a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def _write_reply(
    test: str, received: bytes, whole: bool, method: str, url: str, sent: Any, status: int
) -> None:
    text = sent.decode("utf-8", "replace") if isinstance(sent, bytes) else sent or ""
    request = f"{method} /{url.partition('://')[2].partition('/')[2]} {text}"
    body = received.decode("utf-8", "replace")
    _write({"test": test, "request": request, "status": status, "body": body, "whole": whole})


def _recorded(chunks: Any, describe: Any) -> Any:
    """Wrap the iterator over a response's bytes; the clients read whole bodies through it, too."""

    def iterate(self: Any, *rest: Any, **named: Any) -> Iterator[bytes]:
        test, received, whole = _running, [], False
        try:
            for chunk in chunks(self, *rest, **named):
                received.append(chunk)
                yield chunk
            whole = True
        finally:
            _write_reply(test, b"".join(received), whole, *describe(self))

    return iterate


requests.Response.iter_content = _recorded(
    requests.Response.iter_content,
    lambda each: (each.request.method, each.request.url, each.request.body, each.status_code),
)
httpx.Response.iter_bytes = _recorded(
    httpx.Response.iter_bytes,
    lambda each: (each.request.method, str(each.request.url), each.request.content, each.status_code),
)


@pytest.fixture(autouse=True)
def _prepared(request: pytest.FixtureRequest) -> Iterator[None]:
    global _running  # noqa: PLW0603 (the suite sends requests from threads)
    _running = request.node.nodeid
    random.seed(_running)
    _fill_cache()
    yield
    _running = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        words = str(report.longrepr) if report.longrepr else ""
        _write({"test": item.nodeid, "outcome": report.outcome, "words": words})
    return report
