"""The header of a GGUF file: metadata and tensor infos, every count and offset checked.

"GGUF" | version u32 | tensor count u64 | pair count u64 | pairs | tensor infos | pad | data
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rlx.errors import ShapeError
from rlx.formats.gguf.values import Cursor, ValueType
from rlx.formats.tensor_file import MappedFile, TensorInfo
from rlx.ir.dtype import BY_NAME, DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.support.records import dataclass

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
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
