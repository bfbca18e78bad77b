"""JSON from files that are not trusted: objects without repeated keys, or a FormatError."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from rlx.errors import FormatError
from rlx.formats.mapped import read_bounded


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
    """The object that `data` spells."""
    value = _parse(data, where)
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", where=where, got=type(value).__name__)
    return value


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
