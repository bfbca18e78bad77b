"""One file for code and weights: small parts, digested as a whole, and tensors, mapped in place.

    magic 8 | version u32 | parts u32 | head length u64 | file length u64 | SHA-256 | head | tensors

The digest covers all of the head and the fields before it, so no byte of a part is used before all
were checked. The head holds a table of parts, the parts, and for tensors a sum of every block of
bytes: weights are too many to hash at every start, and a sum is as fast as memory.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError
from rlx.ir.op import Array
from rlx.ir.serial.reader import Reader
from rlx.ir.serial.writer import Writer
from rlx.ir.shape import Shape
from rlx.support.files import open_trusted, write_atomic
from rlx.support.records import dataclass

MAGIC = b"\x89RLXA\r\n\n"
VERSION = 1
_FIXED = struct.Struct("<8sIIQQ32s")
_ALIGN, _PAGE = 64, 4096
_BLOCK = 1 << 20
_HUGE = 2 << 20
_SHARE = 1 << 24  # bytes that are worth a thread


@dataclass
class Container:
    """What a file holds. Tensors are read-only arrays over the mapped file."""

    parts: dict[str, bytes]
    tensors: dict[str, Array] = field(default_factory=dict)


def write(
    path: Path,
    parts: Mapping[str, bytes],
    tensors: Mapping[str, Array] | None = None,
) -> None:
    """Write a container, whole or not at all; tensors go to the file one at a time.

    A file of tensors is not waited for until it is on the disk: their sums tell after a power cut.
    """
    head = _Head(parts, tensors or {})

    def fill(file: BinaryIO) -> None:
        pieces = _Pieces(file)
        pieces.write(np.zeros(head.size, np.uint8))
        sums = np.zeros(head.blocks, np.uint64)
        for (_, _, _, at, size), array in zip(head.rows, head.arrays, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            padding = np.zeros(_up(size, _ALIGN) - size, np.uint8)
            pieces.write(raw)
            pieces.write(padding)
            _add_sums(sums, at, raw[: size - size % 8])
            _add_sums(sums, at + size - size % 8, np.append(raw[size - size % 8 :], padding))
        pieces.flush()
        file.seek(0)
        file.write(head.pack(sums))

    write_atomic(path, fill, durable=not head.arrays)


class _Pieces:
    """Writes a file by huge pages. Linux then keeps it in memory as such and maps them whole: what
    is read once for every token comes half as fast again as from small pages."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._piece, self._filled = file, np.empty(_HUGE, np.uint8), 0

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        while len(data):
            here = data[: _HUGE - self._filled]
            self._piece[self._filled : self._filled + len(here)] = here
            self._filled += len(here)
            if self._filled == _HUGE:
                self.flush()
            data = data[len(here) :]

    def flush(self) -> None:
        self._file.write(self._piece[: self._filled].data)
        self._filled = 0


class _Head:
    """Lays out a container: every offset is known before the sums of the tensors are."""

    def __init__(self, parts: Mapping[str, bytes], tensors: Mapping[str, Array]) -> None:
        self.parts = dict(parts)
        self.arrays = [np.asarray(a) for a in tensors.values()]
        self.rows, at = [], 0
        for name, array in zip(tensors, self.arrays, strict=True):
            shape = Shape(array.shape, array.dtype)
            self.rows.append((name, shape.dims, shape.dtype, at, array.nbytes))
            at += _up(array.nbytes, _ALIGN)
        self.body = at
        self.blocks = -(-at // _BLOCK)
        # the length of a head does not depend on the sums, only on how many there are
        self.size = _FIXED.size + len(self._head(np.zeros(self.blocks, np.uint64)))

    def _head(self, sums: npt.NDArray[np.uint64]) -> bytes:
        lengths = tuple((name, len(data)) for name, data in self.parts.items())
        table = Writer().value((lengths, tuple(self.rows)))
        out = struct.pack("<Q", len(table)) + table + b"".join(self.parts.values())
        out += sums.astype("<u8").tobytes()
        page = _PAGE if self.rows else 1
        return out + b"\0" * (_up(_FIXED.size + len(out), page) - _FIXED.size - len(out))

    def pack(self, sums: npt.NDArray[np.uint64]) -> bytes:
        head = self._head(sums)
        fields = (MAGIC, VERSION, len(self.parts), len(head), self.size + self.body)
        digest = _digest(_FIXED.pack(*fields, bytes(32)), head)
        return _FIXED.pack(*fields, digest) + head


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _digest(fixed: bytes, head: bytes) -> bytes:
    whole = hashlib.sha256(fixed[: _FIXED.size - 32])
    whole.update(head)
    return whole.digest()


def _add_sums(sums: npt.NDArray[np.uint64], at: int, data: npt.NDArray[np.uint8]) -> None:
    """Add 64-bit words that lie at byte `at` to the sums of their blocks: any change within one
    word changes the sum of its block."""
    while len(data):
        block, inside = divmod(at, _BLOCK)
        here = data[: _BLOCK - inside]
        sums[block : block + 1] += here.view("<u8").sum(dtype=np.uint64)  # wraps quietly
        at, data = at + len(here), data[len(here) :]


def _sums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The sum of the 64-bit words of every block, by all cores: weights are large."""
    sums = np.zeros(-(-len(data) // _BLOCK), np.uint64)
    share = _up(-(-len(data) // (os.cpu_count() or 1)), _BLOCK)
    if len(data) <= _SHARE:
        _add_sums(sums, 0, data)
        return sums
    threads = [
        threading.Thread(target=_add_sums, args=(sums, at, data[at : at + share]))
        for at in range(0, len(data), share)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


# -- reading --------------------------------------------------------------------------------------


def read(path: Path, *, system: bool = False, check: bool = True) -> Container:
    """The container of a file that is the user's own (or with `system` the superuser's).

    FormatError when anything about it is wrong; `check=False` leaves the tensors unchecked.
    """
    with open_trusted(path, system=system) as file:
        try:
            return _read(file, check)
        except FormatError as error:
            raise error.located(path.name) from None


def _read(file: BinaryIO, check: bool) -> Container:
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or fixed[:8] != MAGIC:
        raise FormatError("not an artifact", got=fixed[:8].hex(" "), expected=MAGIC.hex(" "))
    _, version, count, length, size, digest = _FIXED.unpack(fixed)
    if version != VERSION:
        raise FormatError("another version of the format", got=version, expected=VERSION)
    actual = file.seek(0, 2)
    if size != actual or length > actual - _FIXED.size:
        raise FormatError("cut short or run on", got=f"{actual} bytes", expected=f"{size} bytes")
    file.seek(_FIXED.size)
    head = file.read(length)
    if _digest(fixed, head) != digest:
        raise FormatError("damaged: the contents do not match their digest")
    parts, rows, end = _parts(head, count)
    body = size - _FIXED.size - length
    sums = np.frombuffer(head, "<u8", -(-body // _BLOCK), end)
    return Container(parts, _tensors(file, _FIXED.size + length, rows, sums, check))


def _parts(head: bytes, count: int) -> tuple[dict[str, bytes], Any, int]:
    (size,) = struct.unpack_from("<Q", head)
    reader = Reader(head[8 : 8 + size])
    lengths, rows = reader.value()
    parts, at = {}, 8 + size
    for name, length in lengths:
        parts[name] = head[at : at + length]
        at += length
    if len(parts) != count or at > len(head):
        raise FormatError("a table that does not fit its parts")
    return parts, rows, at


def _tensors(
    file: BinaryIO, start: int, rows: Any, sums: npt.NDArray[np.uint64], check: bool
) -> dict[str, Array]:
    if not rows:
        return {}
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system made without huge pages, or without those of files
            data.madvise(mmap.MADV_HUGEPAGE)
    body = np.frombuffer(data, np.uint8)[start:]
    if check and not np.array_equal(_sums(body), sums):
        raise FormatError("damaged: tensors do not match their sums")
    found = {}
    for name, dims, dtype, offset, size in rows:
        if offset < 0 or offset + size > len(body):
            raise FormatError("a tensor outside the file", got=name)
        found[name] = body[offset : offset + size].view(dtype.numpy).reshape(dims)
    return found
