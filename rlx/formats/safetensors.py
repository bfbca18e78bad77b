"""safetensors files: one, or shards named by an index. No library is needed.

length of the header u64 | header as JSON: name → dtype, shape, data_offsets | data

with SafetensorsFile("model.safetensors.index.json") as file:
    file.tensors["model.norm.weight"]  # TensorInfo
    file.array("model.norm.weight")    # mapped, not copied
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlx.errors import FormatError
from rlx.formats.json_file import parse_object, read_object
from rlx.formats.tensor_file import MappedFile, TensorFile, TensorInfo, scheme_of
from rlx.ir.dtype import BY_NAME, DType
from rlx.support.files import atomic_file

if TYPE_CHECKING:
    import numpy.typing as npt

_MAX_HEADER = 100_000_000  # the limit of the format
_MAX_RANK = 64
_MAX_SIZE = 1 << 62
_ALIGNMENT = 8  # of the data, by spaces behind the header
_DTYPES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U64": "u64",
    "U32": "u32",
    "U16": "u16",
    "U8": "u8",
    "BOOL": "bool",
    "C64": "c64",
}


class SafetensorsFile(TensorFile):
    """The tensors of a safetensors file, or of all shards of an index, memory-mapped."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if self.path.suffix == ".json":
            self._files = self._read_shards()
        else:
            self._files = [MappedFile(path)]
            self.tensors, self.metadata = _read_header(self._files[0])

    def _read_shards(self) -> list[MappedFile]:
        places = _weight_map(self.path)
        names = sorted(set(places.values()))
        paths = [self.path.parent / n for n in names]
        missing = [p.name for p in paths if not p.exists()]
        if missing:
            raise FormatError(
                "shards are missing",
                where=self.name,
                got=f"{len(names) - len(missing)} of {len(names)} files",
                expected=", ".join(missing[:8]) + (" …" if missing[8:] else ""),
                hint=f"put them into {self.path.parent}",
            )
        files = [MappedFile(p) for p in paths]
        shards = [_read_header(f, i)[0] for i, f in enumerate(files)]
        number = {n: i for i, n in enumerate(names)}
        for tensor, shard in places.items():
            info = shards[number[shard]].get(tensor)
            if info is None:
                raise FormatError(
                    f"the index names a tensor that shard {shard} does not have",
                    where=self.name,
                    got=repr(tensor),
                )
            self.tensors[tensor] = info
        return files


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name → shard, all of them plain file names beside the index."""
    name = os.fspath(path)
    found = read_object(path, _MAX_HEADER).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise FormatError(
            "not an index of shards", where=name, expected='"weight_map": {tensor: file}'
        )
    for shard in set(found.values()):
        if shard in ("", ".", "..") or any(c in shard for c in "/\\\0:"):
            raise FormatError(
                "an index may only name files in its own folder", where=name, got=repr(shard)
            )
    return found


def _read_header(file: MappedFile, part: int = 0) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of one file; FormatError where anything is invalid."""
    if file.size < 8:
        _fail(file, "not a safetensors file", got=f"{file.size} bytes", expected="at least 8")
    length = int.from_bytes(file.data[:8], "little")
    room = min(file.size - 8, _MAX_HEADER)
    if length > room:
        _fail(
            file,
            "the header does not fit",
            got=f"{length} bytes",
            expected=f"at most {room}",
            hint="not a safetensors file, or cut short: fetch it again",
        )
    header = parse_object(file.data[8 : 8 + length], file.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _fail(file, "__metadata__ is not a map of strings", got=str(metadata)[:60])
    start = 8 + length
    tensors = {n: _tensor(file, n, entry, start, part) for n, entry in header.items()}
    _expect_packed(file, tensors, start)
    return tensors, metadata


def _tensor(file: MappedFile, name: str, entry: object, start: int, part: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(
            file,
            f"tensor {name!r} is not described",
            got=str(entry)[:80],
            expected="dtype, shape, data_offsets",
        )
    dtype_name, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype_name, str) or dtype_name not in _DTYPES:
        _fail(
            file,
            f"tensor {name!r} has an unknown dtype",
            got=repr(dtype_name)[:40],
            expected=", ".join(_DTYPES),
        )
    if not _are_counts(shape) or len(shape) > _MAX_RANK:
        _fail(file, f"tensor {name!r} has a wrong shape", got=str(shape)[:80])
    if not _are_counts(span) or len(span) != 2 or span[0] > span[1]:
        _fail(file, f"tensor {name!r} has wrong data_offsets", got=str(span)[:80])
    dtype = BY_NAME[_DTYPES[dtype_name]]
    nbytes = prod(shape, start=dtype.bytes)
    if prod([d for d in shape if d], start=dtype.bytes) > _MAX_SIZE:
        _fail(file, f"tensor {name!r} is larger than any file", got=str(shape)[:80])
    offset, end = start + span[0], start + span[1]
    if end > file.size or end - offset != nbytes:
        _fail(
            file,
            f"tensor {name!r} does not fit its bytes",
            got=f"{dtype_name} {shape}: {nbytes} bytes",
            expected=f"bytes {offset} to {end} of {file.size}",
            hint="the file is cut short or damaged: fetch it again",
        )
    return TensorInfo(name, tuple(shape), dtype, scheme_of(dtype), offset, nbytes, part)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= _MAX_SIZE for v in value)


def _expect_packed(file: MappedFile, tensors: dict[str, TensorInfo], start: int) -> None:
    """Tensors follow each other without gaps or overlaps up to the end, as the format has it."""
    placed = sorted((t for t in tensors.values() if t.nbytes), key=lambda t: t.offset)
    for a, b in pairwise(placed):
        if a.offset + a.nbytes > b.offset:
            _fail(file, f"tensors {a.name!r} and {b.name!r} overlap", got=f"byte {b.offset}")
    used = sum(t.nbytes for t in placed)
    if used != file.size - start:
        _fail(
            file,
            "the data has bytes that belong to no tensor",
            got=f"{used} bytes in tensors",
            expected=f"{file.size - start}",
            hint="the file is damaged: fetch it again",
        )


def _fail(
    file: MappedFile, what: str, *, got: object = None, expected: object = None, hint: str = ""
) -> NoReturn:
    raise FormatError(what, where=file.name, got=got, expected=expected, hint=hint)


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, npt.NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write tensors to one file, atomically: a reader sees the old file or the whole new one, and
    with `durable` so it does after a power cut."""
    names = {rlx_name: name for name, rlx_name in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        dtype = names[DType.of(array.dtype).name]
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with atomic_file(path, durable=durable) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())  # row-major, whatever the strides
