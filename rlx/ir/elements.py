"""The bytes of constants: little-endian on every machine, every bit kept."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from rlx.ir.shape import Shape


def to_bytes(array: Any) -> bytes:
    return bytes((array if sys.byteorder == "little" else array.byteswap()).tobytes())


def from_bytes(data: bytes | memoryview, shape: Shape) -> Any:
    """The array of `shape` with these bytes; ValueError when they do not fit it."""
    dims = shape.static_dims
    wanted = prod(dims) * shape.dtype.bytes
    if len(data) != wanted:
        raise ValueError(f"{len(data)} bytes where {shape} has {wanted}")
    array = np.frombuffer(data, dtype=shape.dtype.numpy)
    if shape.dtype.kind == "bool" and array.view(np.uint8).max(initial=0) > 1:
        raise ValueError("a bool that is neither 0 nor 1")
    return (array if sys.byteorder == "little" else array.byteswap()).reshape(dims)
