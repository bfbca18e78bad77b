"""The kernel of a nest."""

from __future__ import annotations

from functools import cached_property

from rlx.codegen.emit import Module
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.region.columns import ColumnEmitter
from rlx.codegen.region.nest import Apply, Arg, Fold, Nest
from rlx.codegen.region.parts import PartEmitter, Split
from rlx.codegen.region.rows import RowEmitter
from rlx.codegen.region.stream import StreamEmitter
from rlx.codegen.region.strips import StripEmitter, is_tall
from rlx.codegen.region.tiles import TileEmitter
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Region(KernelSpec):
    """args: as the nest numbers them; then those that `scratch` names, the address of scratch
    memory and the bytes each worker has of it, or those of `split`.

    A kernel that `streams` writes results past the caches."""

    nest: Nest
    columns: bool = False
    scratch: tuple[Arg, Arg] | None = None
    split: Split | None = None
    streams: bool = False

    def emit(self, m: Module) -> None:
        if self.columns:
            tall = self.split is not None or is_tall(self.nest)
            made = StripEmitter(m, self.nest, self.split) if tall else ColumnEmitter(m, self.nest)
            made.emit()
        elif self.split is not None:
            PartEmitter(m, self.nest, self.split).emit()
        elif self.nest.tiled:
            TileEmitter(m, self.nest).emit()
        elif self.streams:
            StreamEmitter(m, self.nest).emit()
        else:
            RowEmitter(m, self.nest, self.scratch).emit()

    @cached_property
    def _hash(self) -> int:
        return hash((self.nest, self.columns, self.scratch, self.split, self.streams))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        names = [i.record.name for i in self.nest.code if isinstance(i, Apply)]
        names += [i.kind for i in self.nest.code if isinstance(i, Fold)]
        return f"region({', '.join(list(dict.fromkeys(names))[:6]) or 'copy'})"
