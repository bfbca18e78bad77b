"""Indexes of vocabularies on disk, by the content that they were made of.

    magic 8 | SHA-256 of the rest | length of the table u64 | table (JSON) | arrays

A file that is damaged, or that others could have written, is made again, as is one of another
version. Writes are atomic: processes need no lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx.errors import FormatError
from rlx.support.files import (
    cache_directory,
    check_directory,
    make_trusted_directory,
    read_trusted,
    remove_stale,
    write_atomic,
)
from rlx.support.records import dataclass
from rlx.support.settings import debug

Arrays = dict[str, npt.NDArray[Any]]

SUFFIX = ".vocab"
_MAGIC = b"\x89RLXV\r\n\1"  # the last byte is the version
_ALIGN = 8
_MOST_FILES = 64
_TYPES = ("|u1", "<u2", "<u4", "<i8", "<u8", "<f8")


def cache_key(version: str, parts: Iterable[Any]) -> str:
    """The digest of all bytes that an index is made of."""
    digest = hashlib.sha256(version.encode())
    for part in parts:
        digest.update(struct.pack("<Q", len(memoryview(part).cast("B"))))
        digest.update(part)
    return digest.hexdigest()


def get_or_make(key: str, make: Callable[[], Arrays | None]) -> Arrays | None:
    """The arrays stored under a key, made and stored if need be. None where none can be made."""
    folder = cache_directory("tokenizers")
    if folder is None:
        return make()
    path = folder / f"{key[:40]}{SUFFIX}"
    found = _load(path, key)
    if found is None:
        found = make()
        if found is not None:
            _store(path, key, found)
    return found


def _load(path: Path, key: str) -> Arrays | None:
    try:
        check_directory(path.parent)
        found = unpack(read_trusted(path), key)
        os.utime(path)
        return found
    except FileNotFoundError:
        return None
    except (OSError, FormatError) as error:
        debug(1, f"{path} is made again: {error}")
        return None


def _store(path: Path, key: str, arrays: Arrays) -> None:
    """Write the index and remove the least recently used. Failing is no error: the next start is
    slower."""
    try:
        make_trusted_directory(path.parent)
        write_atomic(path, pack(key, arrays), durable=False)
        remove_stale(path.parent)
        for old in entries()[_MOST_FILES:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        debug(1, f"not written: {path}: {error}")


def pack(key: str, arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The bytes of a file."""
    rows = [[name, a.dtype.str, len(a)] for name, a in arrays.items()]
    table = json.dumps({"key": key, "arrays": rows}).encode()
    table += b" " * (-len(table) % _ALIGN)
    out = [struct.pack("<Q", len(table)), table]
    for array in arrays.values():
        raw = np.ascontiguousarray(array).tobytes()
        out += [raw, bytes(-len(raw) % _ALIGN)]
    body = b"".join(out)
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, key: str) -> Arrays:
    """The arrays in a file; FormatError unless it is whole, and that of the key."""
    start = len(_MAGIC) + 32
    if data[: len(_MAGIC)] != _MAGIC or len(data) < start + 8:
        raise FormatError("not an index of a vocabulary, or one of another version")
    body = memoryview(data)[start:]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise FormatError("damaged: the contents do not match their digest")
    try:
        (size,) = struct.unpack_from("<Q", body)
        table = json.loads(bytes(body[8 : 8 + size]))
        if table["key"] != key:
            raise FormatError("the index of another vocabulary")
        found, at = Arrays(), 8 + size
        for name, kind, count in table["arrays"]:
            if kind not in _TYPES:
                raise FormatError("an unknown type of numbers", got=kind)
            found[name] = np.frombuffer(body, kind, count, at)
            at += -(-found[name].nbytes // _ALIGN) * _ALIGN
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"damaged: {error}") from None
    return found


@dataclass(frozen=True)
class CachedIndex:
    """A file of the cache."""

    path: Path
    num_bytes: int
    used: float  # seconds since 1970


def cached_indexes() -> list[CachedIndex]:
    """All files, the most recently used first."""
    folder, found = cache_directory("tokenizers"), []
    with contextlib.suppress(FileNotFoundError):
        for item in os.scandir(folder) if folder is not None else ():
            if item.name.endswith(SUFFIX) and not item.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    info = item.stat(follow_symlinks=False)
                    found.append(CachedIndex(Path(item.path), info.st_size, info.st_mtime))
    return sorted(found, key=lambda e: (-e.used, e.path))


def entries() -> list[Path]:
    return [e.path for e in cached_indexes()]


def damaged_indexes() -> dict[Path, str]:
    """The files that cannot be used, and why."""
    faults: dict[Path, str] = {}
    for path in entries():
        try:
            data = read_trusted(path)
            table = json.loads(data[len(_MAGIC) + 40 :].partition(b"}")[0] + b"}")
            unpack(data, str(table["key"]))
        except FileNotFoundError:
            continue
        except (OSError, FormatError, ValueError, KeyError, TypeError) as error:
            faults[path] = str(error).splitlines()[0] or type(error).__name__
    return faults
