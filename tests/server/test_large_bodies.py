"""Bodies of tens of megabytes: refused without the memory for them, and others are served meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from tests.server.conftest import GetServer
from tests.server.process import Server
from tests.server.test_bad_input import most_memory
from tests.server.test_limits import FLAGS, HEAD, answer, connections, health


def parts_of(body: bytes, *, chunked: bool) -> Iterator[bytes]:
    yield (
        HEAD + (b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)) + b"\r\n\r\n"
    )
    for at in range(0, len(body), 1 << 20):
        part = body[at : at + (1 << 20)]
        yield b"%x\r\n%b\r\n" % (len(part), part) if chunked else part


@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
def test_80_mb_get_a_413_and_no_memory(tmp_path: Path, chunked: bool) -> None:
    usual = Server(tmp_path / "log", *FLAGS)
    try:
        assert usual.wait().complete("a", n_predict=2)["tokens_predicted"] == 2
        before = most_memory(usual)
        for _ in range(3):
            with connections(usual) as connect:
                made = connect()
                with suppress(OSError):  # it closes before it has all
                    for part in parts_of(b'{"prompt": "' + b"a" * (80 << 20) + b'"}', chunked=chunked):
                        made.sendall(part)
                status, error = answer(made)
            assert status == 413
            assert "--http-body" in str(error["message"])
        assert most_memory(usual) - before < 120 << 20  # 32 MiB are read, in strings that double
        assert usual.complete("a", n_predict=2)["tokens_predicted"] == 2
    finally:
        usual.close()


def large(kind: str) -> tuple[str, bytes]:
    """Return the path and the body of a request of 31 MB that takes a while and is refused."""
    text = json.dumps("the quick brown fox jumps over the lazy dog. " * (22 << 20 >> 5))
    return {
        "prompt": ("/completion", f'{{"prompt": {text}}}'.encode()),
        "chat": ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {text}}}]}}'.encode()),
        "nested": ("/completion", f'{{"prompt": {text}, "other": {"[" * 100_000}{"]" * 100_000}}}'.encode()),
    }[kind]


@pytest.mark.parametrize("kind", ["prompt", "chat", "nested"])
def test_others_are_served_beside_a_large_body(server: GetServer, kind: str) -> None:
    usual = server("-c", "1024", "-np", "2", "-no-kvu", "--spec-type", "auto")
    path, body = large(kind)
    usual.complete("a", n_predict=2)
    n_completed, waits = 0, []
    with ThreadPoolExecutor(1) as clients:
        refused = clients.submit(requests.post, usual.url + path, data=body, timeout=120)
        while not refused.done():
            waits.append(health(usual))
            usual.complete("a", n_predict=2)
            n_completed += not refused.done()
    assert refused.result().status_code == 400
    assert n_completed > 0
    assert max(waits) < 5  # of a body that takes 10 s and more
