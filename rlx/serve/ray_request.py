"""A request on its way from the front of a Ray application to a replica."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from starlette.types import Scope

from rlx.serve.api_errors import ApiError
from rlx.serve.json_body import parse_object
from rlx.serve.prefix_keys import prefix_keys
from rlx.support.records import dataclass

_CARRIED = ("type", "http_version", "method", "query_string", "headers", "scheme", "client",
            "server")  # fmt: skip
_RESPONSE = re.compile(r"resp_([0-9a-f]{8})_")


@dataclass(frozen=True)
class RoutedRequest:
    """An HTTP request, the prefixes that it begins with, and the replica that it must have."""

    scope: Mapping[str, Any]
    body: bytes
    prefixes: list[bytes] = field(default_factory=list)
    home: str = ""

    @staticmethod
    def of(scope: Scope, body: bytes) -> RoutedRequest:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) or "/"
        carried = {name: scope[name] for name in _CARRIED if name in scope}
        carried |= {"path": path, "raw_path": path.encode(), "root_path": "", "asgi": {}}
        named = path.rpartition("/")[2] if path.startswith("/v1/responses/") else ""
        if path == "/v1/responses" and b"previous_response_id" in body:
            named = _earlier(body)
        found = _RESPONSE.match(named)
        home = found[1] if found else ""
        return RoutedRequest(carried, body, prefix_keys(body), home)


def _earlier(body: bytes) -> str:
    try:
        return str(parse_object(body).get("previous_response_id"))
    except ApiError:
        return ""
