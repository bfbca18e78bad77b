"""Compiled objects on disk, shared by all processes of one user.

A file that others could have written is refused, one that is damaged is compiled again: machine
code is run, so it is trusted only if this user wrote it and its digest agrees.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from rlx.support.files import cache_directory, make_trusted_directory, read_trusted, write_atomic
from rlx.support.settings import setting

_MAGIC = b"RLXK\x01\x00\x00\x00"
_refused: set[Path] = set()


class DiskCache:
    """One directory of objects, named by content key."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def open(root: Path | None = None) -> DiskCache | None:
        """The cache at `root` (or the default place), or None if it is off or cannot be trusted."""
        chosen = cache_directory("kernels") if root is None or setting("RLX_CACHE") == "0" else root
        if chosen is None or chosen in _refused:
            return None
        try:
            make_trusted_directory(chosen)
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
            data = read_trusted(self.path(key))
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
        data = _MAGIC + _digest(key, payload) + payload
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            # a file that a power cut damages is compiled again: not worth waiting for the disk
            write_atomic(path, data, durable=False)
        except OSError as error:
            warnings.warn(f"[cache] not written: {path}: {error}", RuntimeWarning, stacklevel=4)

    def _warn(self, key: str, why: str) -> None:
        text = f"[cache] {self.path(key)} is compiled again: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


def _digest(key: str, payload: bytes) -> bytes:
    return hashlib.sha256(key.encode() + payload).digest()
