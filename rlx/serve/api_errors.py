"""Errors as clients see them: a status, and JSON in the shape of the interface they speak."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from rlx.errors import (
    EngineClosedError,
    InputError,
    OptionError,
    QueueFullError,
    RlxError,
    UnsupportedError,
)

_KINDS = {408: "timeout_error", 429: "rate_limit_error", 499: "cancelled", 500: "server_error",
          503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


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
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
        return ApiError(429, shown(error), code="queue_full", headers=wait)
    if isinstance(error, EngineClosedError):
        wait = {"Retry-After": "1"}
        return ApiError(503, "The model is being unloaded.", code="shutting_down", headers=wait)
    if isinstance(error, MemoryError):
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
