"""Nests whose results are far larger than the caches: vectors are stored past them, which saves
reading every line before it is written."""

from __future__ import annotations

from rlx.codegen.emit import Module, Value
from rlx.codegen.region.nest import Nest, Walk
from rlx.codegen.region.rows import RowEmitter, stack_bytes
from rlx.codegen.region.stages import Stages
from rlx.codegen.storage import is_aligned


def can_stream(nest: Nest) -> bool:
    """Whether vectors of results are stored as a whole, and the stack holds what is kept."""
    stages = Stages(nest, results=False)
    fits = len(stack_bytes(nest, stages)) == len(stages.keeps)
    return fits and not nest.tiled and any(_is_whole(s.walk) for s in nest.stores)


def _is_whole(walk: Walk) -> bool:
    """Whether neighbours in the vector are neighbours in memory."""
    return walk.steps.between_lanes(columns=False) == 1


class StreamEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest) -> None:
        super().__init__(m, nest, results=False)

    def emit(self) -> None:
        self.f.if_(self._is_aligned(), self._stream, super().emit)

    def _stream(self) -> None:
        self.body.streams = True
        super().emit()
        self.body.streams = False
        self.f.fence()  # such stores are ordered by nothing else

    def _is_aligned(self) -> Value:
        """Whether every whole vector lies within a line, as these stores demand."""
        body, found = self.body, list[Value]()
        start = body.home()
        for walk in [s.walk for s in self.nest.stores if _is_whole(s.walk)]:
            steps = (*walk.steps.rows, *walk.steps.inner[:-1])
            found += [start.pointers[walk], *(body.number(s) * walk.dtype.bytes for s in steps)]
        return is_aligned(self.f, found)
