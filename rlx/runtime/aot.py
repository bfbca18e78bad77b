"""The AOT cache: artifacts and prepacked weights on disk, by key, shared by many processes.

    cache = AotCache("artifacts")              # or AotCache.default(): the user's cache directory
    pipeline.get_or_specialize_aot(component, build_hir, cache=cache)

A file that cannot be used (another CPU, damaged, another owner) causes a warning, and the variant
is compiled and stored again. Files of another compiler version are replaced silently. See
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
from rlx.specialize.compile_profile import is_registered, register_profile
from rlx.specialize.options import ModelComponent
from rlx.support.files import (
    cache_directory,
    check_directory,
    make_trusted_directory,
    remove_stale,
)
from rlx.support.records import dataclass
from rlx.support.settings import debug, mebibytes

ARTIFACT, WEIGHTS = ".rlx", ".weights"
_OUTDATED = "compiled by another version of RLX"


@dataclass(frozen=True)
class AotEntry:
    """A file of the cache."""

    name: str
    path: Path
    num_bytes: int
    used: float  # last written or loaded, in seconds since 1970


@dataclass
class AotCounters:
    hits: int = 0
    misses: int = 0
    stores: int = 0
    rejected: int = 0  # files that could not be used
    removed: int = 0  # evicted


class AotCache:
    """Artifacts in one directory, up to `limit_bytes`; the least recently used are evicted.

    Writes are atomic, so processes need no lock: two may build the same artifact at once. A failed
    write is no error; only the next start is slower.
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
        """The artifact `name`, or None if there is none that can be used. `material` is what its
        key must stand for."""
        path = self.path(name)
        try:
            check_directory(self.root)
            parts = container.read(path).parts
            found = None if _outdated(parts) else Artifact.from_parts(parts)
        except FileNotFoundError:
            self.counters.misses += 1
            return None
        except (OSError, RlxError, ValueError, TypeError, LookupError) as error:
            self._reject(path, _brief(error))
            return None
        if found is None:
            self._count_rejected(path)
            return None
        if material is not None and found.material != material.hex():
            self._reject(path, "another artifact of the same name")
            return None
        self.counters.hits += 1
        _touch(path)
        return found

    def store(self, name: str, artifact: Artifact) -> bool:
        """Write the artifact; False, with a warning, where that is not possible."""
        return self._write(self.path(name), artifact.to_parts(), {})

    def find_profile(self, component: ModelComponent) -> None:
        """Register the profile of a component whose key is not known in this process, if one of the
        component's artifacts has it."""
        key = component.profile_key
        if not key or is_registered(key):
            return
        for entry in self.entries():
            if entry.name.startswith(component.aot_disk_base()) and entry.name.endswith(ARTIFACT):
                with contextlib.suppress(OSError, RlxError, ValueError, TypeError, LookupError):
                    parts = container.read(entry.path).parts
                    profile = None if _outdated(parts) else Artifact.from_parts(parts).profile
                    if profile is not None and register_profile(profile) == key:
                        return

    def reject(self, name: str, error: Exception) -> None:
        """Count an artifact that was loaded but failed to link as a miss, and warn."""
        self.counters.hits -= 1
        self._reject(self.path(name), _brief(error))

    def _reject(self, path: Path, why: str) -> None:
        self._count_rejected(path, why)
        warnings.warn(f"[aot] {path} is rebuilt: {why}", RuntimeWarning, stacklevel=4)

    def _count_rejected(self, path: Path, why: str = _OUTDATED) -> None:
        """Count a file that is not used, without a warning: after an upgrade that is all files."""
        self.counters.misses += 1
        self.counters.rejected += 1
        debug(1, f"{path} is rebuilt: {why}")

    # -- prepacked weights ------------------------------------------------------------------------

    def store_weights(self, name: str, tensors: Mapping[str, Array], source: str) -> bool:
        """Store prepacked weights; `source` identifies the weights they come from."""
        return self._write(self.path(name, WEIGHTS), {"source": source.encode()}, tensors)

    def load_weights(self, name: str, source: str, check: bool = True) -> dict[str, Array] | None:
        """The prepacked weights of `source`, mapped from disk, or None. `check=False` skips the
        checksums, for a process that has just stored them."""
        path = self.path(name, WEIGHTS)
        try:
            check_directory(self.root)
            found = container.read(path, check=check)
        except FileNotFoundError:
            return None
        except (OSError, RlxError, ValueError, TypeError, LookupError) as error:
            self._reject(path, _brief(error))
            return None
        if found.parts.get("source") != source.encode():
            self._count_rejected(path, f"packed from other weights, or {_OUTDATED}")
            return None
        _touch(path)
        return found.tensors

    # -- the directory ----------------------------------------------------------------------------

    def _write(self, path: Path, parts: Mapping[str, bytes], tensors: Mapping[str, Array]) -> bool:
        try:
            make_trusted_directory(self.root)
            container.write(path, parts, tensors, durable=False)
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
        """Evict the least recently used files down to the limit. Returns how many."""
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
        """Remove all files, also temporary ones that are stale. Returns how many."""
        entries = self.entries()
        for entry in entries:
            entry.path.unlink(missing_ok=True)
        remove_stale(self.root)
        return len(entries)

    def verify(self) -> dict[Path, str]:
        """Read every file. Returns those that would not be used, and why."""
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
    """Whether another compiler wrote the artifact; then no other part may be read."""
    return parts.get(STAMP) != compiler_stamp().encode()


def _touch(path: Path) -> None:
    """Record the time of last use: many file systems do not."""
    with contextlib.suppress(OSError):
        now = time.time()
        os.utime(path, (now, now))


def _brief(error: Exception) -> str:
    if isinstance(error, RlxError):
        return str(error).splitlines()[0]
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__
