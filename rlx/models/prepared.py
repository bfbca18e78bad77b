"""Prepared weights on disk, beside the artifacts: a second start maps them and goes."""

from __future__ import annotations

from pathlib import Path

from rlx.runtime.aot import AotCache
from rlx.runtime.artifact import compiler_stamp
from rlx.runtime.params import ParamStore
from rlx.specialize.key import make_key

_LARGEST = 1 << 29  # bytes; beyond, packing again is cheaper than filling the user's disk


class PreparedWeights:
    """What was packed from one model file in one way. Nothing is kept where the cache is off."""

    def __init__(self, model: Path, *settings: object) -> None:
        files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
        stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
        material = {"files": stats, "settings": [str(s) for s in settings]}
        self._source = make_key("prepared", {**material, "compiler": compiler_stamp()})
        self._name = f"rlx_{make_key('prepared', material)[:16]}"
        self._disk = AotCache.default()
        self._kept: frozenset[str] = frozenset()

    def load(self, params: ParamStore) -> None:
        """Take what an earlier process kept."""
        found = self._disk.load_weights(self._name, self._source) if self._disk else None
        if found:
            params.adopt(found)
            self._kept = frozenset(found)

    def keep(self, params: ParamStore) -> None:
        """Keep what is prepared, unless it is all there."""
        prepared = params.prepared
        if self._disk is None or prepared.keys() <= self._kept:
            return
        self._kept = frozenset(prepared)
        if sum(a.nbytes for a in prepared.values()) <= _LARGEST:
            self._disk.store_weights(self._name, prepared, self._source)
