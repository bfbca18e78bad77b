"""Checkpoints: trees of arrays and of numbers in one file each, the newest whole one found.

    checkpoints = rlx.CheckpointManager("run", keep=3)
    start = {"params": params, "optimizer": state, "data": batches.state_dict(), "step": 0}
    now = checkpoints.restore(start)  # the newest one that is whole; `start` where there is none
    checkpoints.save(now["step"], now)

A file is safetensors, with the tensors named by their paths (`params.layers.0.weight`); numbers,
texts and a checksum of every tensor are JSON in its metadata. It gets its name when all of it is
on disk, so a process that is killed leaves whole checkpoints only.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from rlx.errors import FormatError, InputError, OptionError
from rlx.formats.json_file import parse_object
from rlx.formats.safetensors import SafetensorsFile, write_safetensors
from rlx.ir.dtype import DType
from rlx.numpy.array import Array, Tracer
from rlx.numpy.tree import flatten, leaf_names, unflatten
from rlx.support.files import remove_stale

T = TypeVar("T")

_VERSION = "1"
_NAME = re.compile(r"step-(\d{1,18})\.safetensors")
_MOST_STATE = 1 << 26  # bytes of JSON
_PLAIN = (bool, int, float, str)
_SCALARS = {t.__name__: t for t in _PLAIN}


class CheckpointManager:
    """The checkpoints of a run in a folder: `keep` of them, the newest.

    One process writes to a folder at a time.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise OptionError("no checkpoint kept", where="CheckpointManager", got=keep)
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_stale(self.folder)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step-{step:08}.safetensors"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or not, in order."""
        return sorted(self._files())

    def _files(self) -> dict[int, Path]:
        found = {}
        for path in self.folder.iterdir():
            matched = _NAME.fullmatch(path.name)
            if matched is not None:
                found[int(matched[1])] = path
        return found

    def save(self, step: int, tree: Any) -> Path:
        """Write the checkpoint of a step; then remove those that are too many."""
        path = self.path(step)
        save(path, tree)
        files = self._files()
        for old in sorted(files)[: -self.keep]:
            files[old].unlink(missing_ok=True)
        return path

    def restore(self, like: T) -> T:
        """The newest checkpoint that is whole, as a tree like `like`; `like` itself where there is
        none. One that is damaged is left out with a warning; a whole one that has other arrays than
        `like` is an error."""
        files = self._files()
        for step in sorted(files, reverse=True):
            try:
                return load(files[step], like)
            except (FormatError, OSError) as error:
                warnings.warn(f"checkpoint left out: {error}", stacklevel=2)
        return like


def save(path: str | os.PathLike[str], tree: Any) -> None:
    """Write a tree of arrays, numbers and texts to a file, atomically, and wait for the disk."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain: dict[str, Any] = {}
    for name, leaf in _named(tree):
        if isinstance(leaf, _PLAIN) and not isinstance(leaf, np.generic):
            plain[name] = [type(leaf).__name__, leaf.hex() if type(leaf) is float else leaf]
        else:
            arrays[name] = _host(name, leaf)
    sums = {name: _checksum(x) for name, x in arrays.items()}
    state = json.dumps({"state": plain, "checksums": sums}, ensure_ascii=False)
    metadata = {"rlx_checkpoint": _VERSION, "state": state, "checksum": str(_crc(state))}
    write_safetensors(path, arrays, metadata, durable=True)


def load(path: str | os.PathLike[str], like: T) -> T:
    """The tree of a file, which must have the structure, names, shapes and types of `like`.

    FormatError for a file that is damaged, InputError for a whole one of another tree.
    """
    wanted = dict(_named(like))
    with _opened(path) as file:
        plain, sums = _state(file)
        _same_names(file.name, wanted, [*file.tensors, *plain])
        found = []
        for name, leaf in wanted.items():
            if name in plain:
                found.append(_scalar(file.name, name, plain[name], leaf))
            else:
                found.append(_array(file, name, sums, leaf))
    tree: T = unflatten(flatten(like)[1], found)
    return tree


# -- writing --------------------------------------------------------------------------------------


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves by their paths."""
    names, leaves = leaf_names(tree, separator="."), flatten(tree)[0]
    taken = set()
    for name, leaf in zip(names, leaves, strict=True):
        if name in taken:
            raise InputError(
                "two leaves of the same path", where="checkpoint", got=name,
                hint="keys with a dot can look like a path",
            )  # fmt: skip
        taken.add(name)
        yield name, leaf


def _host(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, Tracer) or not isinstance(leaf, (Array, np.ndarray, np.generic)):
        raise InputError(
            "not a value that a checkpoint can hold", where=f"checkpoint: {name}",
            got=type(leaf).__name__, expected="arrays, bool, int, float, str",
        )  # fmt: skip
    data = leaf.data if isinstance(leaf, Array) else np.asarray(leaf)
    if data.dtype.kind == "c" and data.dtype.itemsize == 16:
        raise InputError(
            "an element type that safetensors has no name for", where=f"checkpoint: {name}",
            got=data.dtype,
        )  # fmt: skip
    return np.ascontiguousarray(data) if data.ndim else data


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _checksum(array: np.ndarray[Any, Any]) -> int:
    """Of element type, shape and bytes."""
    kind = _crc(f"{DType.of(array.dtype)} {list(array.shape)}")
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, kind)


# -- reading --------------------------------------------------------------------------------------


def _opened(path: str | os.PathLike[str]) -> SafetensorsFile:
    try:
        return SafetensorsFile(path)
    except FileNotFoundError as error:
        raise InputError("no such file", where=os.fspath(path)) from error


def _state(file: SafetensorsFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers and texts by path, and the checksums of the tensors."""
    metadata = file.metadata
    version, text = metadata.get("rlx_checkpoint"), metadata.get("state", "")
    if version != _VERSION:
        _damaged(file.name, "not a checkpoint", got=str(version)[:20], expected=_VERSION)
    if metadata.get("checksum") != str(_crc(text)) or len(text) > _MOST_STATE:
        _damaged(file.name, "the state is damaged")
    found = parse_object(text.encode(), file.name)
    plain, sums = found.get("state"), found.get("checksums")
    if not isinstance(plain, dict) or not isinstance(sums, dict) or plain.keys() & sums.keys():
        _damaged(file.name, "the state is not one of a checkpoint")
    if sums.keys() != file.tensors.keys():
        _damaged(file.name, "the names of tensors are damaged")
    return plain, sums


def _same_names(name: str, wanted: dict[str, Any], found: list[str]) -> None:
    missing = [n for n in wanted if n not in set(found)]
    more = [n for n in found if n not in wanted]
    if missing or more:
        raise InputError(
            "a checkpoint of another tree", where=name,
            got=f"without {_some(missing)}; with {_some(more)}",
            hint="restore with a tree like the one that was saved",
        )  # fmt: skip


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if names[5:] else "") if names else "none"


def _scalar(file: str, name: str, entry: Any, like: Any) -> Any:
    """A number or text of the type that it was written as, which must be that of `like`."""
    kind: Any
    value: Any
    kind, value = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    expected = _SCALARS.get(kind) if isinstance(kind, str) else None
    if expected is None or type(value) is not (str if expected is float else expected):
        _damaged(file, f"{name} is not a number or text", got=str(entry)[:40])
    if type(like) is not expected:
        raise InputError(
            f"{name} is of another type", where=file, got=kind, expected=type(like).__name__
        )
    try:
        return float.fromhex(str(value)) if expected is float else value
    except (ValueError, OverflowError):
        _damaged(file, f"{name} is not a number", got=str(value)[:40])


def _array(file: SafetensorsFile, name: str, sums: dict[str, Any], like: Any) -> Any:
    data = np.array(file.array(name), order="C")  # memory of its own, which can be donated
    if sums.get(name) != _checksum(data):
        _damaged(file.name, f"the bytes of {name} are damaged")
    if isinstance(like, _PLAIN) and not isinstance(like, np.generic):
        raise InputError(
            f"{name} is of another type", where=file.name, got="an array",
            expected=type(like).__name__,
        )  # fmt: skip
    template = like.data if isinstance(like, Array) else like
    found, dtype = DType.of(data.dtype), DType.of(template.dtype)
    if data.shape != template.shape or found is not dtype:
        raise InputError(
            f"{name} is another array", where=file.name,
            got=f"{found} {list(data.shape)}", expected=f"{dtype} {list(template.shape)}",
        )  # fmt: skip
    if isinstance(like, np.generic):
        return data[()]
    return data if isinstance(like, np.ndarray) else Array(data)  # of Unset parameters too


def _damaged(file: str, what: str, **more: Any) -> NoReturn:
    raise FormatError(what, where=file, **more)


__all__ = ["CheckpointManager", "load", "save"]
