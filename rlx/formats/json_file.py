"""JSON out of untrusted files: bounded in size, without repeated keys, or a FormatError."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from rlx.errors import FormatError, InputError
from rlx.support.files import open_regular


def read_object(path: str | os.PathLike[str], limit: int = 1 << 24) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes."""
    return parse_object(read_bounded(path, limit), os.fspath(path))


def read_list(path: str | os.PathLike[str], limit: int = 1 << 24) -> list[Any]:
    """The list in a JSON file of at most `limit` bytes."""
    value = _parse(read_bounded(path, limit), os.fspath(path))
    if not isinstance(value, list):
        raise FormatError("not a JSON list", where=os.fspath(path), got=type(value).__name__)
    return value


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object."""
    value = _parse(data, where)
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", where=where, got=type(value).__name__)
    return value


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a file; FormatError when it is larger than `limit`."""
    name = os.fspath(path)
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except FileNotFoundError as e:
        raise InputError("no such file", where=name) from e
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror or e}", where=name) from e
    if len(data) > limit:
        raise FormatError(
            "file too large",
            where=name,
            got=f"{os.path.getsize(path)} bytes",
            expected=f"at most {limit}",
        )
    return data


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise FormatError("JSON that nests too deep", where=where) from None
    except ValueError as e:  # bad UTF-8, bad JSON, a repeated key, a number beyond all bounds
        raise FormatError(f"not valid JSON: {e}"[:200], where=where) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} appears twice")
    return found
