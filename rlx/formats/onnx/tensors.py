"""Tensors of ONNX files: constants inside the file, and external data mapped into memory.

What a tensor claims is checked against the bytes there are before anything is allocated. External
data must lie in the model's folder, whatever links say.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlx.errors import FormatError
from rlx.formats.tensor_file import MappedFile

Array = np.ndarray[Any, Any]

# ONNX's number, its name, the NumPy type of an element, elements in a byte
_TYPES: list[tuple[int, str, Any, int]] = [
    (1, "float", np.float32, 1),
    (2, "uint8", np.uint8, 1),
    (3, "int8", np.int8, 1),
    (4, "uint16", np.uint16, 1),
    (5, "int16", np.int16, 1),
    (6, "int32", np.int32, 1),
    (7, "int64", np.int64, 1),
    (8, "string", np.object_, 1),
    (9, "bool", np.bool_, 1),
    (10, "float16", np.float16, 1),
    (11, "double", np.float64, 1),
    (12, "uint32", np.uint32, 1),
    (13, "uint64", np.uint64, 1),
    (14, "complex64", np.complex64, 1),
    (15, "complex128", np.complex128, 1),
    (16, "bfloat16", ml_dtypes.bfloat16, 1),
    (17, "float8e4m3fn", ml_dtypes.float8_e4m3fn, 1),
    (18, "float8e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 1),
    (19, "float8e5m2", ml_dtypes.float8_e5m2, 1),
    (20, "float8e5m2fnuz", ml_dtypes.float8_e5m2fnuz, 1),
    (21, "uint4", ml_dtypes.uint4, 2),
    (22, "int4", ml_dtypes.int4, 2),
    (23, "float4e2m1", ml_dtypes.float4_e2m1fn, 2),
    (24, "float8e8m0", ml_dtypes.float8_e8m0fnu, 1),
    (25, "uint2", ml_dtypes.uint2, 4),
    (26, "int2", ml_dtypes.int2, 4),
]
TYPE_NAMES = {number: name for number, name, _, _ in _TYPES}
NUMPY_TYPES = {number: np.dtype(numpy) for number, _, numpy, _ in _TYPES}
NUMPY_BY_NAME = {name: np.dtype(numpy) for _, name, numpy, _ in _TYPES}
_PACKED = {number: per for number, _, _, per in _TYPES}

# the field that holds elements of a type, where there are no raw bytes
_FIELDS = {
    1: "float_data", 7: "int64_data", 8: "string_data", 11: "double_data", 12: "uint64_data",
    13: "uint64_data", 14: "float_data", 15: "double_data",
}  # fmt: skip
MAX_RANK = 64


def text_of(name: str | bytes) -> str:
    """A name; protobuf gives one that is no UTF-8 as bytes."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


class ExternalFiles:
    """The files beside a model that hold its large tensors, each mapped once."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._files: dict[Path, MappedFile] = {}

    def bytes_of(self, name: str, entries: dict[str, str]) -> Array:
        location = entries.get("location", "")
        path = self._confined(name, location)
        if path not in self._files:
            self._files[path] = MappedFile(path)
        file = self._files[path]
        offset = _number(name, "offset", entries.get("offset", "0"))
        length = _number(name, "length", entries.get("length", str(file.size - offset)))
        if offset + length > file.size:
            raise FormatError(
                "external data past the end of its file", where=name,
                got=f"bytes {offset} … {offset + length}", expected=f"within {file.size} bytes",
            )  # fmt: skip
        return np.frombuffer(file.data, np.uint8, length, offset)

    def _confined(self, name: str, location: str) -> Path:
        if self.folder is None:
            raise FormatError(
                "external data of a model that is not a file", where=name, got=location,
                hint="give the path of the model",
            )  # fmt: skip
        inside = self.folder.resolve()
        try:
            path = (inside / location).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise FormatError(
                "external data cannot be opened", where=name, got=f"{location!r:.200}"
            ) from error
        if not location or os.path.isabs(location) or not path.is_relative_to(inside):
            raise FormatError(
                "external data outside the model's folder", where=name, got=f"{location!r:.200}",
                expected="a path relative to the folder, and in it",
            )  # fmt: skip
        return path


def _number(name: str, field: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise FormatError(f"not a number: {field}", where=name, got=f"{text!r:.60}")
    return int(text)


class Initializer:
    """A constant of the file. `array()` reads it; large ones stay where they are, not copied."""

    __slots__ = ("_array", "_files", "_proto", "dtype", "name", "reading", "shape", "type_name")

    def __init__(self, proto: Any, files: ExternalFiles) -> None:
        self._proto, self._files = proto, files
        self.reading: Any = None  # what a user of the file made of it
        self.name = text_of(proto.name)
        if proto.data_type not in NUMPY_TYPES:
            raise FormatError(
                "unknown element type of a tensor", where=self.name, got=proto.data_type,
                expected=f"1 … {max(NUMPY_TYPES)}",
            )  # fmt: skip
        self.dtype, self.type_name = NUMPY_TYPES[proto.data_type], TYPE_NAMES[proto.data_type]
        self.shape: tuple[int, ...] = tuple(proto.dims)
        if len(self.shape) > MAX_RANK or any(d < 0 for d in self.shape):
            raise FormatError(
                "not the shape of a tensor", where=self.name, got=f"{list(self.shape)!s:.200}"
            )
        self._array: Array | None = None
        if proto.data_location == 1:  # mapped now, so that a missing file is an error of the load
            self._array = self._from_bytes(self._external())
            self._proto = None
        elif self._stored() != self.size:
            raise FormatError(
                "a tensor's elements do not fit its shape", where=self.name,
                got=f"{self._stored()} elements", expected=f"{list(self.shape)}",
            )  # fmt: skip

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def _bytes(self, number: int) -> int:
        """The bytes that all elements take."""
        per = _PACKED[number]
        return -(-self.size // per) if per > 1 else self.size * self.dtype.itemsize

    def _stored(self) -> int:
        """How many elements the file has: the size of the shape, if raw bytes are as many."""
        proto = self._proto
        if proto.raw_data:
            if proto.data_type == 8:
                return -1
            return self.size if len(proto.raw_data) == self._bytes(proto.data_type) else -1
        stored = len(getattr(proto, _FIELDS.get(proto.data_type, "int32_data")))
        per = _PACKED[proto.data_type]
        if per > 1:
            return self.size if stored == -(-self.size // per) else -1
        return stored // 2 if proto.data_type in (14, 15) else stored

    def _external(self) -> Array:
        entries = {text_of(e.key): text_of(e.value) for e in self._proto.external_data}
        return self._files.bytes_of(self.name, entries)

    def _from_bytes(self, data: Array) -> Array:
        number = self._proto.data_type
        if number == 8 or len(data) != self._bytes(number):
            raise FormatError(
                "a tensor's bytes do not fit its shape", where=self.name,
                got=f"{len(data)} bytes", expected=f"{list(self.shape)} {self.type_name}",
            )  # fmt: skip
        if _PACKED[number] > 1:
            return _unpacked(data, self.dtype, _PACKED[number], self.size).reshape(self.shape)
        if number == 9:
            found: np.ndarray[Any, Any] = (data != 0).reshape(self.shape)
            return found
        if data.ctypes.data % self.dtype.alignment:
            data = data.copy()
        viewed: np.ndarray[Any, Any] = data.view(self.dtype).reshape(self.shape)
        return viewed

    def array(self) -> Array:
        """The elements. Strings are Python's, in an array of objects."""
        if self._array is None:
            proto = self._proto
            if proto.raw_data:
                self._array = self._from_bytes(np.frombuffer(proto.raw_data, np.uint8))
            else:
                self._array = self._from_fields().reshape(self.shape)
            self._proto = None
        return self._array

    def _from_fields(self) -> Array:
        proto, number = self._proto, self._proto.data_type
        stored = getattr(proto, _FIELDS.get(number, "int32_data"))
        if number == 8:
            texts = np.empty(len(stored), np.object_)
            texts[:] = [_text(self.name, s) for s in stored]
            return texts
        if number in (14, 15):
            part = np.float32 if number == 14 else np.float64
            return np.array(stored, part).view(self.dtype)
        if _PACKED[number] > 1:
            data = np.array(stored, np.int32).astype(np.uint8)
            return _unpacked(data, self.dtype, _PACKED[number], self.size)
        if number in (10, 16, 17, 18, 19, 20, 24):  # bits of a float, in an int
            bits = np.uint16 if self.dtype.itemsize == 2 else np.uint8
            return np.array(stored, np.int32).astype(bits).view(self.dtype)
        return np.array(stored).astype(self.dtype)


def _text(name: str, data: bytes | str) -> str:
    try:
        return data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("text that is not UTF-8", where=name, got=f"{data!r:.60}") from error


def _unpacked(data: Array, dtype: np.dtype[Any], per: int, size: int) -> Array:
    """Elements of less than a byte, the first in the low bits, one in each byte."""
    bits = 8 // per
    parts = [(data >> (bits * i)) & (2**bits - 1) for i in range(per)]
    codes = np.stack(parts, axis=-1).reshape(-1)[:size]
    if dtype.name in ("int4", "int2"):  # the sign bit of the element is that of a byte
        half = 1 << (bits - 1)
        return ((codes.astype(np.int8) ^ half) - half).astype(dtype)
    if dtype.name in ("uint4", "uint2"):
        return codes.astype(dtype)
    return codes.astype(np.uint8).view(dtype)
