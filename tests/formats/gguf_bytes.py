"""GGUF files spelled out byte by byte, so that tests can make any of them wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

STRING, ARRAY = 8, 9
LAYOUT = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: object) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload(kind, value)


def payload(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return string(value)
    return struct.pack("<" + LAYOUT[kind], value)


def array(key: str, kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    body = b"".join(payload(kind, v) for v in values)
    size = len(values) if count is None else count
    return string(key) + struct.pack("<IIQ", ARRAY, kind, size) + body


def raw_pair(key: str, raw: bytes) -> bytes:
    """A key and whatever stands for its type and value."""
    return string(key) + raw


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """Dimensions in the order of the file: the contiguous one first."""
    head = string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", kind, offset)


def document(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pair_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
