"""Errors as OpenAI's clients read them: a status, and `{"error": {message, type, param, code}}`.

Test: tests/model/test_openai_server.py.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from draftwood._llama_cpp.server import errors
from draftwood.errors import DraftwoodError, ModelFileError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
_SHOWN = 3  # wrong fields of a request


def reply_to(error: Exception, body: Any = None) -> JSONResponse:
    """Return what the client gets for an error in the answer to `body`; unforeseen ones are printed, too."""
    if isinstance(error, HTTPException):
        kind = "authentication_error" if error.status_code == 401 else "invalid_request_error"
        return _reply(error.status_code, str(error.detail), kind, headers=error.headers)
    if isinstance(error, RequestValidationError):
        found = error.errors()
        wrong = [(".".join(map(str, each["loc"][1:])) or "body", each["msg"]) for each in found]
        if found[0]["type"] == "json_invalid":  # its place is a number of bytes
            return _reply(400, f"body: {wrong[0][1]}", "invalid_request_error")
        words = "; ".join(f"{place}: {message}" for place, message in wrong[:_SHOWN])
        return _reply(400, words, "invalid_request_error", param=wrong[0][0].partition(".")[0])
    for pattern, formatter in errors.RouteErrorHandler.pattern_and_formatters.items():
        if body is not None and (match := pattern.search(str(error))):
            status, words = formatter(body, match)
            return JSONResponse({"error": words}, status)
    if isinstance(error, ValueError) and not isinstance(error, ModelFileError):
        return _reply(400, str(error), "invalid_request_error")
    if not isinstance(error, DraftwoodError):
        traceback.print_exception(error)
    return _reply(500, str(error) or type(error).__name__, "internal_server_error")


def handler_of(route: APIRoute) -> Handler:
    """Return the handler of a route: every error is a reply. The endpoint leaves the body in the state."""
    answer = APIRoute.get_route_handler(route)

    async def answer_or_say_why(request: Request) -> Response:
        began = time.perf_counter()
        try:
            response = await answer(request)
        except Exception as error:
            response = reply_to(error, getattr(request.state, "body", None))
        response.headers["openai-processing-ms"] = str(int((time.perf_counter() - began) * 1000))
        return response

    return answer_or_say_why


async def outside_of_routes(_: Request, error: Exception) -> Response:
    """Answer a request that no route takes."""
    return reply_to(error)


def _reply(
    status: int, message: str, kind: str, param: str | None = None, headers: Any = None
) -> JSONResponse:
    words = {"message": message, "type": kind, "param": param, "code": None}
    return JSONResponse({"error": words}, status, headers=headers)
