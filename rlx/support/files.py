"""Files: the cache directory, atomic writes, and trusted files, which hold machine code.

Machine code is executed: write access to it is as good as this user's account. A trusted file
belongs to this user and nobody else may write to it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rlx.errors import InputError
from rlx.support.settings import setting

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_TEMPORARY = ".new-"
_STALE = 24 * 3600.0
"""Seconds after which a temporary file is stale, whatever process wrote it."""


def cache_root() -> Path:
    """RLX_CACHE_DIR, else `rlx` in the user's cache directory."""
    named = setting("RLX_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rlx"


def cache_directory(name: str) -> Path | None:
    """The directory of a cache of compiled code; None when RLX_CACHE=0."""
    return None if setting("RLX_CACHE") == "0" else cache_root() / name


# -- regular files --------------------------------------------------------------------------------

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading, but no FIFO or device: those never end, or never begin."""
    # O_NONBLOCK: do not wait for a writer
    file = os.fdopen(os.open(path, os.O_RDONLY | _NONBLOCK), "rb", closefd=True)
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise InputError(
            "not a regular file", where=os.fspath(path), got=_KINDS.get(stat.S_IFMT(mode)),
            hint="write the contents to a file, and name that",
        )  # fmt: skip
    return file


# -- trusted files --------------------------------------------------------------------------------


def check_owner(info: os.stat_result, *, system: bool = False) -> None:
    """PermissionError unless only this user (or with `system` the superuser) could write it."""
    if not hasattr(os, "geteuid"):
        return
    if info.st_uid != os.geteuid() and not (system and info.st_uid == 0):
        raise PermissionError("it belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write to it")


def open_trusted(path: Path, *, system: bool = False) -> BinaryIO:
    """Open a trusted file for reading; symbolic links are not followed unless `system`."""
    follow = 0 if system else getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, os.O_RDONLY | _NONBLOCK | follow), "rb")
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise PermissionError("it is not a regular file")
        check_owner(os.fstat(file.fileno()), system=system)
    except BaseException:
        file.close()
        raise
    return file


def read_trusted(path: Path) -> bytes:
    with open_trusted(path) as file:
        return file.read()


def make_trusted_directory(path: Path) -> None:
    """Make the directory if need be; PermissionError when others could write into it."""
    make_private_directory(path)
    check_directory(path)


def make_private_directory(path: Path) -> None:
    """Make a directory for this user alone, and the cache root that holds it."""
    if path.parent == cache_root():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def check_directory(path: Path, *, code: bool = True) -> None:
    """PermissionError when others could change what is in a directory, or in the cache root that
    holds it. One that holds no `code` may be a link, or belong to the superuser."""
    found = [(path, code)]
    if path.parent == cache_root():
        found.append((path.parent, False))
    for each, strict in found:
        try:
            info = os.lstat(each) if strict else os.stat(each)
            if stat.S_ISLNK(info.st_mode):
                raise PermissionError("it is a symbolic link")
            check_owner(info, system=not strict)
        except (FileNotFoundError, NotADirectoryError):
            continue  # this user makes it, or cannot
        except PermissionError as error:
            raise PermissionError(f"{error}: {each}") from None


def require_other_file(out: Path, *sources: Path) -> None:
    """Raise where a result would replace what it is made of, under any of its names: the same
    path, a symbolic or a hard link, a file in a source folder."""
    for source in sources:
        for each in [*source.iterdir()] if source.is_dir() else [source]:
            with contextlib.suppress(OSError):
                if os.path.samefile(out, each):
                    raise InputError(
                        "the output would replace the model that is read", where=os.fspath(out),
                        hint="write to another file, then move it",
                    )  # fmt: skip


# -- atomic writes --------------------------------------------------------------------------------


def write_atomic(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a private file atomically."""
    with private_file(path, durable=durable) as file:
        file.write(content)


@contextmanager
def private_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write a private file atomically: it gets its name when the block ends without an error.
    `durable` syncs it to disk, so that it also survives a power cut.

    Several processes may write one file at once: the last one wins, and each file is complete.
    """
    import tempfile  # slow to import, and a start that only reads does without it

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{_TEMPORARY}{os.getpid()}-")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        _sync_folder(path.parent)


@contextmanager
def atomic_file(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[BinaryIO]:
    """Write a file for a user atomically, with the usual permissions: it gets its name when the
    block ends without an error. `durable` syncs it to disk; `remove_stale` removes what a killed
    process left of it."""
    import tempfile  # slow to import, and readers do without it

    target = Path(path)
    prefix = f"{_TEMPORARY}{os.getpid()}-" if durable else target.name
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        _sync_folder(target.parent)


def _sync_folder(path: Path) -> None:
    """Write the names in a folder to disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    # there is no way to read it without setting it
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def remove_stale(directory: Path) -> int:
    """Remove temporary files that dead processes left in a directory. Returns how many."""
    removed = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(_TEMPORARY) and _is_stale(entry):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _is_stale(entry: os.DirEntry[str]) -> bool:
    number = entry.name.removeprefix(_TEMPORARY).partition("-")[0]
    try:
        if not number.isdigit() or time.time() - entry.stat().st_mtime > _STALE:
            return True
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # the pid belongs to another user's process now, or the file is gone
        return False
    return False


# -- sizes ----------------------------------------------------------------------------------------


def bytes_in(path: Path) -> int:
    """Size of a file, or of all files in a directory; files that vanish meanwhile count nothing."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
