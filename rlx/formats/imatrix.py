"""Importance matrices (`imatrix` files): mean squares of the inputs of every weight of a model.

Both formats of llama.cpp are read and written:

    GGUF   general.type "imatrix", imatrix.chunk_count, imatrix.chunk_size, imatrix.datasets;
           NAME.in_sum2 [matrices, columns] sums of squares, NAME.counts [matrices, 1] rows summed
    .dat   entries i32 | for each: length i32, name, calls i32, count i32, count f32: means · calls
           | chunks i32 | length i32, name of the text (these two are missing in old files)

A weight of experts has a matrix for each of them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, InputError, ShapeError
from rlx.formats.gguf import GgufFile, write_gguf
from rlx.formats.gguf.header import MAGIC, Cursor
from rlx.formats.tensor_file import MappedFile
from rlx.support.files import atomic_file
from rlx.support.records import dataclass

Array = npt.NDArray[Any]
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME = 65535
_LEAST_ENTRY = 4 * 4 + 1  # three lengths, a name of one byte, a value
_CHUNK = 512  # tokens, where a file does not say


@dataclass(frozen=True)
class InputSquares:
    """Sums of the squares of inputs [matrices, columns] over `counts` [matrices] rows."""

    sums: Array
    counts: Array

    @property
    def means(self) -> Array:
        """f32 [matrices, columns]; ones for an expert that no token has reached."""
        reached = self.counts > 0
        safe = np.where(reached, self.counts, 1)
        means = np.where(reached[:, None], self.sums / safe[:, None], 1)
        return means.astype(np.float32)


@dataclass(frozen=True)
class ImportanceMatrix:
    """What quantisers weigh errors by: `InputSquares` by the GGUF name of the weight."""

    entries: Mapping[str, InputSquares]
    chunks: int = 1  # of the text it was made with
    chunk_size: int = _CHUNK  # tokens
    datasets: tuple[str, ...] = ()
    where: str = field(default="imatrix", compare=False)  # for errors

    def importance(self, name: str, shape: tuple[int, ...]) -> Array | None:
        """The mean squares for a weight [out, in] or [experts, out, in]: [in], [experts, in].

        None where there is no entry for it.
        """
        entry = self.entries.get(name)
        if entry is None:
            return None
        wanted = (*shape[:-2], shape[-1])
        means = entry.means
        if means.size != np.prod(wanted, dtype=object):
            raise ShapeError(
                f"the importance matrix of {name!r} does not fit the weight",
                where=self.where,
                got=f"{means.size} values",
                expected=f"{list(wanted)} for a weight of {list(shape)}",
                hint="it was made with another model",
            )
        return means.reshape(wanted)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> ImportanceMatrix:
        """An importance matrix in either format; FormatError where anything is invalid."""
        file = MappedFile(path)
        if file.data[:4] != MAGIC:
            return _read_dat(file)
        with GgufFile(path) as gguf:
            return _read_gguf(gguf)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it atomically: as `.dat` under that name, else as GGUF."""
        if not self.entries:
            raise InputError("an importance matrix without entries", where=os.fspath(path))
        if Path(path).suffix == ".dat":
            _write_dat(self, path)
        else:
            _write_gguf(self, path)


# -- GGUF -----------------------------------------------------------------------------------------


def _read_gguf(file: GgufFile) -> ImportanceMatrix:
    sums = [n for n in file.tensors if n.endswith(_SUMS)]
    kind = file.metadata.get("general.type", "imatrix")
    if kind != "imatrix" or not sums:
        raise FormatError(
            "not an importance matrix", where=file.name, got=f"a GGUF file of type {kind!r}",
            expected="general.type 'imatrix' and tensors NAME.in_sum2",
            hint="rlx quantize --calibrate TEXT --imatrix-out FILE makes one",
        )  # fmt: skip
    entries = {}
    for stored in sums:
        name = stored.removesuffix(_SUMS)
        if name + _COUNTS not in file.tensors:
            raise FormatError(
                f"sums without counts: {name!r}", where=file.name, expected=name + _COUNTS
            )
        values, counts = (_floats(file, name + end) for end in (_SUMS, _COUNTS))
        values = values.reshape(-1, values.shape[-1])
        if not name or not values.size or counts.size != len(values):
            raise FormatError(
                f"the counts of {name!r} do not fit its sums", where=file.name,
                got=f"{counts.size} counts, sums {list(values.shape)}",
                expected="a count for each matrix",
            )  # fmt: skip
        entries[name] = InputSquares(values, counts.reshape(-1))
    chunks = file.get("imatrix.chunk_count", int, 1)
    size = file.get("imatrix.chunk_size", int, _CHUNK)
    datasets = tuple(map(str, file.metadata.get("imatrix.datasets", ())))
    return ImportanceMatrix(entries, max(chunks, 0), max(size, 1), datasets, file.name)


def _floats(file: GgufFile, name: str) -> Array:
    array = file.array(name)
    if array.dtype != np.float32 or array.ndim == 0:
        raise FormatError(
            f"tensor {name!r} of an importance matrix", where=file.name,
            got=f"{array.dtype} {list(array.shape)}", expected="f32 [matrices, columns]",
        )  # fmt: skip
    _check(array, name, file.name)
    return np.array(array)  # the file is closed before it is used


def _check(values: Array, name: str, where: str) -> None:
    wrong = ~np.isfinite(values) | (values < 0)
    if wrong.any():
        raise FormatError(
            f"{name!r} has values that are no sums of squares", where=where,
            got=f"{int(wrong.sum())} of {values.size}, such as {values[wrong][0]}",
            expected="finite, 0 or more",
        )  # fmt: skip


def _write_gguf(matrix: ImportanceMatrix, path: str | os.PathLike[str]) -> None:
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": list(matrix.datasets) or [""],
        "imatrix.chunk_count": matrix.chunks,
        "imatrix.chunk_size": matrix.chunk_size,
    }
    tensors: dict[str, Array] = {}
    for name, entry in sorted(matrix.entries.items()):
        tensors[name + _SUMS] = entry.sums.astype(np.float32)
        tensors[name + _COUNTS] = entry.counts.astype(np.float32)[:, None]
    write_gguf(path, metadata, tensors)


# -- .dat -----------------------------------------------------------------------------------------


class _Reader(Cursor):
    """A bounds-checked position in a `.dat` file."""

    def number(self, what: str, least: int = 0) -> int:
        start, value = self.at, struct.unpack("<i", self.take(4, what))[0]
        if value < least:
            self.invalid(what, value, f"{least} or more", start)
        return int(value)

    def invalid(self, what: str, got: object, expected: str, at: int) -> NoReturn:
        hint = "not an imatrix file, or a damaged one: fetch it again"
        self.fail(f"{what} is out of range", got=got, expected=expected, hint=hint, at=at)

    def text(self, what: str, least: int = 0) -> str:
        start, length = self.at, self.number(f"length of a {what}", least)
        if length > _MAX_NAME:
            self.invalid(f"length of a {what}", length, f"at most {_MAX_NAME}", start)
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", got=raw[:40], at=start)


def _read_dat(file: MappedFile) -> ImportanceMatrix:
    reader = _Reader(file)
    count = reader.number("number of entries", 1)
    reader.expect_room(count, _LEAST_ENTRY, "entries")
    entries: dict[str, InputSquares] = {}
    for _ in range(count):
        start, name = reader.at, reader.text("name", 1)
        if name in entries:
            reader.fail("a name appears twice", got=repr(name), at=start)
        calls = reader.number(f"calls of {name!r}")
        size = reader.number(f"number of values of {name!r}", 1)
        values = np.frombuffer(reader.take(4 * size, f"values of {name!r}"), "<f4")
        _check(values, name, file.name)
        entries[name] = InputSquares(values[None], np.array([max(calls, 1)], np.float32))
    chunks, datasets = 1, tuple[str, ...]()
    if reader.at < reader.size:
        chunks = reader.number("number of chunks")
        datasets = (reader.text("name of the text"),)
    if reader.at < reader.size:
        reader.fail(
            "bytes after the end", got=f"{reader.size - reader.at} bytes",
            hint="not an imatrix file, or a damaged one: fetch it again",
        )  # fmt: skip
    return ImportanceMatrix(entries, chunks, _CHUNK, datasets, file.name)


def _write_dat(matrix: ImportanceMatrix, path: str | os.PathLike[str]) -> None:
    calls = max(matrix.chunks, 1)
    with atomic_file(path) as file:
        file.write(struct.pack("<i", len(matrix.entries)))
        for name, entry in sorted(matrix.entries.items()):
            raw, means = name.encode(), entry.means.reshape(-1)
            file.write(struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, means.size))
            file.write((means * np.float32(calls)).astype("<f4").tobytes())
        text = (matrix.datasets[0] if matrix.datasets else "").encode()[:_MAX_NAME]
        file.write(struct.pack("<ii", matrix.chunks, len(text)) + text)
