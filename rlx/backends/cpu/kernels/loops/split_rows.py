"""Few long rows: each row is split over the workers, as split-K does for a matmul.

Each stage of the row is a kernel of its own. A kernel stores the accumulator states of its
reductions, one per split, in scratch memory; the next one combines them, in the order of splits,
before it goes on. Splits are the segments of the row (`rows`), so that the result is that of one
worker.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.backends.cpu.kernels.loops.rows import PassLoops, RowEmitter, joined_lanes, segment_size
from rlx.backends.cpu.kernels.loops.vector_body import VectorBody
from rlx.llvm.builder import Module, Value
from rlx.llvm.nest.instructions import IterPoint
from rlx.llvm.nest.reductions import Accumulator, State
from rlx.loops.nest import ROW, Arg, Nest
from rlx.loops.stages import Pass, Stages
from rlx.support.records import dataclass

STATE_SLOT = 8  # bytes of one component of a state in memory


@dataclass(frozen=True)
class Split:
    """Extra arguments of a split kernel: scratch memory; of columns also the number of splits and
    the elements of a split, which those of a row derive from its size."""

    stage: int
    memory: Arg
    count: Arg
    chunk: Arg


def last_stage(nest: Nest) -> int:
    """The stage of the last kernel of a split nest."""
    stages = Stages(nest, buffers=False)
    after = [stages.stage[s.operand] + 1 for s in nest.stores if s.level == ROW]
    return max([p.stage for p in stages.passes] + after)


class SplitRowEmitter(RowEmitter):
    def __init__(self, m: Module, nest: Nest, split: Split) -> None:
        super().__init__(m, nest, None, buffers=False)
        f = self.f
        self.split = split
        self.memory = f.arg(f["args"], split.memory.index)
        size, axes = self.body.number(nest.spaces[0][0]), len(nest.spaces[0])
        self.chunk = segment_size(f, size, axes)
        self.splits = f.max((size + self.chunk - 1).udiv(self.chunk), 1)
        self.total = self.body.product(nest.rows)
        self.slot = f.i64(0)  # linear index of (row, split)

    def emit(self) -> None:
        f, body = self.f, self.body
        body.reject_empty_gathers()
        # a last kernel that stores results of rows alone combines their states once
        splits = self.splits if self._passes(self.split.stage) else f.i64(1)
        lo, hi = f.split(self.total * splits)
        streams = self._streams()

        def work(item: Value) -> Value:
            row = item.udiv(splits)
            split_id = item - row * splits
            self.slot = item
            point = body.at_row(row, self.nest.rows) if self.nest.rows else body.origin()
            if streams == 1:
                self._emit_split(point, row, split_id, 1)
                return item + 1
            # the last split of a row may be shorter
            whole = (item + streams <= hi) & (split_id + streams < splits)
            count = f.carry()
            for together in f.either(whole, count):
                self._emit_split(point, row, split_id, streams if together else 1)
                count.values = [f.i64(streams if together else 1)]
            return item + count.values[0]

        f.while_([lo], lambda item: item < hi, work)

    def _streams(self) -> int:
        """Splits that a worker runs side by side."""
        found = [self._loops(p).streams for p in self._passes(self.split.stage)]
        return min(found, default=1)

    def _emit_split(self, point: IterPoint, row: Value, split_id: Value, count: int) -> None:
        """`count` splits from `split_id` on."""
        self.row, self.vpoints = {}, {}
        self.row_values(-1, point)
        for stage in range(self.split.stage):
            for pass_ in self._passes(stage):
                for number, a in self._accumulators(pass_):
                    self.row[number] = a.result(self._combined(number, a, row))
            self.row_values(stage, point)
        before = self.split.stage - 1
        self.f.if_(split_id.eq(0), lambda: self.row_stores(before, point))
        start = split_id * self.chunk
        for pass_ in self._passes(self.split.stage):
            if count > 1:
                self._emit_streams(pass_, point, start)
                continue
            size = self.body.number(self.nest.spaces[pass_.space][0])
            lo = self.f.min(start, size)
            self.emit_pass(pass_, point, (lo, self.f.min(start + self.chunk, size)))

    def _emit_streams(self, pass_: Pass, point: IterPoint, start: Value) -> None:
        loops, slot = self._loops(pass_), self.slot
        for number, carried in enumerate(loops.run_streams(point, start, self.chunk)):
            self.slot = slot + number
            states = joined_lanes(loops.outer, carried, loops.single())
            for n, a, state in zip(pass_.reductions, loops.outer, states, strict=True):
                self.finish_reduction(n, a, state)
        self.slot = slot

    def _passes(self, stage: int) -> list[Pass]:
        return [p for p in self.stages.passes if p.stage == stage]

    def _accumulators(self, pass_: Pass) -> Iterator[tuple[int, Accumulator]]:
        """The accumulators, of the same types as in the pass itself."""
        yield from zip(pass_.reductions, self._loops(pass_).outer, strict=True)

    def _loops(self, pass_: Pass) -> PassLoops:
        vector_body = VectorBody(self.body, self.stages, pass_, self.buffers, spills=True)
        return PassLoops(vector_body, self.lanes, self.masks, self.row)

    # -- states in memory -----------------------------------------------------------------------

    def finish_reduction(self, number: int, accumulator: Accumulator, state: State) -> None:
        for k, value in enumerate(state):
            self.f.store(value, self._slot_address(number, k, self.slot))

    def _combined(self, number: int, a: Accumulator, row: Value) -> State:
        """The combined state of all splits of a row."""
        f, types = self.f, a.types(1)
        first = row * self.splits

        def read(split_id: Value) -> State:
            return [
                f.load(self._slot_address(number, k, first + split_id), t)
                for k, t in enumerate(types)
            ]

        return f.loop(0, self.splits, 1, a.start(1), lambda i, *s: a.combine(list(s), read(i)))

    def _slot_address(self, number: int, component: int, slot: Value) -> Value:
        before = self._components(number) + component
        return self.f.gep(self.memory, self.total * self.splits * before + slot, STATE_SLOT)

    def _components(self, number: int) -> int:
        """State components of the reductions before this one."""
        found = [pair for p in self.stages.passes for pair in self._accumulators(p)]
        return sum(len(a.types(1)) for n, a in found if n < number)


def state_slots(nest: Nest) -> int:
    """Upper bound of state components per row: two for each reduction."""
    return 2 * sum(len(p.reductions) for p in Stages(nest, buffers=False).passes)
