"""The kernel of a nest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlx.codegen.emit import Module
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.region.columns import ColumnEmitter
from rlx.codegen.region.nest import Apply, Fold, Nest, Word
from rlx.codegen.region.rows import RowEmitter


@dataclass(frozen=True)
class Region(KernelSpec):
    """words: as the nest numbers them; then, where `scratch` names them, the address of scratch
    memory and the bytes each worker has of it."""

    nest: Nest
    columns: bool = False
    scratch: tuple[Word, Word] | None = None

    def emit(self, m: Module) -> None:
        if self.columns:
            ColumnEmitter(m, self.nest).emit()
        else:
            RowEmitter(m, self.nest, self.scratch).emit()

    @cached_property
    def _hash(self) -> int:
        return hash((self.nest, self.columns, self.scratch))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        names = [i.record.name for i in self.nest.code if isinstance(i, Apply)]
        names += [i.kind for i in self.nest.code if isinstance(i, Fold)]
        return f"region({', '.join(list(dict.fromkeys(names))[:6]) or 'copy'})"
