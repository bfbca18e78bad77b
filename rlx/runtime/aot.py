"""Artifacts on disk, by key: many processes at once, nothing damaged or foreign ever used.

    cache = AotCache("artifacts")              # or AotCache.default(): the user's cache directory
    pipeline.get_or_specialize_aot(component, build_hir, cache=cache)

What makes a file unusable (another CPU, damage, another owner) is told in a warning, and the
variant is compiled and stored again; files of another version are renewed without a word. See
docs/artifacts.md for what is trusted.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from rlx.errors import OptionError, RlxError
from rlx.ir.op import Array
from rlx.runtime import container
from rlx.runtime.artifact import STAMP, Artifact, compiler_stamp
from rlx.support.files import cache_directory, make_trusted_directory, remove_stale
from rlx.support.records import dataclass
from rlx.support.settings import debug, mebibytes

ARTIFACT, WEIGHTS = ".rlx", ".weights"
_OUTDATED = "made by another version of the compiler"


@dataclass(frozen=True)
class AotEntry:
    """A file of the cache."""

    name: str
    path: Path
    num_bytes: int
    used: float  # seconds since 1970, when it was last written or loaded


@dataclass
class AotCounters:
    hits: int = 0
    misses: int = 0
    stores: int = 0
    refused: int = 0  # files that were there and could not be used
    removed: int = 0  # to keep the limit


class AotCache:
    """Artifacts in one directory, at most `limit_bytes` of them, the least recently used removed.

    Files appear whole or not at all, so processes need no lock: two that build the same artifact
    both end well. Failing to write is no error, only a slower next start.
    """

    def __init__(self, root: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
        if limit_bytes is not None and limit_bytes < 1:
            raise OptionError("not a size", where="limit_bytes", got=limit_bytes)
        self.root = Path(root)
        self.limit_bytes = mebibytes("RLX_CACHE_LIMIT") if limit_bytes is None else limit_bytes
        self.counters = AotCounters()

    @staticmethod
    def default() -> AotCache | None:
        """The cache in the user's directory; None where RLX_CACHE=0 turns it off."""
        root = cache_directory("artifacts")
        return None if root is None else AotCache(root)

    def path(self, name: str, suffix: str = ARTIFACT) -> Path:
        if not name or name != os.path.basename(name) or name.startswith("."):
            raise OptionError("not the name of an artifact", got=repr(name))
        return self.root / f"{name}{suffix}"

    # -- artifacts --------------------------------------------------------------------------------

    def load(self, name: str, material: bytes | None = None) -> Artifact | None:
        """The artifact `name`, if there is one that can be used here; `material` is what its key
        must have been made of."""
        path = self.path(name)
        try:
            parts = container.read(path).parts
            found = None if _outdated(parts) else Artifact.from_parts(parts)
        except FileNotFoundError:
            self.counters.misses += 1
            return None
        except (OSError, RlxError, ValueError, TypeError, LookupError) as error:
            self._refuse(path, _brief(error))
            return None
        if found is None:
            self._renew(path)
            return None
        if material is not None and found.material != material.hex():
            self._refuse(path, "made for something else of the same name")
            return None
        self.counters.hits += 1
        _touch(path)
        return found

    def store(self, name: str, artifact: Artifact) -> bool:
        """Write the artifact; False, with a warning, where that is not possible."""
        return self._write(self.path(name), artifact.to_parts(), {})

    def refuse(self, name: str, error: Exception) -> None:
        """Tell that an artifact which looked well could not be used after all."""
        self.counters.hits -= 1
        self._refuse(self.path(name), _brief(error))

    def _refuse(self, path: Path, why: str) -> None:
        self._renew(path, why)
        warnings.warn(f"[aot] {path} is made again: {why}", RuntimeWarning, stacklevel=4)

    def _renew(self, path: Path, why: str = _OUTDATED) -> None:
        """Count a file that is not used. After an upgrade that is all files, and nobody's fault."""
        self.counters.misses += 1
        self.counters.refused += 1
        debug(1, f"{path} is made again: {why}")

    # -- prepared weights -------------------------------------------------------------------------

    def store_weights(self, name: str, tensors: Mapping[str, Array], source: str) -> bool:
        """Keep prepared parameters; `source` says what they were made of."""
        return self._write(self.path(name, WEIGHTS), {"source": source.encode()}, tensors)

    def load_weights(self, name: str, source: str, check: bool = True) -> dict[str, Array] | None:
        """Prepared parameters made of `source`, mapped from disk, or None; unchecked ones are for
        who has just stored them."""
        path = self.path(name, WEIGHTS)
        try:
            found = container.read(path, check=check)
        except FileNotFoundError:
            return None
        except (OSError, RlxError, ValueError, TypeError, LookupError) as error:
            self._refuse(path, _brief(error))
            return None
        if found.parts.get("source") != source.encode():
            self._renew(path, f"of other weights, or {_OUTDATED}")
            return None
        _touch(path)
        return found.tensors

    # -- the directory ----------------------------------------------------------------------------

    def _write(self, path: Path, parts: Mapping[str, bytes], tensors: Mapping[str, Array]) -> bool:
        try:
            make_trusted_directory(self.root)
            container.write(path, parts, tensors)
        except OSError as error:
            text = f"[aot] not written: {path}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
            return False
        self.counters.stores += 1
        debug(1, f"wrote {path}")
        remove_stale(self.root)
        self.trim(keep=path)
        return True

    def entries(self) -> list[AotEntry]:
        """All files, the most recently used first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for item in os.scandir(self.root):
                if not item.name.startswith(".") and item.name.endswith((ARTIFACT, WEIGHTS)):
                    with contextlib.suppress(FileNotFoundError):
                        info = item.stat(follow_symlinks=False)
                        path = Path(item.path)
                        found.append(AotEntry(item.name, path, info.st_size, info.st_mtime))
        return sorted(found, key=lambda e: (-e.used, e.name))

    @property
    def num_bytes(self) -> int:
        return sum(e.num_bytes for e in self.entries())

    def trim(self, keep: Path | None = None) -> int:
        """Remove the least recently used files until the limit is kept; gives their number."""
        entries = self.entries()
        total, removed = sum(e.num_bytes for e in entries), 0
        for entry in reversed(entries):
            if total <= self.limit_bytes:
                break
            if entry.path != keep:
                entry.path.unlink(missing_ok=True)
                total -= entry.num_bytes
                removed += 1
        self.counters.removed += removed
        return removed

    def clear(self) -> int:
        """Remove everything, and what was left half-written; gives the number of files."""
        entries = self.entries()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        remove_stale(self.root)
        return len(entries)

    def verify(self) -> dict[Path, str]:
        """Read every file; those that would not be used, and why."""
        faults: dict[Path, str] = {}
        for entry in self.entries():
            try:
                parts, why = container.read(entry.path).parts, ""
                if entry.name.endswith(ARTIFACT) and _outdated(parts):
                    why = _OUTDATED
                elif entry.name.endswith(ARTIFACT):
                    Artifact.from_parts(parts)
            except FileNotFoundError:
                continue
            except (OSError, RlxError, ValueError, TypeError, LookupError) as error:
                why = _brief(error)
            if why:
                faults[entry.path] = why
        return faults

    def __repr__(self) -> str:
        return f"<AotCache {self.root}>"


def _outdated(parts: Mapping[str, bytes]) -> bool:
    """Whether an artifact is of another compiler; then no more of it is read."""
    return parts.get(STAMP) != compiler_stamp().encode()


def _touch(path: Path) -> None:
    """The time of last use, kept by ourselves: many systems do not."""
    with contextlib.suppress(OSError):
        now = time.time()
        os.utime(path, (now, now))


def _brief(error: Exception) -> str:
    if isinstance(error, RlxError):
        return str(error).splitlines()[0]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
