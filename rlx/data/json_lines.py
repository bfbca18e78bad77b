"""`JsonLines`: the objects of a file with one JSON object a line, read when they are asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import FormatError, InputError
from rlx.formats.json_file import parse_object
from rlx.support.files import open_regular, private_file

_CHUNK = 1 << 24
_MAGIC = b"RLXLINES"
_ROW = np.dtype([("offset", "<u8"), ("length", "<u4"), ("line", "<u4")])
_HEADER = 32  # magic, and size, time and lines of the file as u64


class JsonLines:
    """Objects of a JSON-lines file by number. Blank lines are left out.

    Nothing of the file is believed: a line longer than `max_line` bytes, or nested deeper than
    `max_depth`, or not an object in UTF-8, is a FormatError that names the line. In memory there is
    only an index of the lines; with `index`, a path, that is a file which is mapped, and made anew
    when the text is newer.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_line: int = 1 << 24, max_depth: int = 32,
        index: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.name = Path(path), os.fspath(path)
        self.max_line, self.max_depth = min(max_line, 2**32 - 1), max_depth
        try:
            self._file = open_regular(self.path)
        except FileNotFoundError as error:
            raise InputError("no such file", where=self.name) from error
        except OSError as error:
            raise InputError(
                f"cannot be read: {error.strerror or error}", where=self.name
            ) from error
        status = os.fstat(self._file.fileno())
        self._size, self._time = status.st_size, status.st_mtime_ns
        self._rows = self._indexed(Path(index)) if index is not None else self._scan()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        offset, length, _ = self._rows[index].tolist()
        data = os.pread(self._file.fileno(), length, offset)
        where = self.where(index)
        if len(data) != length:
            raise FormatError(
                "the file was cut while it was read", where=where, got=f"{len(data)} bytes",
                expected=length,
            )  # fmt: skip
        found = parse_object(data, where)
        if _is_deeper(found, self.max_depth):
            raise FormatError(
                "JSON that nests too deep", where=where, expected=f"at most {self.max_depth} levels"
            )
        return found

    def where(self, index: int) -> str:
        """File and line of an object, for messages."""
        return f"{self.name}:{self._rows[index]['line']}"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    # -- index --------------------------------------------------------------------------------

    def _scan(self) -> np.ndarray[Any, Any]:
        """Offset, length and number of each line that is not empty."""
        parts, done, begin, line = [], 0, 0, 1
        while chunk := os.pread(self._file.fileno(), _CHUNK, done):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == 10) + done
            done += len(chunk)
            starts = np.concatenate([[begin], ends[:-1] + 1]) if len(ends) else ends
            parts.append(self._lines(starts, ends, line))
            line += len(ends)
            begin = int(ends[-1]) + 1 if len(ends) else begin
            if done - begin > self.max_line + 1:
                self._too_long(line, done - begin)
        if begin < done:
            parts.append(self._lines(np.array([begin]), np.array([done]), line))
        return np.concatenate(parts) if parts else np.zeros(0, _ROW)

    def _lines(
        self, starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], line: int
    ) -> np.ndarray[Any, Any]:
        lengths = ends - starts
        if lengths.size and lengths.max() > self.max_line:
            worst = int(lengths.argmax())
            self._too_long(line + worst, int(lengths[worst]))
        for i in np.flatnonzero(lengths == 1):
            lengths[i] -= os.pread(self._file.fileno(), 1, int(starts[i])) == b"\r"
        chosen = np.flatnonzero(lengths)
        rows = np.zeros(len(chosen), _ROW)
        rows["offset"], rows["length"] = starts[chosen], lengths[chosen]
        rows["line"] = chosen + line
        return rows

    def _too_long(self, line: int, length: int) -> None:
        raise FormatError(
            "a line that is too long", where=f"{self.name}:{line}", got=f"{length} bytes",
            expected=f"at most {self.max_line}", hint="one object a line; see max_line",
        )  # fmt: skip

    def _indexed(self, index: Path) -> np.ndarray[Any, Any]:
        """The rows of an index file, which is written first where there is none that fits."""
        found = self._mapped(index)
        if found is None:
            rows = self._scan()
            head = np.array([self._size, self._time, len(rows)], "<u8").tobytes()
            with private_file(index, durable=False) as file:
                file.write(_MAGIC + head)
                file.write(rows.tobytes())
            found = self._mapped(index)
        return self._scan() if found is None else found

    def _mapped(self, index: Path) -> np.ndarray[Any, Any] | None:
        """The rows of an index of this very file, or None: it may be older, cut or damaged."""
        try:
            with open_regular(index) as file:
                head = file.read(_HEADER)
                size = os.fstat(file.fileno()).st_size
        except (OSError, InputError):
            return None
        if len(head) < _HEADER or head[:8] != _MAGIC:
            return None
        size_of, time_of, count = np.frombuffer(head[8:], "<u8").tolist()
        if (size_of, time_of) != (
            self._size,
            self._time,
        ) or size != _HEADER + count * _ROW.itemsize:
            return None
        if not count:
            return np.zeros(0, _ROW)
        rows = np.memmap(index, _ROW, "r", _HEADER, (count,))
        ends = rows["offset"] + rows["length"]
        inside = bool((ends <= self._size).all() and (rows["offset"] <= self._size).all())
        short = bool((rows["length"] <= self.max_line).all())
        return rows if inside and short and bool((rows["offset"][1:] > ends[:-1]).all()) else None


def _is_deeper(value: Any, limit: int) -> bool:
    """Whether containers are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit):
        level = [
            child for x in level
            for child in (x.values() if isinstance(x, dict) else x)
            if isinstance(child, (dict, list))
        ]  # fmt: skip
        if not level:
            return False
    return True
