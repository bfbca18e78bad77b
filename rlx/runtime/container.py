"""The file format of artifacts and bundles: small parts with a digest, and memory-mapped tensors.

    magic 8 | version u32 | parts u32 | lengths of header, file u64 | SHA-256 | header | tensors

The digest covers the header and the fields before it, and is checked before any part is used. The
header holds a table of parts, the parts, and a checksum of every block of tensor data: hashing all
weights would slow down every start, and a sum is as fast as memory.
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
from rlx.support.files import open_trusted, private_file
from rlx.support.records import dataclass

MAGIC = b"\x89RLXA\r\n\n"
VERSION = 1
_FIXED = struct.Struct("<8sIIQQ32s")
_ALIGN, _PAGE = 64, 4096
_BLOCK = 1 << 20
_HUGE = 2 << 20
_BYTES_PER_THREAD = 1 << 24  # bytes that are worth a thread


@dataclass
class Container:
    """What a file holds. Tensors are read-only arrays over the mapped file."""

    parts: dict[str, bytes]
    tensors: dict[str, Array] = field(default_factory=dict)


def write(
    path: Path,
    parts: Mapping[str, bytes],
    tensors: Mapping[str, Array] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a container atomically; tensors are written one at a time.

    A file with tensors, or one of a cache (`durable=False`), is not synced to disk: after a power
    cut the digest and the checksums show what is lost.
    """
    header = _Header(parts, tensors or {})
    with private_file(path, durable=durable and not header.arrays) as file:
        writer = _HugePageWriter(file)
        writer.write(np.zeros(header.size, np.uint8))
        checksums = np.zeros(header.blocks, np.uint64)
        for (_, _, _, at, size), array in zip(header.rows, header.arrays, strict=True):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            padding = np.zeros(_round_up(size, _ALIGN) - size, np.uint8)
            writer.write(raw)
            writer.write(padding)
            whole = size - size % 8
            _add_checksums(checksums, at, raw[:whole])
            _add_checksums(checksums, at + whole, np.append(raw[whole:], padding))
        writer.flush()
        file.seek(0)
        file.write(header.pack(checksums))


class _HugePageWriter:
    """Writes a file in blocks of huge pages. Linux then caches and maps it in huge pages, from
    which weights, read once per token, stream half as fast again as from small ones."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._page, self._filled = file, np.empty(_HUGE, np.uint8), 0

    def write(self, data: npt.NDArray[np.uint8]) -> None:
        while len(data):
            here = data[: _HUGE - self._filled]
            self._page[self._filled : self._filled + len(here)] = here
            self._filled += len(here)
            if self._filled == _HUGE:
                self.flush()
            data = data[len(here) :]

    def flush(self) -> None:
        self._file.write(self._page[: self._filled].data)
        self._filled = 0


class _Header:
    """The header of a container; all offsets are known before the checksums."""

    def __init__(self, parts: Mapping[str, bytes], tensors: Mapping[str, Array]) -> None:
        self.parts = dict(parts)
        self.arrays = [np.asarray(a) for a in tensors.values()]
        self.rows, at = [], 0
        for name, array in zip(tensors, self.arrays, strict=True):
            shape = Shape(array.shape, array.dtype)
            self.rows.append((name, shape.dims, shape.dtype, at, array.nbytes))
            at += _round_up(array.nbytes, _ALIGN)
        self.body = at
        self.blocks = -(-at // _BLOCK)
        # its length depends on the number of checksums, not on their values
        self.size = _FIXED.size + len(self._pack_header(np.zeros(self.blocks, np.uint64)))

    def _pack_header(self, checksums: npt.NDArray[np.uint64]) -> bytes:
        lengths = tuple((name, len(data)) for name, data in self.parts.items())
        table = Writer().value((lengths, tuple(self.rows)))
        out = struct.pack("<Q", len(table)) + table + b"".join(self.parts.values())
        out += checksums.astype("<u8").tobytes()
        page = _PAGE if self.rows else 1
        return out + b"\0" * (_round_up(_FIXED.size + len(out), page) - _FIXED.size - len(out))

    def pack(self, checksums: npt.NDArray[np.uint64]) -> bytes:
        header = self._pack_header(checksums)
        fields = (MAGIC, VERSION, len(self.parts), len(header), self.size + self.body)
        digest = _digest(_FIXED.pack(*fields, bytes(32)), header)
        return _FIXED.pack(*fields, digest) + header


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _digest(fixed: bytes, header: bytes) -> bytes:
    whole = hashlib.sha256(fixed[: _FIXED.size - 32])
    whole.update(header)
    return whole.digest()


def _add_checksums(checksums: npt.NDArray[np.uint64], at: int, data: npt.NDArray[np.uint8]) -> None:
    """Add the 64-bit words at byte `at` to the checksums of their blocks: any change within one
    word changes its checksum."""
    while len(data):
        block, inside = divmod(at, _BLOCK)
        here = data[: _BLOCK - inside]
        checksums[block : block + 1] += here.view("<u8").sum(dtype=np.uint64)  # wraps quietly
        at, data = at + len(here), data[len(here) :]


def _checksums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The checksum of every block, computed by all cores: weights are large."""
    checksums = np.zeros(-(-len(data) // _BLOCK), np.uint64)
    share = _round_up(-(-len(data) // (os.cpu_count() or 1)), _BLOCK)
    if len(data) <= _BYTES_PER_THREAD:
        _add_checksums(checksums, 0, data)
        return checksums
    threads = [
        threading.Thread(target=_add_checksums, args=(checksums, at, data[at : at + share]))
        for at in range(0, len(data), share)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return checksums


# -- reading --------------------------------------------------------------------------------------


def read(path: Path, *, system: bool = False, check: bool = True) -> Container:
    """Read a container from a trusted file (with `system`, also one of the superuser).

    FormatError if it is damaged; `check=False` skips the checksums of tensors.
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
        raise FormatError("wrong length", got=f"{actual} bytes", expected=f"{size} bytes")
    file.seek(_FIXED.size)
    header = file.read(length)
    if _digest(fixed, header) != digest:
        raise FormatError("damaged: the contents do not match their digest")
    parts, rows, end = _parts(header, count)
    body = size - _FIXED.size - length
    checksums = np.frombuffer(header, "<u8", -(-body // _BLOCK), end)
    return Container(parts, _tensors(file, _FIXED.size + length, rows, checksums, check))


def _parts(header: bytes, count: int) -> tuple[dict[str, bytes], Any, int]:
    (size,) = struct.unpack_from("<Q", header)
    reader = Reader(header[8 : 8 + size])
    lengths, rows = reader.value()
    parts, at = {}, 8 + size
    for name, length in lengths:
        parts[name] = header[at : at + length]
        at += length
    if len(parts) != count or at > len(header):
        raise FormatError("the table does not match its parts")
    return parts, rows, at


def _tensors(
    file: BinaryIO, start: int, rows: Any, checksums: npt.NDArray[np.uint64], check: bool
) -> dict[str, Array]:
    if not rows:
        return {}
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages, or without those of files
            data.madvise(mmap.MADV_HUGEPAGE)
    body = np.frombuffer(data, np.uint8)[start:]
    if check and not np.array_equal(_checksums(body), checksums):
        raise FormatError("damaged: tensors do not match their checksums")
    found = {}
    for name, dims, dtype, offset, size in rows:
        if offset < 0 or offset + size > len(body):
            raise FormatError("a tensor outside the file", got=name)
        found[name] = body[offset : offset + size].view(dtype.numpy).reshape(dims)
    return found
