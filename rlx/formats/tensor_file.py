"""Tensors in memory-mapped files, whatever the format: nothing is read before it is used, nothing
is copied."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, InputError, close_names
from rlx.ir.dtype import DType
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.support.files import open_regular
from rlx.support.records import dataclass

_PLAIN = {"f32": GGUF_SCHEMES["F32"], "f16": GGUF_SCHEMES["F16"], "bf16": GGUF_SCHEMES["BF16"]}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, logical shape (last axis contiguous), packing, and where the bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: DType  # of the stored array: u8 where `scheme` packs blocks
    scheme: QuantScheme | None  # None: plain integers, booleans, f64, fp8
    offset: int  # from the start of the file
    nbytes: int
    part: int = 0  # which file of a split or sharded model

    @property
    def packed(self) -> bool:
        """Whether the stored array holds blocks, not elements."""
        return self.scheme is not None and not self.scheme.is_float

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored array: [..., row_bytes] where packed, else `shape`."""
        if self.scheme is None or not self.packed:
            return self.shape
        return (*self.shape[:-1], self.scheme.row_bytes(self.shape[-1]))


def scheme_of(dtype: DType) -> QuantScheme | None:
    """The scheme of plain float weights."""
    return _PLAIN.get(dtype.name)


class MappedFile:
    """A file mapped into memory. Views keep the mapping alive, so closing is always safe."""

    __slots__ = ("data", "name", "path", "size")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = os.fspath(self.path)
        self.data = _map(self.path, self.name)
        self.size = len(self.data)

    def view(self, offset: int, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[Any]:
        """An array over the bytes at `offset`; the caller has checked that they exist."""
        return np.ndarray(shape, dtype.numpy, buffer=self.data, offset=offset)

    def release(self) -> None:
        """Drop resident pages (madvise). Views read them again when they are used; then only single
        rows are read, which is not worth huge pages."""
        for advice in ("MADV_DONTNEED", "MADV_NOHUGEPAGE"):
            if hasattr(mmap, advice):
                self.data.madvise(getattr(mmap, advice))


def _map(path: Path, name: str) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise FormatError(
                    "empty file", where=name, hint="a download that stopped? fetch it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as e:
        raise InputError("no such file", where=name) from e
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror or e}", where=name) from e


class TensorFile:
    """Tensors by name, in one file or several shards. Each format reads its own header."""

    path: Path
    tensors: dict[str, TensorInfo]
    _files: list[MappedFile]

    @property
    def name(self) -> str:
        """The file, for messages."""
        return os.fspath(self.path)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return [f.path for f in self._files]

    def array(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored: packed rows as u8, plain ones by their type; read-only."""
        info = self.tensors.get(name)
        if info is None:
            hint = close_names(name, self.tensors)
            raise InputError("no such tensor", where=self.name, got=repr(name), hint=hint)
        if not self._files:
            raise InputError("the file is closed", where=self.name)
        return self._files[info.part].view(info.offset, info.stored_shape, info.dtype)

    def release(self) -> None:
        """Drop resident pages; arrays stay valid and are read again when used."""
        for file in self._files:
            file.release()

    def close(self) -> None:
        """Close the files; arrays handed out stay valid."""
        self._files = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.tensors)} tensors)"
