"""Typed values of a GGUF file, read by a bounds-checked cursor.

Every length and count is checked against the size of the file before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NoReturn, overload

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError
from rlx.formats.tensor_file import MappedFile

_MAX_NAME = 65535
_MAX_NESTING = 8
_STRIDE = 4096  # strings that are walked in one go


class ValueType(IntEnum):
    """How a metadata value is stored."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# NumPy type strings; the struct of one value follows from it
NUMPY_TYPES = {
    ValueType.UINT8: "<u1",
    ValueType.INT8: "<i1",
    ValueType.UINT16: "<u2",
    ValueType.INT16: "<i2",
    ValueType.UINT32: "<u4",
    ValueType.INT32: "<i4",
    ValueType.FLOAT32: "<f4",
    ValueType.UINT64: "<u8",
    ValueType.INT64: "<i8",
    ValueType.FLOAT64: "<f8",
    ValueType.BOOL: "|b1",
}
STRUCTS = {t: struct.Struct("<" + np.dtype(s).char) for t, s in NUMPY_TYPES.items()}
STRUCTS |= {ValueType.UINT64: struct.Struct("<Q"), ValueType.INT64: struct.Struct("<q")}
_U32, _U64 = STRUCTS[ValueType.UINT32], STRUCTS[ValueType.UINT64]


class StringArray(Sequence[str]):
    """The strings of a metadata array, decoded when asked for: vocabularies are large."""

    __slots__ = ("_data", "_ends", "_starts")

    def __init__(self, data: Any, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]):
        self._data, self._starts, self._ends = data, starts, ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return list(StringArray(self._data, self._starts[index], self._ends[index]))
        return _text(self._data[int(self._starts[index]) : int(self._ends[index])])

    def __iter__(self) -> Iterator[str]:
        together = self._decoded_together()
        if together is not None:
            return iter(together)
        data, starts, ends = self._data, self._starts.tolist(), self._ends.tolist()
        return (_text(data[a:b]) for a, b in zip(starts, ends, strict=True))

    def _decoded_together(self) -> list[str] | None:
        """All strings decoded by one call, five times as fast as one by one: the lengths between
        them are replaced by a zero. None where they are not adjacent, or contain zeros."""
        starts, ends = self._starts, self._ends
        if len(starts) < 2 or (starts[1:] != ends[:-1] + 8).any():
            return None
        raw = np.frombuffer(self._data, np.uint8)[starts[0] : ends[-1]].copy()
        lengths = ends[:-1] - starts[0]
        raw[lengths] = 0
        keep = np.ones(len(raw), np.bool_)
        for i in range(1, 8):
            keep[lengths + i] = False
        text = _text(raw[keep].tobytes())
        found = text.split("\0")
        return found if len(found) == len(starts) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | tuple | StringArray):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3])) + (", …" if len(self) > 3 else "")
        return f"StringArray({len(self)}: {shown})"


def _text(raw: bytes) -> str:
    # a wrong byte in a description must not keep a model from loading
    return raw.decode("utf-8", "replace")


class Cursor:
    """A bounds-checked position in the file."""

    __slots__ = ("at", "data", "file_name", "size")

    def __init__(self, file: MappedFile) -> None:
        self.data, self.size, self.file_name, self.at = file.data, file.size, file.name, 0

    def fail(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        hint: str = "",
        at: int | None = None,
    ) -> NoReturn:
        place = self.at if at is None else at
        where = f"{self.file_name}, byte {place}"
        raise FormatError(what, where=where, got=got, expected=expected, hint=hint)

    def expect(self, size: int, what: str) -> None:
        if size > self.size - self.at:
            self.fail(
                f"{what} reaches past the end of the file",
                got=f"{size} bytes",
                expected=f"at most {self.size - self.at}",
                hint="the file is cut short or damaged: fetch it again",
            )

    def expect_room(self, count: int, least: int, what: str) -> None:
        """Check that `count` items of at least `least` bytes fit into the rest of the file."""
        if count * least > self.size - self.at:
            self.fail(
                f"more {what} than the file can hold",
                got=count,
                expected=f"at most {(self.size - self.at) // least}",
                hint="the file is cut short or damaged: fetch it again",
            )

    def take(self, size: int, what: str) -> bytes:
        self.expect(size, what)
        self.at += size
        return self.data[self.at - size : self.at]

    def u32(self, what: str) -> int:
        self.expect(4, what)
        self.at += 4
        return int(_U32.unpack_from(self.data, self.at - 4)[0])

    def u64(self, what: str) -> int:
        self.expect(8, what)
        self.at += 8
        return int(_U64.unpack_from(self.data, self.at - 8)[0])

    def name(self, what: str) -> str:
        start, length = self.at, self.u64(f"length of a {what}")
        if length > _MAX_NAME:
            self.fail(f"{what} too long", got=length, expected=f"at most {_MAX_NAME}", at=start)
        if not length:
            self.fail(f"a {what} that is empty", at=start)
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", got=raw[:40], at=start)

    def value_type(self, what: str) -> ValueType:
        number = self.u32(what)
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"unknown {what}", got=number, expected="0 to 12", at=self.at - 4)

    def pair_value(self, key: str) -> tuple[ValueType, Any]:
        """Type and value; of an array the type of its elements."""
        kind = self.value_type(f"type of {key!r}")
        if kind is ValueType.ARRAY:
            return self.array(key, 1)
        return kind, self.scalar(kind, key)

    def scalar(self, kind: ValueType, key: str) -> Any:
        if kind is ValueType.STRING:
            return _text(self.take(self.u64(f"length of {key!r}"), f"value of {key!r}"))
        layout = STRUCTS[kind]
        raw = self.take(layout.size, f"value of {key!r}")
        if kind is ValueType.BOOL and raw > b"\1":
            self.fail(f"{key!r} is not a boolean", got=raw[0], expected="0 or 1", at=self.at - 1)
        return layout.unpack(raw)[0]

    def array(self, key: str, depth: int) -> tuple[ValueType, Any]:
        kind = self.value_type(f"element type of {key!r}")
        count = self.u64(f"length of {key!r}")
        if kind is ValueType.STRING:
            self.expect_room(count, 8, f"strings in {key!r}")
            return kind, self.strings(count, key)
        if kind is ValueType.ARRAY:
            if depth == _MAX_NESTING:
                self.fail(f"{key!r} nests too deep", expected=f"at most {_MAX_NESTING} levels")
            self.expect_room(count, 12, f"arrays in {key!r}")
            return kind, [self.array(key, depth + 1)[1] for _ in range(count)]
        return kind, self.numbers(kind, count, key)

    def numbers(self, kind: ValueType, count: int, key: str) -> npt.NDArray[Any]:
        dtype = np.dtype(NUMPY_TYPES[kind])
        self.expect_room(count, dtype.itemsize, f"elements in {key!r}")
        raw = np.dtype("u1") if kind is ValueType.BOOL else dtype
        values: npt.NDArray[Any] = np.ndarray(count, raw, buffer=self.data, offset=self.at)
        self.at += count * dtype.itemsize
        if kind is not ValueType.BOOL:
            return values
        if count and values.max() > 1:
            self.fail(f"{key!r} holds bytes that are no booleans", got=int(values.max()))
        return values.view(dtype)

    def strings(self, count: int, key: str) -> StringArray:
        starts: list[int] = []
        for done in range(0, count, _STRIDE):
            size = min(_STRIDE, count - done)
            starts += self._walk_short(size) or self._walk(size, key)
        starts.append(self.at)
        found = np.array(starts, np.int64)
        return StringArray(self.data, found[:-1] + 8, found[1:])

    def _walk_short(self, count: int) -> list[int] | None:
        """Where strings start if each is shorter than 256 bytes (tokens are): one byte is read per
        string, then all lengths are checked at once. None when one is longer."""
        data, at = self.data, self.at
        starts: list[int] = []
        append = starts.append
        try:
            for _ in range(count):
                append(at)
                at += data[at] + 8
        except IndexError:
            return None
        if at > self.size:
            return None
        found = np.array(starts, np.int64)
        raw = np.frombuffer(data, np.uint8)
        if any(raw[found + i].any() for i in range(1, 8)):
            return None
        self.at = at
        return starts

    def _walk(self, count: int, key: str) -> list[int]:
        starts: list[int] = []
        what = f"a string in {key!r}"
        for _ in range(count):
            starts.append(self.at)
            size = self.u64(what)
            self.expect(size, what)
            self.at += size
        return starts
