"""The header of a GGUF file: metadata and tensor infos, read by a bounds-checked cursor.

"GGUF" | version u32 | tensor count u64 | pair count u64 | pairs | tensor infos | pad | data

Every length, count and offset is checked against the size of the file before anything is allocated.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, ShapeError
from rlx.formats.gguf.string_array import StringArray, text_of
from rlx.formats.tensor_file import MappedFile, TensorInfo
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.support.records import dataclass

_MAX_NAME = 65535
_MAX_NESTING = 8
_STRIDE = 4096  # strings that are walked one by one before others are searched for
_WINDOW = 1 << 20  # bytes in which they are searched for


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
            return text_of(self.take(self.u64(f"length of {key!r}"), f"value of {key!r}"))
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
        parts: list[npt.NDArray[np.int64]] = []
        left = count
        while left:
            found = self._walk_short(left)
            if len(found) < min(left, _STRIDE):
                slow = self._walk(min(left - len(found), _STRIDE), key)
                found = np.append(found, np.array(slow, np.int64))
            parts.append(found)
            left -= len(found)
        starts = np.concatenate([*parts, np.array([self.at], np.int64)])
        return StringArray(self.data, starts[:-1] + 8, starts[1:])

    def _walk_short(self, count: int) -> npt.NDArray[np.int64]:
        """Where the next strings start, up to one that is empty or longer than 255 bytes (tokens
        are not). A length is then a byte and seven zeros, which text has not: they are searched
        for, and belong to a string each if every one begins where the one before ends."""
        end = min(self.size, self.at + min(_WINDOW, 32 * count + 64))
        raw = np.frombuffer(self.data, np.uint8)[self.at : end]
        zero = raw[1:] == 0
        for step in (1, 2, 3):  # runs of 2, 4, 7
            zero = zero[:-step] & zero[step:]
        found = np.flatnonzero(zero)[:count]
        after = found + 8 + raw[found]
        ends = np.flatnonzero(after > len(raw))
        found = found[: ends[0]] if len(ends) else found
        if not len(found) or found[0]:
            return found[:0]
        apart = np.flatnonzero(found[1:] != after[: len(found) - 1])
        found = found[: apart[0] + 1] if len(apart) else found
        starts: npt.NDArray[np.int64] = found + self.at
        self.at += int(after[len(found) - 1])
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


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_MAX_ELEMENT_BYTES = 8
_LEAST_PAIR = 14  # a key of one byte, its type, one byte of value
_LEAST_TENSOR = 25  # a name of one byte, no dimensions

# plain tensors, which no quantisation scheme describes
PLAIN_TYPES = {24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64"}
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_SCHEMES = {s.ggml_type: s for s in GGUF_SCHEMES.values()}
_FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(slots=True)
class Header:
    """The header of one file."""

    version: int
    alignment: int
    metadata: dict[str, Any]
    types: dict[str, ValueType]  # of the elements, where the value is an array
    tensors: dict[str, TensorInfo]


def read_header(file: MappedFile, part: int = 0) -> Header:
    """Metadata and tensor infos of one file; FormatError where anything is invalid."""
    cursor = Cursor(file)
    version, tensor_count, pair_count = _preamble(cursor)
    cursor.expect_room(pair_count, _LEAST_PAIR, "metadata pairs")
    metadata: dict[str, Any] = {}
    types: dict[str, ValueType] = {}
    for _ in range(pair_count):
        start, key = cursor.at, cursor.name("metadata key")
        if key in metadata:
            cursor.fail("a metadata key appears twice", got=repr(key), at=start)
        types[key], metadata[key] = cursor.pair_value(key)
    alignment = _alignment(cursor, metadata)
    cursor.expect_room(tensor_count, _LEAST_TENSOR, "tensors")
    raw = [_tensor(cursor) for _ in range(tensor_count)]
    tensors = _place(cursor, raw, alignment, part)
    return Header(version, alignment, metadata, types, tensors)


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        cursor.fail(
            "not a GGUF file",
            got=magic.hex(" "),
            expected=f"{MAGIC.hex(' ')} ({MAGIC.decode()})",
            at=0,
            hint="older GGML files need converting first" if magic in _OLD_MAGIC else "",
        )
    version = cursor.u32("version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        big = swapped in (1, *VERSIONS)
        cursor.fail(
            "a big-endian GGUF file" if big else "an unknown version of GGUF",
            got=f"version {swapped if big else version}",
            expected="little-endian version 2 or 3",
            at=4,
            hint="write it again with a current converter",
        )
    return version, cursor.u64("tensor count"), cursor.u64("metadata count")


_OLD_MAGIC = (b"lmgg", b"fmgg", b"tjgg", b"ggml")


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value <= 0 or value & (value - 1) or value > 1 << 30:
        cursor.fail("general.alignment is out of range", got=value, expected="a power of two")
    return value


@dataclass(slots=True)
class _RawTensor:
    """A tensor info as it stands in the file; `at` is where."""

    at: int
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _tensor(cursor: Cursor) -> _RawTensor:
    start, name = cursor.at, cursor.name("tensor name")
    rank = cursor.u32("number of dimensions")
    if rank > MAX_DIMS:
        cursor.fail(
            f"tensor {name!r} has too many dimensions",
            got=rank,
            expected=f"at most {MAX_DIMS}",
            at=start,
        )
    dims = [cursor.u64("dimension") for _ in range(rank)]
    # an empty axis leaves no element, but sizes are still offsets
    if prod([d for d in dims if d], start=_MAX_ELEMENT_BYTES) >= 1 << 63:
        cursor.fail(
            f"tensor {name!r} is larger than any memory",
            got=f"dimensions {dims}",
            expected="less than 2^63 bytes",
            at=start,
        )
    kind, offset = cursor.u32("tensor type"), cursor.u64("tensor offset")
    return _RawTensor(start, name, tuple(reversed(dims)), kind, offset)


def _place(
    cursor: Cursor, raw: list[_RawTensor], alignment: int, part: int
) -> dict[str, TensorInfo]:
    """Tensors with absolute offsets, checked to be in the file, aligned and disjoint."""
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for t in raw:
        if t.name in tensors:
            cursor.fail("a tensor name appears twice", got=repr(t.name), at=t.at)
        if t.offset % alignment:
            cursor.fail(
                f"tensor {t.name!r} is not aligned",
                got=f"offset {t.offset}",
                expected=f"a multiple of {alignment}",
                at=t.at,
            )
        scheme, dtype, nbytes = _layout(cursor, t)
        offset = start + t.offset
        if offset + nbytes > cursor.size:
            cursor.fail(
                f"tensor {t.name!r} reaches past the end of the file",
                got=f"bytes {offset} to {offset + nbytes}",
                expected=f"at most {cursor.size}",
                at=t.at,
                hint="the file is cut short: fetch it again",
            )
        tensors[t.name] = TensorInfo(t.name, t.shape, dtype, scheme, offset, nbytes, part)
    _check_disjoint(cursor, tensors)
    return tensors


def _layout(cursor: Cursor, t: _RawTensor) -> tuple[QuantScheme | None, DType, int]:
    scheme = _SCHEMES.get(t.kind)
    count = 1
    for d in t.shape:
        count *= d
    if scheme is None:
        if t.kind not in PLAIN_TYPES:
            gone = _REMOVED.get(t.kind)
            cursor.fail(
                f"tensor {t.name!r} has an unknown type",
                got=f"type {t.kind}" + (f" ({gone}, removed from the format)" if gone else ""),
                expected=", ".join(f"{k} {s}" for k, s in sorted(_known_types().items())),
                at=t.at,
                hint="quantise the model again" if gone else "a newer version of the format?",
            )
        dtype = BY_NAME[PLAIN_TYPES[t.kind]]
        return None, dtype, count * dtype.bytes
    row = t.shape[-1] if t.shape else 1
    try:
        row_bytes = scheme.row_bytes(row)
    except ShapeError:
        cursor.fail(
            f"tensor {t.name!r} of type {scheme} has rows that are not whole blocks",
            got=f"{row} columns",
            expected=f"a multiple of {scheme.block_size}",
            at=t.at,
        )
    nbytes = count // row * row_bytes if row else 0
    return scheme, BY_NAME[_FLOATS.get(scheme.name, "u8")], nbytes


def _known_types() -> dict[int, str]:
    return PLAIN_TYPES | {k: s.name for k, s in _SCHEMES.items() if k is not None}


def _check_disjoint(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    placed = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset)
    for a, b in pairwise(placed):
        if a.offset + a.nbytes > b.offset:
            cursor.fail(
                f"tensors {a.name!r} and {b.name!r} overlap",
                got=f"bytes {a.offset} to {a.offset + a.nbytes}, and from {b.offset}",
                expected="disjoint tensors",
                at=b.offset,
            )
