"""Limits of llama-server's connections, heads and bodies, and who still gets an answer beyond them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.model.processes import ready, serving
from tests.server.conftest import GetServer
from tests.server.process import MODEL, Server

FLAGS = ("-c", "512", "-np", "1", "--spec-type", "auto")
LIMITS = ("--http-connections", "--http-head-time", "--http-stall-time", "--http-body")
HEAD = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
# tiny-moe says 4,096, and no reply would be longer
ENDLESS = ("-c", "65536", "-np", "1", "--override-kv", "qwen35moe.context_length=int:65536")
EXAMPLE = b'{"prompt": "a", "n_predict": 2}'
Connect = Callable[..., socket.socket]


@contextmanager
def limited(log: Path, *values: str) -> Iterator[Server]:
    """A server with these LIMITS."""
    flags = [word for each in zip(LIMITS, values, strict=True) for word in each]
    server = Server(log, *FLAGS, *flags)
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few connections and little patience."""
    with limited(tmp_path_factory.mktemp("strict") / "log", "32", "1", "2", "1") as server:
        yield server


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with few connections, whose limits of time no loaded machine comes near to."""
    with limited(tmp_path_factory.mktemp("patient") / "log", "32", "300", "300", "1") as server:
        yield server


@contextmanager
def connections(server: Server) -> Iterator[Connect]:
    """connect(bytes) -> a connection that has sent them; all are closed in the end."""
    address = urlsplit(server.url)
    with ExitStack() as stack:

        def connect(data: bytes = b"") -> socket.socket:
            made = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=60))
            made.sendall(data)
            return made

        yield connect


def answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """Read a reply to its end; (0, {}) where the server closes without one."""
    data = b""
    while part := connection.recv(65536):
        data += part
    if not data:
        return 0, {}
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def half_a_body(length: int = 1000) -> bytes:
    return HEAD + f"Content-Length: {length}\r\n\r\n".encode() + b'{"prompt": '


def health(server: Server) -> float:
    begin = time.monotonic()
    assert requests.get(f"{server.url}/health", timeout=60).json() == {"status": "ok"}
    return time.monotonic() - begin


def until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Return whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return is_true


def completed(server: Server) -> requests.Response:
    return requests.post(f"{server.url}/completion", json={"prompt": "a", "n_predict": 2}, timeout=60)


def serves(server: Server) -> bool:
    try:
        return completed(server).ok
    except requests.ConnectionError:
        return False


def test_half_a_head_gets_a_408(strict: Server) -> None:
    with connections(strict) as connect:
        begin = time.monotonic()
        status, error = answer(connect(HEAD))
        assert (status, error["code"]) == (408, 408)
        assert "--http-head-time" in str(error["message"])
        assert 0.9 < time.monotonic() - begin < 9  # without the flag 10


def test_a_connection_that_says_nothing_is_closed(strict: Server) -> None:
    with connections(strict) as connect:
        assert answer(connect()) == (0, {})


def test_half_a_body_gets_a_408(strict: Server) -> None:
    with connections(strict) as connect:
        begin = time.monotonic()
        status, error = answer(connect(half_a_body()))
        assert status == 408
        assert "--http-stall-time" in str(error["message"])
        assert 1.5 < time.monotonic() - begin < 50  # without the flag 60


def test_a_body_that_ends_early_gets_a_400(strict: Server) -> None:
    with connections(strict) as connect:
        made = connect(half_a_body())
        made.shutdown(socket.SHUT_WR)
        status, error = answer(made)
        assert status in (0, 400)
        assert status == 0 or "incomplete" in str(error["message"])


def test_a_large_body_gets_a_413(strict: Server) -> None:
    reply = requests.post(f"{strict.url}/completion", json={"prompt": "a" * (2 << 20)}, timeout=60)
    assert reply.status_code == 413
    assert "--http-body" in reply.json()["error"]["message"]


def test_a_large_form_is_told_of_its_own_limit(strict: Server) -> None:
    """As `curl -d` sends JSON: its default is a form."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    reply = requests.post(f"{strict.url}/completion", data=b"a" * (2 << 20), headers=form, timeout=60)
    assert reply.status_code == 413
    assert "expected Content-Type: application/json" in reply.json()["error"]["message"]


def test_many_prompts_of_a_request_get_a_400(strict: Server) -> None:
    for path, name, prompt in (("/completion", "prompt", [1]), ("/v1/completions", "prompt", "a")):
        most, more = ({name: [prompt] * n, "n_predict": 1, "max_tokens": 1} for n in (2, 2049))
        assert requests.post(f"{strict.url}{path}", json=most, timeout=60).status_code == 200
        reply = requests.post(f"{strict.url}{path}", json=more, timeout=60)
        assert reply.status_code == 400
        assert (
            "found 2049 prompts or documents in a request; expected at most 2048"
            in reply.json()["error"]["message"]
        )


def test_a_head_in_pieces_is_served(patient: Server) -> None:
    with connections(patient) as connect:
        made = connect(HEAD[:20])
        time.sleep(0.1)
        made.sendall(HEAD[20:] + f"Content-Length: {len(EXAMPLE)}\r\nConnection: close\r\n\r\n".encode())
        time.sleep(0.1)
        made.sendall(EXAMPLE)
        data = b""
        while part := made.recv(65536):
            data += part
        assert b" 200 " in data.split(b"\r\n")[0]


@pytest.mark.parametrize("data", [b"", HEAD, half_a_body()], ids=["nothing", "half a head", "half a body"])
def test_health_is_served_beside_half_sent_requests(patient: Server, data: bytes) -> None:
    with connections(patient) as connect:
        held = [connect(data) for _ in range(200)]
        assert max(health(patient) for _ in range(5)) < 30  # they stay for 300
        del held


@pytest.mark.parametrize("data", [b"", HEAD, half_a_body()], ids=["nothing", "half a head", "half a body"])
def test_everybody_is_served_behind_half_sent_requests(strict: Server, data: bytes) -> None:
    with connections(strict) as connect:
        held = [connect(data) for _ in range(200)]
        health(strict)
        time.sleep(3.5)  # longer than either limit
        assert until(lambda: serves(strict))
        health(strict)
        del held


def test_too_many_bodies_get_a_429(patient: Server) -> None:
    with connections(patient) as connect:
        held = [connect(half_a_body()) for _ in range(40)]
        assert until(lambda: completed(patient).status_code == 429), "the server has not read them all"
        reply = completed(patient)
        assert reply.status_code == 429
        assert reply.json()["error"]["type"] == "rate_limit_error"
        assert "--http-connections" in reply.json()["error"]["message"]
        del held


def test_600_half_sent_requests_do_not_stall_the_usual_server(server: GetServer) -> None:
    usual = server(*FLAGS)
    with connections(usual) as connect:
        held = [connect(half_a_body() if i % 2 else HEAD) for i in range(600)]
        assert max(health(usual) for _ in range(10)) < 8  # half a head stays for 10, half a body for 60
        del held
    assert usual.complete("a", n_predict=2)["tokens_predicted"] == 2


def predicted(url: str) -> int:
    """Return how many tokens a server has generated, those of requests that were given up among them."""
    metrics = requests.get(f"{url}/metrics", timeout=60).text
    (found,) = re.findall(r"^llamacpp:tokens_predicted_total (\d+)$", metrics, re.M)
    return int(found)


def test_a_reply_that_nobody_reads_ends(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", *ENDLESS, "--metrics", "--http-stall-time", "1")
    body = {"prompt": "a", "n_predict": 60_000, "ignore_eos": True, "stream": True, "n_probs": 200}
    data = json.dumps(body).encode()
    try:
        server.wait()
        with connections(server) as connect:
            connect(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)  # 20 kB a token
            slot: dict[str, Any] = {}

            def ended() -> bool:
                slot.update(server.get("/slots")[0])
                return "next_token" in slot and not slot["is_processing"]  # it had a request

            assert until(ended)
            assert 0 < predicted(server.url) < 50_000
    finally:
        server.close()


def test_a_large_head_gets_a_431(strict: Server) -> None:
    with connections(strict) as connect:
        status, error = answer(connect(HEAD + b"X-Large: " + b"a" * 17_000))
        assert status == 431
        assert "16 KiB" in str(error["message"])


@pytest.mark.parametrize("attempt", range(3))  # the handler of the signal deadlocked now and then
def test_the_end_waits_for_no_client(tmp_path: Path, attempt: int) -> None:
    patience = ("--http-head-time", "300", "--http-stall-time", "300")
    server = Server(tmp_path / f"log{attempt}", *ENDLESS, *patience)
    endless = {"prompt": "a", "n_predict": 60_000, "ignore_eos": True}
    with connections(server) as connect:
        try:
            server.wait()
            for stream in (True, False, False):
                data = json.dumps({**endless, "stream": stream}).encode()
                connect(HEAD + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            connect(half_a_body())
            connect(HEAD)
            assert until(lambda: server.get("/slots")[0]["is_processing"])
            time.sleep(1)  # and the others have come, if the machine is not busy
            begin = time.monotonic()
            server.process.terminate()
            assert server.process.wait(60) == 0
            assert time.monotonic() - begin < 20  # the replies take minutes
        finally:
            server.close()


@pytest.mark.parametrize(
    "flag", ["--http-connections", "--http-head-time", "--http-stall-time", "--http-body"]
)
def test_limits_of_limits_are_said(tmp_path: Path, flag: str) -> None:
    server = Server(tmp_path / "log", *FLAGS, flag, "0")
    try:
        assert server.process.wait(60) != 0
    finally:
        server.close()
    assert re.search(f'"{flag}"(?s:.*)found 0, expected ', server.words())


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process listens."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table in (Path(f"/proc/{pid}/net/tcp"), Path(f"/proc/{pid}/net/tcp6")):
        for fields in map(str.split, table.read_text("ascii").splitlines()[1:] if table.exists() else ()):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                digits, _, port = fields[1].partition(":")  # of words of 32 bits, in the machine's order
                words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                address = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                found.add((str(ipaddress.ip_address(address)), int(port, 16)))
    return found


@pytest.mark.parametrize(("flags", "address"), [([], "127.0.0.1"), (["--host", "0.0.0.0"], "0.0.0.0")])
def test_only_this_machine_is_served_unless_host_says_otherwise(flags: list[str], address: str) -> None:
    with serving(MODEL, *flags, stderr=subprocess.DEVNULL) as (url, process):
        ready(url, process)
        assert listening(process.pid) == {(address, urlsplit(url).port)}


def origin_of(server: Server, origin: str) -> str | None:
    reply = requests.options(f"{server.url}/completion", headers={"Origin": origin}, timeout=60)
    return reply.headers.get("Access-Control-Allow-Origin")


def test_without_a_key_pages_of_other_machines_get_no_answer(server: GetServer, tmp_path: Path) -> None:
    usual = server(*FLAGS)
    assert origin_of(usual, "http://localhost:3000") == "http://localhost:3000"
    assert origin_of(usual, "https://elsewhere.example") is None
    for flags in (("--api-key", "k"), ("--cors-origins", "*")):
        open_to_all = Server(tmp_path / flags[0], *FLAGS, *flags)
        try:
            open_to_all.wait()
            assert origin_of(open_to_all, "https://elsewhere.example") == "https://elsewhere.example"
        finally:
            open_to_all.close()
