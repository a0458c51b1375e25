"""What clients do wrong, again and again: no file, thread or memory stays behind; and clients that leave."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
import requests

from tests.model.processes import ready, serving
from tests.server.process import MODEL
from tests.server.test_limits import HEAD, half_a_body, predicted, until

TIMES = 150
MOST_OPEN = 200  # more than TIMES, and an eighth of them is kept for requests without a body
FLAGS = ("-np", "2", "-no-kvu", "--metrics", "-cram", "0")  # texts that are kept for later are no leak
MOST_GROWTH = TIMES << 10  # bytes of a round: 1 KiB a time
MOST_ROUNDS = 10  # what is kept for the next round grows less each time, a leak does not
LIMITS = ("--http-connections", str(MOST_OPEN), "--http-head-time", "1", "--http-body", "1")
# nearly all of tiny-moe's context: seconds, and llama-server asks after one whether a client is still there
LONG = {"prompt": "Once upon a time", "n_predict": 4000, "ignore_eos": True}


class Served(NamedTuple):
    """A `draftwood serve` that drafts as it does by default."""

    url: str
    process: subprocess.Popen[str]

    def connect(self, data: bytes = b"", *, half_close: bool = False) -> socket.socket:
        address = urlsplit(self.url)
        made = socket.create_connection((address.hostname, address.port), timeout=60)
        made.sendall(data)
        if half_close:
            made.shutdown(socket.SHUT_WR)
        return made

    def held(self) -> list[int]:
        """Return how many files and threads it has."""
        return [len(list(Path(f"/proc/{self.process.pid}/{name}").iterdir())) for name in ("fd", "task")]

    def memory(self) -> int:
        """Return its resident size in bytes."""
        with open(f"/proc/{self.process.pid}/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    def idle(self) -> bool:
        slots = requests.get(f"{self.url}/slots", timeout=60).json()
        return not any(slot["is_processing"] for slot in slots)

    def text(self) -> str:
        body = {"prompt": "Once upon a time", "n_predict": 48, "temperature": 0, "cache_prompt": False}
        reply = requests.post(f"{self.url}/completion", json=body, timeout=60).json()
        assert reply["tokens_predicted"] > 1
        return str(reply["content"])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(MODEL, *FLAGS, *LIMITS, n_ctx=8192, stderr=subprocess.DEVNULL) as (address, process):
        ready(address, process)
        yield Served(address, process)


def request(path: str, body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def rest(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def status(reply: bytes) -> int:
    """Return the status of a reply, 0 where there is none."""
    return int(reply.split(maxsplit=2)[1]) if reply else 0


# ---- leaks ----

Abuse = Callable[[Served], set[int]]  # returns the statuses of all replies


def one_by_one(data: bytes, *, half_close: bool = False) -> Abuse:
    def abuse(served: Served) -> set[int]:
        found = set()
        for _ in range(TIMES):
            with served.connect(data, half_close=half_close) as made:
                found.add(status(rest(made)))
        return found

    return abuse


def at_once(data: bytes, *, half_close: bool = False, more: int = 0) -> Abuse:
    """All stay open until the server has ended the last of them."""

    def abuse(served: Served) -> set[int]:
        with ExitStack() as stack:
            made = [
                stack.enter_context(served.connect(data, half_close=half_close)) for _ in range(TIMES + more)
            ]
            return {status(rest(each)) for each in made}

    return abuse


def leave_a_stream(served: Served) -> set[int]:
    found = set()
    for _ in range(TIMES):
        with served.connect(request("/completion", {**LONG, "stream": True})) as made:
            found.add(status(made.recv(400)))
    return found


def leave_before_the_reply(served: Served) -> set[int]:
    for _ in range(TIMES):
        served.connect(request("/completion", LONG)).close()
    return {0}


def completion(body: bytes) -> bytes:
    return request("/completion", b'{"n_predict": 2, "prompt": ' + body)


ABUSES: dict[str, tuple[Abuse, set[int]]] = {
    "long head": (one_by_one(HEAD + b"X-Large: " + b"a" * 17_000), {431}),
    "stalled head": (at_once(HEAD), {408}),
    # of those that wait for their head, the oldest makes room
    "too many": (at_once(HEAD, more=MOST_OPEN), {408, 429}),
    "large body": (one_by_one(completion(b'"' + b"a" * (1 << 20) + b'"}')), {413}),
    "nested": (one_by_one(completion(b"[" * 100_000 + b"]" * 100_000 + b"}")), {400}),
    "no JSON": (one_by_one(completion(b'"a')), {400}),
    "nothing, half-closed": (one_by_one(b"", half_close=True), {0}),
    "half a head, half-closed": (at_once(HEAD, half_close=True), {408}),
    "half a body, half-closed": (one_by_one(half_a_body(), half_close=True), {400}),
    # 400 where the reply took more than a second
    "a request, half-closed": (one_by_one(completion(b'"a"}'), half_close=True), {200, 400}),
    "left in a stream": (leave_a_stream, {200}),
    "left before the reply": (leave_before_the_reply, {0}),
}


def settled(served: Served) -> list[int]:
    """Return the files and threads that it holds when nothing has changed for a while."""
    found, since = served.held(), time.monotonic()
    while time.monotonic() - since < 0.3:  # the end of a connection takes up to 0.1
        if (now := served.held()) != found:
            found, since = now, time.monotonic()
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("name", ABUSES)
def test_nothing_stays_behind(served: Served, name: str) -> None:
    abuse, expected = ABUSES[name]
    text = served.text()
    held, growths = settled(served), []
    for _ in range(MOST_ROUNDS):
        memory = served.memory()
        seen = abuse(served)
        assert seen, name
        assert seen <= expected
        assert until(lambda: settled(served) == held), served.held()
        assert until(served.idle)
        growths.append(served.memory() - memory)
        if min(growths) < MOST_GROWTH:
            break
    assert min(growths) < MOST_GROWTH
    assert served.text() == text


# ---- half-closed connections ----
# RFC 9112, section 9.6: who half-closes a connection may still want the reply. llama-server takes it for
# gone. The tests say what it does: a reply that is ready at once, or words.


def answered(served: Served, data: bytes, *, half_close: bool) -> tuple[bytes, bytes]:
    """Return the head and the body of a reply."""
    with served.connect(data, half_close=half_close) as made:
        head, _, body = rest(made).partition(b"\r\n\r\n")
        return head, body


def test_a_half_closed_client_gets_what_is_there_at_once(served: Served) -> None:
    body = {"prompt": "a", "n_predict": 2, "temperature": 0, "cache_prompt": False}
    replies = [
        answered(served, request("/completion", body), half_close=half_close) for half_close in (False, True)
    ]
    whole, half = (json.loads(body) for _, body in replies)
    assert half["content"] == whole["content"]
    assert half["tokens_predicted"] == 2
    head, health = answered(served, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", half_close=True)
    assert (status(head), json.loads(health)) == (200, {"status": "ok"})


def test_a_half_closed_client_is_told_of_a_reply_that_takes_longer(served: Served) -> None:
    """llama-server alone sends an empty 200, which looks like success."""
    begin = time.monotonic()
    head, body = answered(served, request("/completion", LONG), half_close=True)
    assert time.monotonic() - begin > 0.9
    assert status(head) == 400
    assert f"Content-Length: {len(body)}".encode() in head
    assert head.lower().count(b"content-length") == 1
    assert "ended its part of the connection" in json.loads(body)["error"]["message"]
    assert until(served.idle)


def test_a_half_closed_client_gets_no_end_of_a_stream(served: Served) -> None:
    """Events may come before the server hears that the client has ended its part."""
    before = predicted(served.url)
    stream = {**LONG, "stream": True}
    head, body = answered(served, request("/completion", stream), half_close=True)
    assert status(head) == 200
    assert b"chunked" in head
    assert not body.endswith(b"0\r\n\r\n")
    assert until(served.idle)
    assert predicted(served.url) - before < LONG["n_predict"]


# ---- clients that leave ----
# A counted token shows that a request has begun: it may end between two looks at the slots.


def test_a_request_ends_when_its_client_leaves(served: Served) -> None:
    before, held = predicted(served.url), settled(served)
    served.connect(request("/completion", LONG)).close()
    assert until(lambda: predicted(served.url) > before)
    assert until(lambda: served.held() == held)
    assert predicted(served.url) - before < LONG["n_predict"]


# llama-server asks whether a client is there when no result, whosever it is, has come for a second
def test_prompts_of_a_request_end_when_its_client_leaves(served: Served) -> None:
    """Each is done in less than the second after which a wait asks for the client."""
    before = predicted(served.url)
    many = {"prompt": [[1, 2, 3]] * 2000, "n_predict": 8, "ignore_eos": True, "cache_prompt": False}
    served.connect(request("/completion", many)).close()
    assert until(lambda: predicted(served.url) > before)
    assert until(served.idle)
    assert predicted(served.url) - before < 2000 * 8 / 2


def test_a_request_ends_when_its_client_leaves_while_others_ask(served: Served) -> None:
    before = predicted(served.url)
    served.connect(request("/completion", LONG)).close()
    assert until(lambda: predicted(served.url) > before)
    assert until(served.idle)
    assert predicted(served.url) - before < LONG["n_predict"]
