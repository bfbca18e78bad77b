"""Rows that are few and long: each is cut into parts, so that every worker has some.

What a row needs in one go becomes one kernel per stage. A kernel leaves the states of its folds,
one for each part, in memory; the next one joins them, part by part, before it goes on. The order is
fixed by the number of parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.codegen.emit import Module, Value, i64
from rlx.codegen.region.body import Frame
from rlx.codegen.region.folds import Accumulator, State
from rlx.codegen.region.loops import Loops
from rlx.codegen.region.nest import ROW, Arg, Nest
from rlx.codegen.region.rows import RowEmitter
from rlx.codegen.region.stages import Pass, Stages
from rlx.codegen.region.sweep import Sweep
from rlx.support.records import dataclass

CELL = 8  # bytes of a number of a state in memory


@dataclass(frozen=True)
class Split:
    """The args of a kernel that takes parts: memory for states, parts, and the size of a part."""

    stage: int
    memory: Arg
    parts: Arg
    chunk: Arg


def last_stage(nest: Nest) -> int:
    """The last kernel of a nest that is cut into parts."""
    stages = Stages(nest, buffers=False)
    after = [stages.stage[s.operand] + 1 for s in nest.stores if s.level == ROW]
    return max([p.stage for p in stages.passes] + after)


class PartEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest, split: Split) -> None:
        super().__init__(m, nest, None, buffers=False)
        f = self.f
        self.split = split
        self.memory = f.arg(f["args"], split.memory.index)
        self.parts = f.arg(f["args"], split.parts.index, i64)
        self.chunk = f.arg(f["args"], split.chunk.index, i64)
        self.total = self.body.product(nest.rows)
        self.cell = f.i64(0)  # number of this row and part, of all

    def emit(self) -> None:
        f, body = self.f, self.body
        body.refuse_empty_tables()
        lo, hi = f.split(self.total * self.parts)
        for item in f.range(lo, hi):
            row = item.udiv(self.parts)
            part = item - row * self.parts
            self.cell = item
            frame = body.at_row(row, self.nest.rows) if self.nest.rows else body.home()
            self._part(frame, row, part)

    def _part(self, frame: Frame, row: Value, part: Value) -> None:
        self.row, self.spots = {}, {}
        self.row_values(-1, frame)
        for stage in range(self.split.stage):
            for this in self._passes(stage):
                for number, a in self._accumulators(this):
                    self.row[number] = a.result(self._joined(number, a, row))
            self.row_values(stage, frame)
        before = self.split.stage - 1
        self.f.if_(part.eq(0), lambda: self.row_stores(before, frame))
        start = part * self.chunk
        for this in self._passes(self.split.stage):
            size = self.body.number(self.nest.spaces[this.space][0])
            lo = self.f.min(start, size)
            self.sweep(this, frame, (lo, self.f.min(start + self.chunk, size)))

    def _passes(self, stage: int) -> list[Pass]:
        return [p for p in self.stages.passes if p.stage == stage]

    def _accumulators(self, this: Pass) -> Iterator[tuple[int, Accumulator]]:
        """As the pass itself makes them."""
        sweep = Sweep(self.body, self.stages, this, {}, keeps=True)
        loops = Loops(sweep, self.lanes, self.masks, self.row)
        yield from zip(this.folds, loops.outer, strict=True)

    # -- states in memory -----------------------------------------------------------------------

    def folded(self, number: int, accumulator: Accumulator, state: State) -> None:
        for k, value in enumerate(state):
            self.f.store(value, self._cell(number, k, self.cell))

    def _joined(self, number: int, a: Accumulator, row: Value) -> State:
        """The states of all parts of a row as one."""
        f, types = self.f, a.types(1)
        first = row * self.parts

        def read(part: Value) -> State:
            return [f.load(self._cell(number, k, first + part), t) for k, t in enumerate(types)]

        return f.loop(0, self.parts, 1, a.start(1), lambda i, *s: a.join(list(s), read(i)))

    def _cell(self, number: int, component: int, cell: Value) -> Value:
        before = self._components(number) + component
        return self.f.gep(self.memory, self.total * self.parts * before + cell, CELL)

    def _components(self, number: int) -> int:
        """Numbers of states of the folds before this one."""
        found = [pair for p in self.stages.passes for pair in self._accumulators(p)]
        return sum(len(a.types(1)) for n, a in found if n < number)


def cells(nest: Nest) -> int:
    """Numbers of a row's or column's states, all folds together: two at most for each."""
    return 2 * sum(len(p.folds) for p in Stages(nest, buffers=False).passes)
