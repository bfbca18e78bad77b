"""What RLX caches on disk: compiled kernels, artifacts of whole variants, fetched models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.backends.inspection import CachedFile, Inspection

KINDS = ("kernels", "artifacts")


def cached_files() -> list[CachedFile]:
    """All kernels and artifacts, the latest first."""
    from rlx.backends.inspection import CachedFile
    from rlx.runtime.aot import AotCache

    found = _inspection().cached_kernels()
    artifacts = AotCache.default()
    for entry in [] if artifacts is None else artifacts.entries():
        found.append(CachedFile("artifacts", entry.path, entry.num_bytes, entry.used))
    return sorted(found, key=lambda file: (-file.written, file.path))


def damaged_files() -> dict[Path, str]:
    """The files that cannot be used, and why."""
    from rlx.runtime.aot import AotCache

    found, artifacts = _inspection().damaged_kernels(), AotCache.default()
    return found if artifacts is None else found | artifacts.verify()


def _inspection() -> Inspection:
    from rlx.backends.registry import Device

    return Device.of("cpu").backend.inspection()


def fetched_models() -> list[str]:
    """Models of the catalogue that are in the cache."""
    from rlx.formats.catalogue import CATALOGUE
    from rlx.formats.fetch import models_dir

    return [name for name in CATALOGUE if (models_dir() / name).is_dir()]
