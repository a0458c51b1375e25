"""Server-sent events of which the first decides on the status.

An error before the first event is a JSON reply with its own status. A first event that takes long is not
waited for: the stream then begins, with pings, and an error is an event. Must not know: models.
Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from fastapi import Response
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

Emit = Callable[[dict[str, Any]], Awaitable[None]]
PATIENCE = 10.0
"""Seconds that the first event is waited for; pings come every 15."""
_AHEAD = 10  # events that wait for a client that reads slowly, as upstream
_DONE = "[DONE]"


class Stream(Response):
    """The events that `produce` hands to its argument, then [DONE]; cancelled when the client leaves."""

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        failed: Callable[[Exception], Response],
        ping: Callable[[], Any] | None,
    ) -> None:
        super().__init__()
        self._produce, self._failed, self._ping = produce, failed, ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        into, events = anyio.create_memory_object_stream[Any](_AHEAD)
        async with events, anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, into)
            first = None
            with anyio.move_on_after(PATIENCE):
                first = await events.receive()
            if isinstance(first, Exception):
                response = self._failed(first)
            else:
                response = EventSourceResponse(
                    self._texts(first, events), sep="\n", ping_message_factory=self._ping
                )
            await response(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _run(self, into: MemoryObjectSendStream[Any]) -> None:
        async with into:
            try:
                await self._produce(into.send)
                await into.send(_DONE)
            except Exception as error:
                await into.send(error)

    async def _texts(
        self, first: Any, events: MemoryObjectReceiveStream[Any]
    ) -> AsyncIterator[dict[str, str]]:
        if first is not None:
            yield self._text(first)
        async for event in events:
            yield self._text(event)

    def _text(self, event: Any) -> dict[str, str]:
        if isinstance(event, Exception):
            return {"data": bytes(self._failed(event).body).decode()}
        return {"data": event if event == _DONE else json.dumps(event)}
