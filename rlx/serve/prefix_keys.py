"""Where a prompt begins like another: hashes of ever longer prefixes of what a request asks.

A replica that answered a request has its prefix in the KV cache. Tokens are not known before a
request has a replica, so that prefixes are compared as text, in blocks of about a page of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

_BLOCK, _MOST_BLOCKS = 96, 512
_FIRST = ("model", "tools", "system", "instructions")
_REST = ("messages", "prompt", "input")


def prefix_keys(body: bytes) -> list[bytes]:
    """A key for each prefix, the longest last. Requests with a key in common begin alike up to
    there. None of what is no JSON object; whoever answers it says what is wrong."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    keys: list[bytes] = []
    last, text, length = b"", "", 0
    for piece in _pieces(asked):
        text += piece
        while len(text) >= _BLOCK and len(keys) < _MOST_BLOCKS:
            last = _chained(last, text[:_BLOCK])
            keys.append(last)
            text = text[_BLOCK:]
        length += len(piece)
        if length > _BLOCK * _MOST_BLOCKS:
            return keys
    return [*keys, _chained(last, text)] if text else keys


def _pieces(asked: dict[str, Any]) -> Iterator[str]:
    """What becomes the prompt, in order."""
    yield "".join(json.dumps(asked.get(name)) for name in _FIRST if asked.get(name) is not None)
    for name in _REST:
        given = asked.get(name)
        if isinstance(given, list):
            yield from (json.dumps(one) for one in given)
        elif isinstance(given, str):
            yield given


def _chained(last: bytes, text: str) -> bytes:
    return blake2b(last + text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
