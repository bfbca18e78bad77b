"""Nests vectorised across rows: each lane is a row, and reductions are sequential in each lane."""

from __future__ import annotations

from rlx.backends.cpu.kernels.loops.vector_body import CarriedStates, VectorBody, flatten, unflatten
from rlx.llvm.builder import Function, Module, Value
from rlx.llvm.nest.instructions import IterPoint, NestBody, VectorPoint
from rlx.llvm.nest.registers import Element, lanes_for, masks_tail
from rlx.loops.nest import Nest
from rlx.loops.stages import Pass, Stages

VECTORS = 4  # vectors side by side: a cache line or more of each tensor


class LaneRowEmitter:
    def __init__(self, m: Module, nest: Nest) -> None:
        self.f: Function = m.kernel()
        self.nest = nest
        self.body = NestBody(self.f, nest, columns=True)
        self.stages = Stages(nest, buffers=False)
        self.lanes = lanes_for(nest, m.target, columns=True)
        self.masks = masks_tail(nest, m.target, columns=True)
        heaviest = max((self.stages.code_size(p) for p in self.stages.passes), default=0)
        self.vectors = VECTORS if heaviest <= 14 else 2 if heaviest <= 48 else 1

    def emit(self) -> None:
        """A work item is a block of columns."""
        f, body = self.f, self.body
        body.reject_empty_gathers()
        *others, last = self.nest.rows
        width, size = self.lanes * self.vectors, body.number(last)
        blocks = f.ceil_div(size, width)
        lo, hi = f.split(body.product(others) * blocks)
        for item in f.range(lo, hi):
            row = item.udiv(blocks)
            point = body.at_row(row, others) if others else body.origin()
            start = (item - row * blocks) * width
            f.if_(
                start + width <= size,
                lambda point=point, start=start: self._columns(  # type: ignore[misc]
                    self._vpoints(point, start, self.lanes, None, self.vectors)
                ),
                lambda point=point, start=start: self._rest(point, start, size),  # type: ignore[misc]
            )

    def _rest(self, point: IterPoint, start: Value, size: Value) -> None:
        """The last block, with fewer columns."""
        f, lanes = self.f, self.lanes
        if self.masks:
            for i in f.range(start, size, lanes):
                self._columns(self._vpoints(point, i, lanes, f.lane_mask(size - i, lanes), 1))
            return
        whole = start + (size - start & -lanes)
        if self.vectors > 1 and lanes > 1:
            for i in f.range(start, whole, lanes):
                self._columns(self._vpoints(point, i, lanes, None, 1))
            start = whole
        for i in f.range(start, size):
            self._columns(self._vpoints(point, i, 1, None, 1))

    def _vpoints(
        self, point: IterPoint, start: Value, lanes: int, mask: Value | None, count: int
    ) -> list[VectorPoint]:
        return [VectorPoint(point, start + k * lanes, lanes, mask, {}) for k in range(count)]

    def _columns(self, vpoints: list[VectorPoint]) -> None:
        """All passes for some vectors of rows."""
        self._after(-1, vpoints)
        for stage in range(self.stages.last + 1):
            for pass_ in self.stages.passes:
                if pass_.stage == stage:
                    self._emit_pass(pass_, vpoints)
            self._after(stage, vpoints)

    def _after(self, stage: int, vpoints: list[VectorPoint]) -> None:
        """Row values that are known after a stage, and their stores."""
        for vpoint in vpoints:
            for number in self.stages.row_code(stage):
                self.body.value(number, vpoint)
            for store in self.stages.row_stores(stage):
                self.body.store(store.access, vpoint.row[store.operand], vpoint)

    def _emit_pass(self, pass_: Pass, vpoints: list[VectorPoint]) -> None:
        vector_body = VectorBody(self.body, self.stages, pass_, {}, spills=True)
        carry = [vector_body.start(vpoint.lanes) for vpoint in vpoints]
        states = self._axes(vector_body, vpoints, vpoints[0].point, 0, carry)
        for vpoint, slot in zip(vpoints, states, strict=True):
            for number, a, state in zip(
                pass_.reductions, vector_body.accumulators, slot, strict=True
            ):
                found: Element = a.result(state)
                vpoint.row[number] = found

    def _axes(
        self,
        vector_body: VectorBody,
        vpoints: list[VectorPoint],
        point: IterPoint,
        position: int,
        carry: CarriedStates,
    ) -> CarriedStates:
        """Loops over the axes of the space from `position` on; the body is one element per lane."""
        space = vector_body.pass_.space
        sizes = self.nest.spaces[space]
        if position == len(sizes):
            here = [VectorPoint(point, s.index, s.lanes, s.mask, s.row) for s in vpoints]
            return [vector_body.emit(s, states) for s, states in zip(here, carry, strict=True)]

        def body(index: Value, *values: Value) -> list[Value]:
            inner_point = self.body.advance(point, space, position, index)
            return flatten(
                self._axes(
                    vector_body, vpoints, inner_point, position + 1, unflatten(values, carry)
                )
            )

        size = self.body.number(sizes[position])
        return unflatten(self.f.loop(0, size, 1, flatten(carry), body), carry)
