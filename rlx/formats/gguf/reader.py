"""GGUF files: metadata and packed weights in one file, or split over several.

with GgufFile("model.gguf") as file:
    file.need("general.architecture", str)
    file.tensors["blk.0.attn_q.weight"]  # TensorInfo
    file.array("blk.0.attn_q.weight")    # u8 [N, row_bytes], mapped, not copied
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

from rlx.errors import FormatError, close_names
from rlx.formats.gguf.header import Header, ValueType, read_header
from rlx.formats.gguf.string_array import StringArray
from rlx.formats.gguf.writer import PackedTensor, write_gguf
from rlx.formats.tensor_file import MappedFile, TensorFile, TensorInfo

__all__ = ["GgufFile", "PackedTensor", "StringArray", "ValueType", "write_gguf"]

T = TypeVar("T")
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class GgufFile(TensorFile):
    """A GGUF model, memory-mapped. Any part of a split model opens all of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        first = MappedFile(path)
        header = read_header(first)
        self.path = first.path
        self._files, headers = [first], [header]
        if _split_count(first, header) > 1:
            self._files, headers = _open_parts(first, header)
            self.path = self._files[0].path
        self.version: int = headers[0].version
        self.alignment: int = headers[0].alignment
        self.metadata: dict[str, Any] = headers[0].metadata
        self.types: dict[str, ValueType] = headers[0].types
        self.tensors: dict[str, TensorInfo] = _joined(self._files, headers)

    def need(self, key: str, kind: type[T]) -> T:
        """A metadata value that a model cannot do without."""
        if key not in self.metadata:
            raise FormatError(
                "metadata is missing",
                where=self.name,
                expected=f"{key!r} ({kind.__name__})",
                hint=close_names(key, self.metadata),
            )
        return self._typed(key, kind)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """A metadata value, or the default where the file has none."""
        return self._typed(key, kind) if key in self.metadata else default

    def _typed(self, key: str, kind: type[T]) -> T:
        value = self.metadata[key]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(
                f"metadata {key!r} has the wrong type",
                where=self.name,
                got=f"{type(value).__name__} {str(value)[:60]}",
                expected=kind.__name__,
            )
        return value


def _split_count(file: MappedFile, header: Header) -> int:
    for key in (_NO, _COUNT, _TENSORS):
        value = header.metadata.get(key, 0)
        if type(value) is not int or value < 0:
            raise FormatError(f"{key} is no number", where=file.name, got=value, expected="a count")
    return int(header.metadata.get(_COUNT, 0))


def _open_parts(first: MappedFile, header: Header) -> tuple[list[MappedFile], list[Header]]:
    """All parts of a split model, found beside the one that was named."""
    count = _split_count(first, header)
    match = _SPLIT.fullmatch(first.path.name)
    if match is None or int(match[3]) != count:
        raise FormatError(
            "a part of a split model under another name",
            where=first.name,
            got=first.path.name,
            expected=f"NAME-00001-of-{count:05d}.gguf",
            hint="the other parts are found by name: give the file its own name back",
        )
    paths = [
        first.path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)
    ]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        raise FormatError(
            "parts of a split model are missing",
            where=first.name,
            got=f"{count - len(missing)} of {count} files",
            expected=shown,
            hint=f"put them into {first.path.parent}",
        )
    files = [MappedFile(p) for p in paths]
    headers = [read_header(f, part=i) for i, f in enumerate(files)]
    for i, (file, h) in enumerate(zip(files, headers, strict=True)):
        got = (h.metadata.get(_NO), _split_count(file, h))
        if got != (i, count):
            raise FormatError(
                "a part of another split",
                where=file.name,
                got=f"{_NO} {got[0]}, {_COUNT} {got[1]}",
                expected=f"{_NO} {i}, {_COUNT} {count}",
            )
    return files, headers


def _joined(files: list[MappedFile], headers: list[Header]) -> dict[str, TensorInfo]:
    """The tensors of all parts, in order."""
    tensors = dict(headers[0].tensors)
    for file, header in zip(files[1:], headers[1:], strict=True):
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise FormatError(
                "a tensor is in two parts of a split model", where=file.name, got=min(twice)
            )
        tensors |= header.tensors
    total = headers[0].metadata.get(_TENSORS)
    if len(files) > 1 and total is not None and total != len(tensors):
        raise FormatError(
            "the parts of a split model do not add up",
            where=files[0].name,
            got=f"{len(tensors)} tensors",
            expected=f"{total} ({_TENSORS})",
        )
    return tensors
