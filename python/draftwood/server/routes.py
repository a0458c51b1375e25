"""The endpoints that take upstream's place: completions and chats, whole and in streams; the list of models.

One generation runs at a time, as upstream's locks have it. `correct` puts the endpoints in.
Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException as AnyHTTPException

from draftwood.server.failures import handler_of, outside_of_routes, reply_to
from draftwood.server.replies import Chunks, joined
from draftwood.server.requests import ChatRequest, CompletionRequest, calls_of
from draftwood.server.stream import Emit, Stream

Body = CompletionRequest | ChatRequest
_COPILOT = "copilot-codex"


def correct(app: Any) -> None:
    """Correct upstream's app module. Errors: RuntimeError where it has not the routes that are replaced."""
    app.RouteErrorHandler.get_route_handler = handler_of
    server = _Endpoints(app)
    replaced: dict[str, Callable[..., Any]] = {
        "create_completion": server.complete,
        "create_chat_completion": server.chat,
        "get_models": server.models,
    }
    routes: list[APIRoute] = app.router.routes
    for place, route in enumerate(routes):
        endpoint = replaced.get(route.endpoint.__name__)
        if endpoint is not None:
            routes[place] = _with_endpoint(app, route, endpoint)
    for name, endpoint in replaced.items():
        if endpoint not in [route.endpoint for route in routes]:
            raise RuntimeError(
                f"found no route of {name} in {app.__file__}; expected llama-cpp-python's server"
            )
        setattr(app, name, endpoint)
    app.create_app = _saying_why(app.create_app)


def _with_endpoint(app: Any, route: APIRoute, endpoint: Callable[..., Any]) -> APIRoute:
    made: APIRoute = app.RouteErrorHandler(
        route.path,
        endpoint,
        methods=route.methods,
        summary=route.summary,
        dependencies=route.dependencies,
        response_model=route.response_model,
        responses=route.responses,
        tags=route.tags,
        include_in_schema=route.include_in_schema,
    )
    return made


def _saying_why(create_app: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_app)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = create_app(*args, **kwargs)
        made.add_exception_handler(AnyHTTPException, outside_of_routes)
        return made

    return wrapped


class _Endpoints:
    """Answers requests with the model, the settings and the locks of upstream's app module."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._proxy = contextlib.asynccontextmanager(app.get_llama_proxy)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        model = _COPILOT if f"/{_COPILOT}/" in request.url.path else body.model
        return await self._answer(request, body, model, self._app.llama_cpp.Llama.__call__)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self._answer(request, body, body.model, self._app.llama_cpp.Llama.create_chat_completion)

    async def models(self) -> Any:
        """List the models. It waits for no generation and cuts no stream off, unlike upstream's."""
        entry = {"object": "model", "owned_by": "me", "permissions": []}
        data = [{"id": alias, **entry} for alias in self._app._llama_proxy]
        return {"object": "list", "data": data}

    async def _answer(
        self, request: Request, body: Body, model: str | None, call: Callable[..., Any]
    ) -> Response:
        request.state.body = body
        if body.stream:
            produce = functools.partial(self._produce, body, model, call)
            return Stream(produce, lambda error: reply_to(error, body), self._app._ping_message_factory)
        replies = []
        async with self._proxy() as proxy:
            for arguments in calls_of(body):
                if await request.is_disconnected():
                    raise HTTPException(400, "Client closed request")
                llama = self._app.prepare_request_resources(body, proxy, model, arguments)
                replies.append(await run_in_threadpool(call, llama, **arguments))
        return JSONResponse(joined(replies, body.n or 1))

    async def _produce(self, body: Body, model: str | None, call: Callable[..., Any], emit: Emit) -> None:
        """Emit the chunks of all choices. If the settings say so, a request that waits cuts them off."""
        settings = next(self._app.get_server_settings())
        chunks, calls, usages = Chunks(with_usage=body.wants_usage), calls_of(body), []
        async with self._proxy() as proxy:
            for index, arguments in enumerate(calls):
                llama = self._app.prepare_request_resources(body, proxy, model, arguments)
                whole = await self._emit_choice(
                    await run_in_threadpool(call, llama, **arguments),
                    functools.partial(_emit_as, index, chunks, emit),
                    lambda: settings.interrupt_requests and self._app.llama_outer_lock.locked(),
                )
                usages.append(llama.last_usage)
                if not whole:
                    for end in chunks.ends(len(calls)):
                        await emit(end)
                    break
        if body.wants_usage and None not in usages:
            await emit(chunks.usage(usages, body.n or 1))

    async def _emit_choice(self, steps: Any, emit: Emit, is_unwanted: Callable[[], bool]) -> bool:
        """Emit a generation's chunks; False: it was cut off before its last."""
        with contextlib.closing(steps):
            async for chunk in iterate_in_threadpool(steps):
                await emit(chunk)
                if is_unwanted():
                    return False
        return True


async def _emit_as(index: int, chunks: Chunks, emit: Emit, chunk: dict[str, Any]) -> None:
    await emit(chunks.of(chunk, index))
