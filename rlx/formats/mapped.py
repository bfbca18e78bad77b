"""Files as read-only memory: nothing is read before it is looked at, nothing is copied."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError, InputError
from rlx.ir.dtype import DType


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
        """Tell the system that no page is needed now; views read them again when they are, and then
        a row here and there: not worth a page of two MiB each."""
        for advice in ("MADV_DONTNEED", "MADV_NOHUGEPAGE"):
            if hasattr(mmap, advice):
                self.data.madvise(getattr(mmap, advice))


def _map(path: Path, name: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError("not a regular file", where=name)
            if status.st_size == 0:
                raise FormatError(
                    "empty file", where=name, hint="a download that stopped? fetch it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as e:
        raise InputError("no such file", where=name) from e
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror or e}", where=name) from e


def read_bounded(path: str | os.PathLike[str], limit: int) -> bytes:
    """A whole small file; FormatError when it is larger than such a file ever is."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError as e:
        raise InputError("no such file", where=name) from e
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror or e}", where=name) from e
    if len(data) > limit:
        raise FormatError(
            "too large for what it is",
            where=name,
            got=f"{os.path.getsize(path)} bytes",
            expected=f"at most {limit}",
        )
    return data
