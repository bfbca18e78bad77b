"""Cache keys: content hashes, computed here and nowhere else.

A key is the SHA-256 of a tagged, length-prefixed encoding. Different contents have different
encodings, and equal contents the same one in every process, machine and Python version.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from rlx.errors import OptionError


@runtime_checkable
class Keyed(Protocol):
    """An object that lists what its key depends on."""

    def key_material(self) -> Mapping[str, object]: ...


def encode(value: object) -> bytes:
    """Encode as tag, length, contents. 1, 1.0, True and "1" differ; mappings are sorted."""
    if value is None:
        return b"n"
    if value is True or value is False:
        return b"t" if value else b"f"
    if isinstance(value, int):
        return _framed(b"i", str(value).encode())
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return _framed(b"s", value.encode())
    if isinstance(value, bytes):
        return _framed(b"b", value)
    if isinstance(value, (tuple, list)):
        return _framed(b"l", b"".join(map(encode, value)))
    if isinstance(value, (set, frozenset)):
        return _framed(b"u", b"".join(sorted(map(encode, value))))
    if isinstance(value, Mapping):
        items = sorted((encode(k), encode(v)) for k, v in value.items())
        return _framed(b"m", b"".join(k + v for k, v in items))
    if isinstance(value, Keyed):
        name = type(value).__name__
        return _framed(b"k", encode(name) + encode(value.key_material()))
    raise OptionError("cannot be part of a key", got=f"{value!r} ({type(value).__name__})")


def _framed(tag: bytes, contents: bytes) -> bytes:
    return tag + str(len(contents)).encode() + b":" + contents


def make_key(kind: str, material: object) -> str:
    """The SHA-256 of `kind` and `material`, as 64 hex digits."""
    return hashlib.sha256(encode(("rlx", kind, material))).hexdigest()
