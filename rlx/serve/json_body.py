"""Bodies of requests: JSON of a limited size, read in a limited time, checked field by field."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from rlx.serve.api_errors import ApiError, bad_request

_DEEPEST = 100  # nested lists and objects


async def read_json(request: Request, most: int, seconds: float) -> dict[str, Any]:
    """The object that a request carries; at most `most` bytes, within `seconds`."""
    return parse_object(await read_body(request, most, seconds))


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    body = bytearray()
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > most:
        raise _too_large(most)
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(499, "The client went away.") from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object; numbers that JSON does not have, and depth, are refused."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _not_json("it is not UTF-8") from None
    except ValueError as error:
        raise _not_json(str(error)) from None
    if not isinstance(found, dict):
        raise bad_request("The body must be a JSON object.")
    if _depth_above(found, _DEEPEST):
        raise _not_json("it is nested too deeply")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _not_json(why: str) -> ApiError:
    return bad_request(f"We could not parse the JSON body of your request: {why}.")


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is too large: at most {most} bytes.", code="body_too_large")


def _depth_above(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        below: list[Any] = []
        for one in level:
            inside = one.values() if isinstance(one, dict) else one
            below += [v for v in inside if isinstance(v, dict | list)]
        if not below:
            return False
        level = below
    return True


class Fields:
    """The fields of a body. Those that are not known are refused; null is as if not given."""

    def __init__(self, body: Mapping[str, Any], known: Collection[str], path: str = "") -> None:
        self._given = {name: value for name, value in body.items() if value is not None}
        self._path = path
        for name in body:
            if name not in known:
                shown = self._name(name)
                raise bad_request(f"Unknown parameter: '{shown}'.", shown, "unknown_parameter")

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def get(self, name: str) -> Any:
        return self._given.get(name)

    def _name(self, name: str) -> str:
        return f"{self._path}{name}"[:200]

    def refuse(self, name: str, why: str) -> None:
        """A field of the original interface that is not there: an error where it is given."""
        value = self._given.get(name)
        if value is not None and value is not False and value != []:
            raise bad_request(f"'{self._name(name)}' {why}", self._name(name), "unsupported_value")

    def wrong(self, name: str, expected: str) -> ApiError:
        got = self._given.get(name)
        kinds = {str: "a string", bool: "a boolean", int: "an integer", float: "a number",
                 list: "an array", dict: "an object"}  # fmt: skip
        kind = kinds.get(type(got), "null")
        if isinstance(got, int | float) and not isinstance(got, bool):
            kind = f"{got!r}"[:40]
        return bad_request(
            f"Invalid value for '{self._name(name)}': expected {expected}, but got {kind}.",
            self._name(name), "invalid_value",
        )  # fmt: skip

    def missing(self, name: str) -> ApiError:
        shown = self._name(name)
        return bad_request(
            f"Missing required parameter: '{shown}'.", shown, "missing_required_parameter"
        )

    def text(self, name: str, *, required: bool = False) -> str | None:
        value = self._given.get(name)
        if value is None:
            if required:
                raise self.missing(name)
            return None
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def needed_text(self, name: str) -> str:
        found = self.text(name, required=True)
        assert found is not None
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "a boolean")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._given.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        if not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def choice(self, name: str, options: Collection[str], default: str) -> str:
        value = self._given.get(name, default)
        if not isinstance(value, str) or value not in options:
            raise self.wrong(name, "one of " + ", ".join(f"'{o}'" for o in options))
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self._given.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return value

    def array(self, name: str, most: int) -> list[Any] | None:
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(name, f"an array of at most {most}")
        return value
