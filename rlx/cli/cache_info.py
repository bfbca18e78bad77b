"""What RLX keeps on disk: compiled kernels, artifacts of whole variants, fetched models."""

from __future__ import annotations

import warnings
from pathlib import Path

from rlx.records import dataclass

_KERNEL = ".rlxk"
KINDS = ("kernels", "artifacts")


@dataclass(frozen=True)
class Kept:
    """A file that can be made again."""

    kind: str  # kernels or artifacts
    path: Path
    num_bytes: int
    written: float  # seconds since 1970


def directory(kind: str) -> Path | None:
    """Where files of a kind are; None where RLX_CACHE=0 turns them off."""
    from rlx.support.files import cache_directory

    return cache_directory(kind)


def kept_files() -> list[Kept]:
    """All of them, the latest first."""
    from rlx.runtime.aot import AotCache

    found = []
    kernels, artifacts = directory("kernels"), AotCache.default()
    for path in [] if kernels is None else kernels.glob(f"??/*{_KERNEL}"):
        info = path.stat()
        found.append(Kept("kernels", path, info.st_size, info.st_mtime))
    for entry in [] if artifacts is None else artifacts.entries():
        found.append(Kept("artifacts", entry.path, entry.num_bytes, entry.used))
    return sorted(found, key=lambda k: (-k.written, k.path))


def faults() -> dict[Path, str]:
    """The files that would not be used, and why."""
    from rlx.codegen.diskcache import DiskCache
    from rlx.runtime.aot import AotCache

    found: dict[Path, str] = {}
    kernels, artifacts = directory("kernels"), AotCache.default()
    if kernels is not None:
        disk = DiskCache(kernels)
        for file in kept_files():
            if file.kind == "kernels" and (why := _kernel_fault(disk, file.path.stem)):
                found[file.path] = why
    return found if artifacts is None else found | artifacts.verify()


def _kernel_fault(disk: object, key: str) -> str:
    from rlx.codegen.diskcache import DiskCache

    assert isinstance(disk, DiskCache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if disk.load(key) is not None:
            return ""
    return str(caught[0].message).rpartition("compiled again: ")[2] if caught else "gone"


def fetched_models() -> list[str]:
    """Models of the catalogue that are here."""
    from rlx.formats.catalogue import CATALOGUE
    from rlx.formats.fetch import models_dir

    return [name for name in CATALOGUE if (models_dir() / name).is_dir()]
