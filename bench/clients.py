"""Clients of a llama-server: good ones, whose replies are kept, and ones that misbehave beside them.

Everything runs in one event loop. A good client sends one request after the other as a stream; a bad one goes
away in mid-reply, sends nonsense, sends half a request, or reads slowly. Must not know: processes, rows.
Used by bench/server_load.py. Test: tests/server/test_load.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

PAUSE = 0.5  # seconds between two deeds of a bad client
SLOW = 0.2  # seconds that a slow reader takes for a piece
PATIENCE = 120.0  # seconds that a good client waits for a piece
NONSENSE: tuple[bytes, ...] = (
    b"",
    b"{",
    b"[1, 2",
    b"\xff\xfe\x00",
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[[[1]]]]}',
    b'{"prompt": "x", "n_predict": "many"}',
    b'{"prompt": "x", "grammar": "root ::= ("}',
    b'{"messages": "x"}',
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply as its client saw it."""

    request: int
    """Its place in the list of requests."""
    text: str
    n_tokens: int
    first: float
    """Seconds to the first piece of text."""
    seconds: float
    n_drafted: int
    n_accepted: int


@dataclass(slots=True)
class Seen:
    """What the clients of a turn saw."""

    replies: list[Reply] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    """Of good clients: each is a failure."""
    bad: Counter[str] = field(default_factory=Counter)
    """Deeds of the bad ones, and the statuses they got."""


async def pieces(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a streamed /completion. Errors: httpx.HTTPError, for statuses too."""
    async with client.stream("POST", "/completion", json={**body, "stream": True}) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


async def ask(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> Reply:
    """Send one request and wait for its end. Errors: httpx.HTTPError; ValueError for a reply without one."""
    begin, first, text = time.perf_counter(), 0.0, []
    async with aclosing(pieces(client, body)) as events:
        async for event in events:
            text.append(event.get("content", ""))
            first = first or time.perf_counter() - begin
            if event.get("stop"):
                timings = event["timings"]
                drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
                n_tokens, took = timings["predicted_n"], time.perf_counter() - begin
                return Reply(number, "".join(text), n_tokens, first, took, drafted, accepted)
    raise ValueError("a stream ended without a last event")


async def _good(
    client: httpx.AsyncClient, requests: Sequence[dict[str, Any]], draw: random.Random, end: float, seen: Seen
) -> None:
    while time.perf_counter() < end:
        number = draw.randrange(len(requests))
        try:
            seen.replies.append(await ask(client, number, requests[number]))
        except (httpx.HTTPError, ValueError, KeyError) as error:
            seen.errors[f"{type(error).__name__}: {error}"[:200]] += 1
            await asyncio.sleep(PAUSE)


async def _leaves(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> None:
    n = draw.randrange(6)
    async with aclosing(pieces(client, body)) as events:
        async for _ in events:
            if (n := n - 1) < 0:
                return


async def _reads_slowly(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> None:
    n = draw.randrange(4, 10)
    async with aclosing(pieces(client, {**body, "n_predict": 16})) as events:
        async for _ in events:
            await asyncio.sleep(SLOW)
            if (n := n - 1) < 0:
                return


async def _sends_half(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> None:
    """Open a connection, announce more than is sent, and leave later."""
    data = json.dumps(body).encode()
    fields = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}")
    whole = "\r\n".join(("POST /completion HTTP/1.1", *fields, "", "")).encode() + data
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(whole[: draw.randrange(1, len(whole))])
    await writer.drain()
    await asyncio.sleep(2 * PAUSE)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _sends_nonsense(client: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> int:
    data = draw.choice(NONSENSE)
    path = draw.choice(("/completion", "/v1/chat/completions", "/v1/completions"))
    reply = await client.post(path, content=data, headers={"Content-Type": "application/json"})
    return reply.status_code


_DEEDS = {
    "leaves": _leaves,
    "reads slowly": _reads_slowly,
    "sends half": _sends_half,
    "nonsense": _sends_nonsense,
}


async def _bad(
    name: str,
    client: httpx.AsyncClient,
    requests: Sequence[dict[str, Any]],
    draw: random.Random,
    end: float,
    seen: Seen,
) -> None:
    while time.perf_counter() < end:
        try:
            status = await _DEEDS[name](client, draw.choice(requests), draw)
            seen.bad[name if status is None else f"{name}: {status}"] += 1
        except (httpx.HTTPError, OSError) as error:
            seen.bad[f"{name}: {type(error).__name__}"] += 1
        await asyncio.sleep(PAUSE)


async def _turn(
    url: str, requests: Sequence[dict[str, Any]], n_clients: int, n_bad: int, seconds: float, seed: int
) -> Seen:
    seen, end = Seen(), time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        good = [_good(client, requests, random.Random(f"{seed} {i}"), end, seen) for i in range(n_clients)]
        bad = [
            _bad(name, client, requests, random.Random(f"{seed} {name}"), end, seen)
            for name in list(_DEEDS)[:n_bad]
        ]
        await asyncio.gather(*good, *bad)
    return seen


def turn(
    url: str,
    requests: Sequence[dict[str, Any]],
    *,
    n_clients: int,
    seconds: float,
    n_bad: int = 0,
    seed: int = 0,
) -> Seen:
    """Let clients work for so long, and wait for the replies that are under way.

    n_bad: how many of the ways to misbehave have a client, 4 at most.
    """
    return asyncio.run(_turn(url, requests, n_clients, n_bad, seconds, seed))


def alone(url: str, requests: Sequence[dict[str, Any]]) -> list[Reply]:
    """Return the reply to each request, sent one after the other. Errors: as of `ask`."""

    async def each() -> list[Reply]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            return [await ask(client, i, body) for i, body in enumerate(requests)]

    return asyncio.run(each())
