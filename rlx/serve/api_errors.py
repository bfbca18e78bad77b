"""Errors as clients see them: a status, and JSON in the shape of the interface they speak."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from rlx.errors import InputError, OptionError, OutOfMemoryError, RlxError, UnsupportedError

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
          408: "timeout_error", 429: "rate_limit_error", 499: "cancelled", 500: "server_error",
          503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
_BUSY = {"QueueFullError": (429, "queue_full"), "EngineClosedError": (503, "shutting_down")}


class ApiError(Exception):
    """What is wrong with a request, or with the server."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """Any error as one of the interface. Faults of our own say nothing about the inside."""
    if isinstance(error, ApiError):
        return error
    for kind in type(error).__mro__:
        if kind.__name__ in _BUSY:
            status, code = _BUSY[kind.__name__]
            seconds = max(1, round(getattr(error, "retry_after", 1) or 1))
            return ApiError(status, shown(error), code=code, headers={"Retry-After": str(seconds)})
    if isinstance(error, OutOfMemoryError | MemoryError):
        return ApiError(503, "The server has not enough memory for this now.", code="out_of_memory")
    if isinstance(error, InputError | OptionError | UnsupportedError):
        param = error.where if isinstance(error, OptionError) and error.where else None
        return bad_request(shown(error), param, "invalid_value")
    return ApiError(500, "The server failed to answer; its log says why.", code="internal_error")


def shown(error: BaseException) -> str:
    """The message of an error, without paths of the server."""
    if not isinstance(error, RlxError):
        return str(error)
    where = "" if os.sep in error.where or not error.where else f"{error.where}: "
    parts = [where + error.what]
    parts += [f"got {error.got}"] if error.got is not None else []
    parts += [f"expected {error.expected}"] if error.expected is not None else []
    return "; ".join(parts)[:2000]


def openai_shape(error: ApiError) -> dict[str, Any]:
    told = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return {"error": told}


SHAPES: dict[str, Callable[[ApiError], dict[str, Any]]] = {}
"""Other shapes of errors, by the path of the interface."""


def shaped(error: ApiError, path: str) -> dict[str, Any]:
    return SHAPES.get(path, openai_shape)(error)


def error_response(error: ApiError, path: str) -> Response:
    body = json.dumps(shaped(error, path)).encode()
    headers = dict(error.headers)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, error.status, headers, media_type="application/json")
