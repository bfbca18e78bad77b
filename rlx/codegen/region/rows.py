"""Nests whose vectors lie along the elements of a row: each row is walked once per pass.

A short row of known size is unrolled and stays in registers. A long one is walked by loops, and
what a later pass wants is kept in the row of a result, on the stack, or in scratch memory of the
worker.
"""

from __future__ import annotations

from functools import reduce
from math import prod

from rlx.codegen.emit import Function, Module, Value, i64
from rlx.codegen.region.body import Body, Frame, Spot
from rlx.codegen.region.folds import Accumulator, State, join_all
from rlx.codegen.region.loops import Loops, Part
from rlx.codegen.region.nest import Arg, Nest, Quantity
from rlx.codegen.region.registers import Element
from rlx.codegen.region.stages import Pass, Stages
from rlx.codegen.region.sweep import Slots, Sweep
from rlx.codegen.region.vectors import lanes_for, masks_tail

CHUNK = 16384  # elements of a long row that one worker takes at a time
STRAIGHT = 8  # vectors of a row that is kept in registers
GRAIN = 1024  # elements below which a second worker is not worth waking
STACK = 32768  # bytes of kept elements that lie on the stack


def stack_bytes(nest: Nest, stages: Stages) -> dict[int, int]:
    """Kept elements that fit on the stack, with their bytes; others need scratch memory."""
    found: dict[int, int] = {}
    for keep in stages.keeps.values():
        sizes = nest.spaces[keep.space]
        if keep.walk is None and all(isinstance(s, int) for s in sizes):
            size = keep.bytes * prod(s for s in sizes if isinstance(s, int))
            if sum(found.values()) + size <= STACK:
                found[keep.number] = size
    return found


def scratch_sizes(nest: Nest) -> list[tuple[tuple[Quantity, ...], int]]:
    """What each worker keeps in scratch memory: sizes of a space, and bytes per element."""
    stages = Stages(nest)
    fitting = stack_bytes(nest, stages)
    keeps = stages.keeps.values()
    rest = [k for k in keeps if k.walk is None and k.number not in fitting]
    return [(nest.spaces[k.space], k.bytes) for k in rest]


class RowEmitter:
    """`scratch` is the arg of an address and that of the bytes each worker has there."""

    def __init__(
        self,
        m: Module,
        nest: Nest,
        scratch: tuple[Arg, Arg] | None = None,
        buffers: bool = True,
        results: bool = True,
    ) -> None:
        self.f: Function = m.kernel()
        self.nest = nest
        self.body = Body(self.f, nest, columns=False)
        self.stages = Stages(nest, buffers, results)
        self.lanes = lanes_for(nest, m.target, columns=False)
        self.masks = masks_tail(nest, m.target, columns=False)
        self.row: dict[int, Element] = {}
        self.spots: dict[int, list[Spot]] = {}
        self.buffers = self._buffers(scratch)

    def _buffers(self, scratch: tuple[Arg, Arg] | None) -> dict[int, Value]:
        """Memory of this worker for elements that are kept."""
        f, body = self.f, self.body
        sizes = stack_bytes(self.nest, self.stages)
        found = {n: f.alloca(size) for n, size in sizes.items() if not self._stays(n)}
        rest = [k for k in self.stages.keeps.values() if k.walk is None and k.number not in sizes]
        if rest:
            assert scratch is not None
            step = f.arg(f["args"], scratch[1].index, i64)
            base = f.gep(f.arg(f["args"], scratch[0].index), f["tid"].to(i64) * step)
            for keep in rest:
                found[keep.number] = base
                base = f.gep(base, body.product(self.nest.spaces[keep.space]), keep.bytes)
        return found

    def _stays(self, number: int) -> bool:
        return self.is_straight(self.stages.keeps[number].space)

    # -- rows ---------------------------------------------------------------------------------

    def emit(self) -> None:
        f, body, nest = self.f, self.body, self.nest
        body.refuse_empty_tables()
        if not nest.rows:
            self._one_row()
            return
        total = body.product(nest.rows)
        if nest.folds or not _is_long(nest.spaces[0][-1]):
            lo, hi = f.split(total)
            for row in f.range(lo, hi):
                self.walk_row(body.at_row(row, nest.rows), None)
            return
        size = body.number(nest.spaces[0][-1])
        chunks = f.ceil_div(size, CHUNK)
        lo, hi = f.split(total * chunks)
        for item in f.range(lo, hi):
            row = item.udiv(chunks)
            start = (item - row * chunks) * CHUNK
            self.walk_row(body.at_row(row, nest.rows), (start, f.min(start + CHUNK, size)))

    def _one_row(self) -> None:
        """No rows to divide: elements are, unless something is folded."""
        f = self.f
        if self.nest.folds or not self.stages.passes:
            f.if_(f["tid"].eq(0), lambda: self.walk_row(self.body.home(), None))
            return
        size = self.body.number(self.nest.spaces[0][-1])
        self.walk_row(self.body.home(), f.split(size, GRAIN))

    def walk_row(self, frame: Frame, part: Part | None) -> None:
        """All passes over one row, or over a part of its elements."""
        self.row, self.spots = {}, {}
        for stage in range(-1, self.stages.last + 1):
            for this in self.stages.passes:
                if this.stage == stage:
                    self.sweep(this, frame, part)
            self.row_values(stage, frame)
            self.row_stores(stage, frame)

    def row_values(self, stage: int, frame: Frame) -> None:
        """Values of the row that are known after a stage."""
        spot = Spot(frame, self.f.i64(0), 1, None, self.row)
        for number in self.stages.row_code(stage):
            self.body.value(number, spot)

    def row_stores(self, stage: int, frame: Frame) -> None:
        spot = Spot(frame, self.f.i64(0), 1, None, self.row)
        for store in self.stages.row_stores(stage):
            self.body.store(store.walk, self.row[store.operand], spot)

    def is_straight(self, space: int) -> bool:
        """Whether rows of the space are short enough to stay in registers."""
        sizes = self.nest.spaces[space]
        if len(sizes) != 1 or not isinstance(sizes[0], int):
            return False
        vectors, rest = divmod(sizes[0], self.lanes)
        spots = vectors + (min(rest, 1) if self.masks else rest)
        heaviest = max(self.stages.weight(p) for p in self.stages.passes if p.space == space)
        return spots <= STRAIGHT and spots * heaviest <= 280

    def sweep(self, this: Pass, frame: Frame, part: Part | None) -> None:
        straight = part is None and self.is_straight(this.space)
        sweep = Sweep(self.body, self.stages, this, self.buffers, keeps=not straight)
        if straight:
            slots, single = self._straight(sweep, frame)
            accumulators = sweep.folds
        else:
            loops = Loops(sweep, self.lanes, self.masks, self.row)
            slots, single = loops.run(frame, part)
            accumulators = loops.outer
        vector = reduce(lambda a, b: join_all(accumulators, a, b), slots)
        for number, a, wide, narrow in zip(this.folds, accumulators, vector, single, strict=True):
            self.folded(number, a, a.join(a.across(wide), narrow))

    def folded(self, number: int, accumulator: Accumulator, state: State) -> None:
        """A fold has ended in this state."""
        self.row[number] = accumulator.result(state)

    def _straight(self, sweep: Sweep, frame: Frame) -> tuple[Slots, list[State]]:
        space = sweep.this.space
        if space not in self.spots:
            self.spots[space] = self._all_spots(frame, space)
        slots, single = [sweep.start(self.lanes)], sweep.start(1)
        for spot in self.spots[space]:
            if spot.lanes == self.lanes:
                slots.append(sweep.element(spot, sweep.start(self.lanes)))
            else:
                single = sweep.element(spot, single)
        return slots[1:] or slots, single

    def _all_spots(self, frame: Frame, space: int) -> list[Spot]:
        f, lanes, [size] = self.f, self.lanes, self.nest.spaces[space]
        assert isinstance(size, int)
        whole = size - size % lanes
        spots = [Spot(frame, f.i64(i), lanes, None, self.row) for i in range(0, whole, lanes)]
        if size - whole > 1 and self.masks:
            mask = f.lane_mask(f.i64(size - whole), lanes)
            return [*spots, Spot(frame, f.i64(whole), lanes, mask, self.row)]
        return spots + [Spot(frame, f.i64(i), 1, None, self.row) for i in range(whole, size)]


def _is_long(size: Quantity) -> bool:
    return not isinstance(size, int) or size > 2 * CHUNK
