"""Nests whose vectors lie along a row axis: each lane is a row of its own, and what is folded is
walked one element at a time."""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.instructions import Body, Frame, Spot
from rlx.backends.cpu.kernels.loops.registers import Element, lanes_for, masks_tail
from rlx.backends.cpu.kernels.loops.vector_body import Slots, Sweep, flatten, shaped
from rlx.llvm.builder import Function, Module, Value
from rlx.loops.nest import Nest
from rlx.loops.stages import Pass, Stages

VECTORS = 4  # columns of vectors that are walked together: a cache line or more of each tensor


class ColumnEmitter:
    def __init__(self, m: Module, nest: Nest) -> None:
        self.f: Function = m.kernel()
        self.nest = nest
        self.body = Body(self.f, nest, columns=True)
        self.stages = Stages(nest, buffers=False)
        self.lanes = lanes_for(nest, m.target, columns=True)
        self.masks = masks_tail(nest, m.target, columns=True)
        heaviest = max((self.stages.weight(p) for p in self.stages.passes), default=0)
        self.vectors = VECTORS if heaviest <= 14 else 2 if heaviest <= 48 else 1

    def emit(self) -> None:
        """Items of work are blocks of columns."""
        f, body = self.f, self.body
        body.refuse_empty_tables()
        *others, last = self.nest.rows
        width, size = self.lanes * self.vectors, body.number(last)
        blocks = f.ceil_div(size, width)
        lo, hi = f.split(body.product(others) * blocks)
        for item in f.range(lo, hi):
            row = item.udiv(blocks)
            frame = body.at_row(row, others) if others else body.home()
            start = (item - row * blocks) * width
            f.if_(
                start + width <= size,
                lambda frame=frame, start=start: self._columns(  # type: ignore[misc]
                    self._spots(frame, start, self.lanes, None, self.vectors)
                ),
                lambda frame=frame, start=start: self._rest(frame, start, size),  # type: ignore[misc]
            )

    def _rest(self, frame: Frame, start: Value, size: Value) -> None:
        """Fewer columns than a block has."""
        f, lanes = self.f, self.lanes
        if self.masks:
            for i in f.range(start, size, lanes):
                self._columns(self._spots(frame, i, lanes, f.lane_mask(size - i, lanes), 1))
            return
        whole = start + (size - start & -lanes)
        if self.vectors > 1 and lanes > 1:
            for i in f.range(start, whole, lanes):
                self._columns(self._spots(frame, i, lanes, None, 1))
            start = whole
        for i in f.range(start, size):
            self._columns(self._spots(frame, i, 1, None, 1))

    def _spots(
        self, frame: Frame, start: Value, lanes: int, mask: Value | None, count: int
    ) -> list[Spot]:
        return [Spot(frame, start + k * lanes, lanes, mask, {}) for k in range(count)]

    def _columns(self, spots: list[Spot]) -> None:
        """All passes over the rows of some vectors."""
        self._after(-1, spots)
        for stage in range(self.stages.last + 1):
            for this in self.stages.passes:
                if this.stage == stage:
                    self._sweep(this, spots)
            self._after(stage, spots)

    def _after(self, stage: int, spots: list[Spot]) -> None:
        """Values of the rows that are known now."""
        for spot in spots:
            for number in self.stages.row_code(stage):
                self.body.value(number, spot)
            for store in self.stages.row_stores(stage):
                self.body.store(store.walk, spot.row[store.operand], spot)

    def _sweep(self, this: Pass, spots: list[Spot]) -> None:
        sweep = Sweep(self.body, self.stages, this, {}, keeps=True)
        carry = [sweep.start(spot.lanes) for spot in spots]
        states = self._axes(sweep, spots, spots[0].frame, 0, carry)
        for spot, slot in zip(spots, states, strict=True):
            for number, a, state in zip(this.folds, sweep.folds, slot, strict=True):
                found: Element = a.result(state)
                spot.row[number] = found

    def _axes(
        self, sweep: Sweep, spots: list[Spot], frame: Frame, position: int, carry: Slots
    ) -> Slots:
        """Loops over the axes of the space from `position` on; inside, one element of each row."""
        space = sweep.this.space
        sizes = self.nest.spaces[space]
        if position == len(sizes):
            here = [Spot(frame, s.index, s.lanes, s.mask, s.row) for s in spots]
            return [sweep.element(s, states) for s, states in zip(here, carry, strict=True)]

        def body(index: Value, *values: Value) -> list[Value]:
            moved = self.body.move(frame, space, position, index)
            return flatten(self._axes(sweep, spots, moved, position + 1, shaped(values, carry)))

        size = self.body.number(sizes[position])
        return shaped(self.f.loop(0, size, 1, flatten(carry), body), carry)
