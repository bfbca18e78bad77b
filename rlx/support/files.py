"""Files that hold code: read only if they are this user's own, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_NEW = ".new-"
_OLD = 24 * 3600.0
"""Seconds after which a half-written file is nobody's, whatever process wrote it."""


def check_owner(info: os.stat_result, *, system: bool = False) -> None:
    """PermissionError unless only this user (or with `system` the superuser) can have written it.

    Machine code is run, so whoever can write it can do anything in this user's name.
    """
    if not hasattr(os, "geteuid"):
        return
    if info.st_uid != os.geteuid() and not (system and info.st_uid == 0):
        raise PermissionError("it belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write to it")


def open_own(path: Path, *, system: bool = False) -> BinaryIO:
    """The file for reading, once it is known to be this user's own; links are not followed."""
    follow = 0 if system else getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, os.O_RDONLY | follow), "rb")
    try:
        check_owner(os.fstat(file.fileno()), system=system)
    except BaseException:
        file.close()
        raise
    return file


def read_own(path: Path) -> bytes:
    with open_own(path) as file:
        return file.read()


def own_directory(path: Path) -> None:
    """Make the directory if need be; PermissionError when others could write into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(os.stat(path))


def write_whole(
    path: Path, content: bytes | Callable[[BinaryIO], None], *, safe: bool = True
) -> None:
    """Others see all of the bytes, or of what the function writes, or nothing; `safe` also after a
    power cut.

    Several processes may write one file at once: the last one's stays, and each is whole.
    """
    import tempfile  # a start that only reads does without it

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_NEW}{os.getpid()}-")
    try:
        with os.fdopen(handle, "w+b") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            if safe:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if safe and hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def sweep(directory: Path) -> int:
    """Remove what processes that no longer live left half-written; gives their number."""
    swept = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(_NEW) and _abandoned(entry):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    swept += 1
    return swept


def _abandoned(entry: os.DirEntry[str]) -> bool:
    number = entry.name.removeprefix(_NEW).partition("-")[0]
    try:
        if not number.isdigit() or time.time() - entry.stat().st_mtime > _OLD:
            return True
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's process has that number now, or the file is gone
        return False
    return False


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes its name when the block ends without an error."""
    import tempfile  # readers do without it

    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _umask() -> int:
    # there is no way to read it without setting it
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
