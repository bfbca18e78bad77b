"""The packed-weight cache: weights packed by one process are mapped from disk by the next."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rlx.runtime.aot import AotCache
from rlx.runtime.artifact import compiler_stamp
from rlx.runtime.params import ParamStore
from rlx.specialize.key import make_key
from rlx.support.settings import debug, mebibytes


class PackedWeightCache:
    """Packed weights of a model on disk, by its files and by `settings`. Stores nothing where the
    cache is off or the disk is nearly full."""

    def __init__(self, files: Sequence[Path], *settings: object) -> None:
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(files)]
        material = {"files": stats, "settings": [str(s) for s in settings]}
        self._source = make_key("prepared", {**material, "compiler": compiler_stamp()})
        self._name = f"rlx_{make_key('prepared', material)[:16]}"
        self._disk = AotCache.default()
        self._kept: frozenset[str] = frozenset()

    def load(self, params: ParamStore) -> None:
        """Map what an earlier process stored."""
        found = self._disk.load_weights(self._name, self._source) if self._disk else None
        if found:
            params.adopt(found)
            self._kept = frozenset(found)

    def store(self, params: ParamStore) -> None:
        """Store packed weights unless they are there, and map them from disk: such memory can be
        reclaimed by the system, and is shared between processes."""
        names = params.prepared_names
        if self._disk is None or names <= self._kept:
            return
        self._kept, prepared = names, params.prepared
        if not self._has_room(self._disk, sum(a.nbytes for a in prepared.values())):
            return
        if self._disk.store_weights(self._name, prepared, self._source):
            mapped = self._disk.load_weights(self._name, self._source, check=False)
            params.adopt(mapped or {}, instead=True)

    def _has_room(self, disk: AotCache, size: int) -> bool:
        """Whether they neither fill the cache nor the disk."""
        most = min(mebibytes("RLX_CACHE_WEIGHTS", 0), disk.limit_bytes)
        place = next(p for p in (disk.root, *disk.root.parents) if p.exists())
        free = shutil.disk_usage(place).free
        if size <= most and 2 * size <= free:
            return True
        debug(
            1,
            f"packed weights not stored: {size >> 20} MiB, {most >> 20} allowed, {free >> 20} free",
        )
        return False
