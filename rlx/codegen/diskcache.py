"""Compiled objects on disk, shared by all processes of one user.

A file that others could have written is refused, one that is damaged is compiled again: machine
code is run, so it is trusted only if this user wrote it and its digest agrees.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from rlx.settings import setting

_MAGIC = b"RLXK\x01\x00\x00\x00"
_refused: set[Path] = set()


def default_directory() -> Path | None:
    """RLX_CACHE_DIR, else a folder in the user's cache; None when RLX_CACHE=0."""
    if setting("RLX_CACHE") == "0":
        return None
    named = setting("RLX_CACHE_DIR")
    if named:
        return Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "rlx" / "kernels"


class DiskCache:
    """One directory of objects, named by content key."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def open(root: Path | None = None) -> DiskCache | None:
        """The cache at `root` (or the default place), or None if it is off or cannot be trusted."""
        chosen = default_directory() if root is None or setting("RLX_CACHE") == "0" else root
        if chosen is None or chosen in _refused:
            return None
        try:
            chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(os.stat(chosen))
        except OSError as error:
            _refused.add(chosen)
            warnings.warn(f"[cache] not used: {chosen}: {error}", RuntimeWarning, stacklevel=3)
            return None
        return DiskCache(chosen)

    def path(self, key: str) -> Path:
        return self.root / key[:2] / f"{key}.rlxk"

    def load(self, key: str) -> bytes | None:
        """The object stored under the key; None if there is none that can be used."""
        try:
            data = _read_own(self.path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(key, str(error))
            return None
        digest, payload = data[8:40], data[40:]
        if data[:8] != _MAGIC or digest != _digest(key, payload):
            self._warn(key, "damaged")
            return None
        return payload

    def store(self, key: str, payload: bytes) -> None:
        """Write the object so that others see all of it or nothing. Failing is no error."""
        path = self.path(key)
        temporary = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + _digest(key, payload) + payload)
            os.replace(temporary, path)
        except OSError as error:
            warnings.warn(f"[cache] not written: {path}: {error}", RuntimeWarning, stacklevel=4)
            if temporary:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def _warn(self, key: str, why: str) -> None:
        text = f"[cache] {self.path(key)} is compiled again: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()


def _check_owner(info: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    if info.st_uid != os.geteuid():
        raise PermissionError("it belongs to another user")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write to it")


def _read_own(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        _check_owner(os.fstat(file.fileno()))
        return file.read()
