"""What batches are made of: anything with a length and items by number; how items are joined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.errors import FormatError, InputError, ShapeError
from rlx.formats.json_file import read_bounded
from rlx.numpy.array import Array
from rlx.numpy.tree import flatten, tree_map, unflatten

Data = np.ndarray[Any, Any]
_MOST_TEXT = 1 << 34


@runtime_checkable
class Source(Protocol):
    """Items by number. One with a method `batch(indices)` joins items itself."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Arrays:
    """A tree of arrays whose first axes are the items."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree_map(_host, tree)
        sizes = {len(x) for x in flatten(self.tree)[0]}
        if len(sizes) != 1:
            raise ShapeError(
                "arrays with different numbers of items", where="rlx.data", got=sorted(sizes),
                expected="one number",
            )  # fmt: skip
        (self._length,) = sizes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda x: x[index], self.tree)

    def batch(self, indices: Data) -> Any:
        return tree_map(lambda x: x[indices], self.tree)


def _host(x: Any) -> Data:
    array = x if isinstance(x, np.ndarray) else np.asarray(x)
    if not array.ndim:
        raise ShapeError("an array without items", where="rlx.data", got="no axes")
    return array


class Mapped:
    """A source whose items a function changes; with threads in the loader, it runs there."""

    def __init__(self, source: Source, function: Callable[[Any], Any]) -> None:
        self.source, self.function = source, function

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.function(self.source[index])


class TokenWindows:
    """Windows of a text as ids of tokens: `inputs`, and `targets`, which are one token further.

    Windows begin every `stride` tokens, or where the one before ends.
    """

    def __init__(self, tokens: Any, length: int, stride: int | None = None) -> None:
        self.tokens = _host(tokens)
        self.length, self.stride = length, length if stride is None else stride
        if self.tokens.ndim != 1 or self.tokens.dtype.kind not in "iu":
            raise InputError(
                "not a text of tokens", where="TokenWindows",
                got=f"{self.tokens.dtype} {list(self.tokens.shape)}", expected="integers [n]",
            )  # fmt: skip
        if length < 1 or self.stride < 1 or len(self.tokens) <= length:
            raise InputError(
                "no window fits", where="TokenWindows",
                got=f"length {length}, stride {self.stride}, {len(self.tokens)} tokens",
                expected="1 <= length < number of tokens, 1 <= stride",
            )  # fmt: skip

    def __len__(self) -> int:
        return (len(self.tokens) - self.length - 1) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, Data]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {k: x[0] for k, x in self.batch(np.array([index])).items()}

    def batch(self, indices: Data) -> dict[str, Data]:
        starts = np.asarray(indices, np.int64)[:, None] * self.stride
        rows = self.tokens[starts + np.arange(self.length + 1)].astype(np.int32)
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def read_tokens(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    encode: Callable[[str], Sequence[int]] | None = None,
    end: int | None = None,
) -> Data:
    """The tokens of text files one behind the other, with the token `end`, if any, behind each.
    Without `encode` a token is a byte of UTF-8."""
    named = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    parts = []
    for path in named:
        data = read_bounded(path, _MOST_TEXT)
        text = _decoded(data, os.fspath(path))
        if encode is None:
            parts.append(np.frombuffer(data, np.uint8).astype(np.int32))
        else:
            parts.append(np.asarray(encode(text), np.int32))
        if end is not None:
            parts.append(np.array([end], np.int32))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(
            "not UTF-8", where=f"{name}:{line}", got=f"byte {data[error.start]:#04x}",
            hint="convert the file to UTF-8",
        ) from None  # fmt: skip


def stack(items: Sequence[Any]) -> Any:
    """Items as a batch: numbers and arrays are stacked, leaf by leaf; texts stay lists."""
    rows = [flatten(item) for item in items]
    structure = rows[0][1]
    for _, found in rows:
        if found != structure:
            raise InputError(
                "items of a batch differ in structure", where="rlx.data", got=str(found)[:80],
                expected=str(structure)[:80], hint="pass collate= to join them",
            )  # fmt: skip
    columns = zip(*[leaves for leaves, _ in rows], strict=True)
    return unflatten(structure, [_column(list(column)) for column in columns])


def _column(values: list[Any]) -> Any:
    if not isinstance(values[0], (bool, int, float, np.generic, np.ndarray, Array)):
        return values
    shapes = {np.shape(x) for x in values}
    if len(shapes) > 1:
        raise ShapeError(
            "items of a batch differ in shape", where="rlx.data", got=sorted(map(str, shapes))[:4],
            hint="pass collate=, with rlx.data.pad for sequences",
        )  # fmt: skip
    return np.stack([np.asarray(x) for x in values])
