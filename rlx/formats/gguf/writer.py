"""Writes GGUF version 3 atomically: metadata by Python type, then the tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rlx.errors import InputError
from rlx.formats.gguf.header import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    NUMPY_TYPES,
    PLAIN_TYPES,
    STRUCTS,
    ValueType,
)
from rlx.formats.gguf.string_array import StringArray
from rlx.formats.tensor_file import scheme_of
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import QuantScheme
from rlx.support.files import atomic_file
from rlx.support.records import dataclass

_VERSION = 3
_ALIGNMENT = "general.alignment"
_BY_NUMPY = {np.dtype(s): t for t, s in NUMPY_TYPES.items()}
_PLAIN_NUMBERS = {name: number for number, name in PLAIN_TYPES.items()}
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor to write: logical shape, scheme, and packed rows [..., row_bytes] of u8, or a
    function that returns them when they are written, so that a model need not fit in memory."""

    shape: tuple[int, ...]
    scheme: QuantScheme
    data: npt.NDArray[Any] | Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        row = self.scheme.row_bytes(self.shape[-1])
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * row


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any] | PackedTensor],
    *,
    types: Mapping[str, ValueType] | None = None,
) -> None:
    """Writes a GGUF file. `types` names the stored type of a scalar, or of the elements of an empty
    list, where the default (u32 or what holds it, f32, string, bool) will not do: pass
    `GgufFile.types` to copy a file's metadata."""
    name = os.fspath(path)
    try:
        alignment = _alignment(metadata)
        head = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
        for key, value in metadata.items():
            head += [_string(key), _pair_value(key, value, (types or {}).get(key))]
        offset, sizes = 0, []
        for tensor_name, tensor in tensors.items():
            offset += -offset % alignment
            head.append(_tensor_info(tensor_name, tensor, offset))
            sizes.append(tensor.nbytes)
            offset += tensor.nbytes
    except InputError as e:
        raise e.located(name) from None
    with atomic_file(path) as file:
        file.write(b"".join(head))
        for (tensor_name, tensor), size in zip(tensors.items(), sizes, strict=True):
            file.write(bytes(-file.tell() % alignment))
            _write_data(file, name, tensor_name, tensor, size)
        file.write(bytes(-file.tell() % alignment))


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get(_ALIGNMENT, DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise InputError(f"{_ALIGNMENT} is out of range", got=value, expected="a power of two")
    return value


def _write_data(
    file: BinaryIO, where: str, name: str, tensor: npt.NDArray[Any] | PackedTensor, size: int
) -> None:
    data: Any = tensor
    if isinstance(tensor, PackedTensor):
        data = tensor.data() if callable(tensor.data) else tensor.data
        if data.dtype != np.uint8:
            data = np.ascontiguousarray(data).view(np.uint8)
    if data.nbytes != size:
        raise InputError(
            f"tensor {name!r} has the wrong size",
            where=where,
            got=f"{data.nbytes} bytes",
            expected=f"{size} bytes",
        )
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    for start in range(0, size, _CHUNK):
        file.write(flat[start : start + _CHUNK].data)


def _tensor_info(name: str, tensor: npt.NDArray[Any] | PackedTensor, offset: int) -> bytes:
    if isinstance(tensor, PackedTensor):
        number = tensor.scheme.ggml_type
        kind: object = tensor.scheme
    else:
        kind = dtype = DType.of(tensor.dtype)
        scheme = scheme_of(dtype)
        number = scheme.ggml_type if scheme else _PLAIN_NUMBERS.get(dtype.name)
    if number is None or len(tensor.shape) > MAX_DIMS:
        raise InputError(
            f"tensor {name!r} has no place in a GGUF file",
            got=f"{kind} {list(tensor.shape)}",
            expected=f"a GGUF scheme, f32, f16, bf16, f64, i8 to i64, and rank {MAX_DIMS} or less",
        )
    dims = tuple(reversed(tensor.shape))
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _pair_value(key: str, value: Any, kind: ValueType | None) -> bytes:
    if _is_array(value):
        return struct.pack("<I", ValueType.ARRAY) + _array(key, value, kind)
    kind = kind if kind is not None else _scalar_type(key, value)
    return struct.pack("<I", kind) + _scalar(key, value, kind)


def _is_array(value: Any) -> bool:
    return isinstance(value, list | tuple | StringArray) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


def _scalar_type(key: str, value: Any) -> ValueType:
    if isinstance(value, np.generic | np.ndarray):
        kind = _BY_NUMPY.get(value.dtype)
        if kind is not None:
            return kind
    elif isinstance(value, bool):
        return ValueType.BOOL
    elif isinstance(value, str):
        return ValueType.STRING
    elif isinstance(value, float):
        return ValueType.FLOAT32
    elif isinstance(value, int):
        return _integer_type(value, value)
    raise _no_place(key, value)


def _integer_type(low: int, high: int) -> ValueType:
    if low >= 0:
        return ValueType.UINT32 if high < 1 << 32 else ValueType.UINT64
    return ValueType.INT32 if low >= -(1 << 31) and high < 1 << 31 else ValueType.INT64


def _scalar(key: str, value: Any, kind: ValueType) -> bytes:
    try:
        if kind is ValueType.STRING:
            return _string(value)
        return STRUCTS[kind].pack(value)
    except (struct.error, AttributeError, KeyError, OverflowError) as e:
        raise InputError(
            f"metadata {key!r} does not fit its type", got=repr(value), expected=kind.name
        ) from e


def _array(key: str, value: Any, empty: ValueType | None = None) -> bytes:
    """Element type, count and elements; `empty` is the type where there are none."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        kind = _BY_NUMPY.get(value.dtype.newbyteorder("<"))
        if kind is None:
            raise _no_place(key, value.dtype)
        data = np.ascontiguousarray(value, NUMPY_TYPES[kind]).tobytes()
        return struct.pack("<IQ", kind, len(value)) + data
    items: Sequence[Any] = value
    if any(_is_array(x) for x in items):
        return struct.pack("<IQ", ValueType.ARRAY, len(items)) + b"".join(
            _array(key, x) for x in items
        )
    kind = _common_type(key, items) if items else empty or ValueType.INT32
    return struct.pack("<IQ", kind, len(items)) + b"".join(_scalar(key, x, kind) for x in items)


def _common_type(key: str, items: Sequence[Any]) -> ValueType:
    if isinstance(items, StringArray):
        return ValueType.STRING
    kinds = {_scalar_type(key, x) for x in items}
    if len(kinds) == 1:
        # converters write lists of small integers as i32, and readers rely on it
        kind = kinds.pop()
        small = kind is ValueType.UINT32 and max(items) < 1 << 31
        return ValueType.INT32 if small else kind
    if all(isinstance(x, int) and not isinstance(x, bool) for x in items):
        return _integer_type(min(items), max(items))
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in items):
        return ValueType.FLOAT32
    raise _no_place(key, items)


def _no_place(key: str, value: object) -> InputError:
    return InputError(
        f"metadata {key!r} has no GGUF type",
        got=f"{type(value).__name__} {str(value)[:60]}",
        expected="bool, int, float, str, NumPy scalars, or lists and arrays of one of them",
    )
