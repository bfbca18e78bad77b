"""The CPU kernel of a loop nest: which emitter its schedule takes."""

from __future__ import annotations

from functools import cached_property

from rlx.backends.cpu.kernels.loops.column_tiles import ColumnTileEmitter, is_tall
from rlx.backends.cpu.kernels.loops.lane_rows import LaneRowEmitter
from rlx.backends.cpu.kernels.loops.rows import RowEmitter, StreamingStoreEmitter
from rlx.backends.cpu.kernels.loops.split_rows import Split, SplitRowEmitter
from rlx.backends.cpu.kernels.loops.transpose_tiles import TransposeEmitter
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.llvm.builder import Module
from rlx.loops.nest import Apply, Arg, Nest, Reduce
from rlx.support.records import dataclass


@dataclass(frozen=True)
class NestKernel(KernelSpec):
    """args: those of the nest; then the scratch address and bytes per worker (`scratch`), or those
    of `split`.

    With `streaming`, results are written by streaming stores."""

    nest: Nest
    columns: bool = False
    scratch: tuple[Arg, Arg] | None = None
    split: Split | None = None
    streaming: bool = False

    def emit(self, m: Module) -> None:
        if self.columns:
            tall = self.split is not None or is_tall(self.nest)
            made = (
                ColumnTileEmitter(m, self.nest, self.split)
                if tall
                else LaneRowEmitter(m, self.nest)
            )
            made.emit()
        elif self.split is not None:
            SplitRowEmitter(m, self.nest, self.split).emit()
        elif self.nest.tiled:
            TransposeEmitter(m, self.nest).emit()
        elif self.streaming:
            StreamingStoreEmitter(m, self.nest).emit()
        else:
            RowEmitter(m, self.nest, self.scratch).emit()

    @cached_property
    def _hash(self) -> int:
        return hash((self.nest, self.columns, self.scratch, self.split, self.streaming))

    def __hash__(self) -> int:
        return self._hash

    @property
    def label(self) -> str:
        names = [i.record.name for i in self.nest.code if isinstance(i, Apply)]
        names += [i.kind for i in self.nest.code if isinstance(i, Reduce)]
        return f"region({', '.join(list(dict.fromkeys(names))[:6]) or 'copy'})"
