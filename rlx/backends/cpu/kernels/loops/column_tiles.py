"""Nests vectorised across rows: each lane is a row, and reductions are sequential in each lane.

Tall nests are traversed in memory order, in tiles of columns. Accumulator states, one per column of
a tile, are then on the stack between two rows of memory, as are column values that later passes
need. f32 sums accumulate in f64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.backends.cpu.kernels.loops.split_rows import STATE_SLOT, Split
from rlx.backends.cpu.kernels.loops.vector_body import CarriedStates, VectorBody, flatten, unflatten
from rlx.ir.dtype import DType, bool_
from rlx.llvm.builder import Function, Module, Type, Value, i8, i64, ptr
from rlx.llvm.nest.instructions import IterPoint, NestBody, VectorPoint
from rlx.llvm.nest.reductions import Accumulator, State
from rlx.llvm.nest.registers import (
    Element,
    joined,
    lanes_for,
    masks_tail,
    parts,
    register_type,
    spread,
)
from rlx.loops.nest import ROW, Apply, BoundsCheck, Nest, Reduce
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


WIDTH = 1024  # columns of a tile: some kilobytes of each row of memory
ROWS_PER_STEP = 4  # rows of memory reduced in registers before the states are updated
MAX_REGISTER_ROWS = 64  # up to so many rows, states stay in registers (`LaneRowEmitter`)


def is_tall(nest: Nest) -> bool:
    """Whether columns are too long for the loops of `LaneRowEmitter`."""
    for sizes in nest.spaces:
        total = 1
        for size in sizes:
            if not isinstance(size, int):
                return True
            total *= size
        if total > MAX_REGISTER_ROWS:
            return True
    return False


class ColumnTileEmitter:
    def __init__(self, m: Module, nest: Nest, split: Split | None = None) -> None:
        self.f: Function = m.kernel()
        self.nest, self.split = nest, split
        self.body = NestBody(self.f, nest, columns=True)
        self.stages = Stages(nest, buffers=False)
        self.lanes = lanes_for(nest, m.target, columns=True)
        self.masks = masks_tail(nest, m.target, columns=True)
        self.spilled = self._row_buffers()
        self.states = {
            (n, k): self.f.alloca(WIDTH * t.bytes)
            for p in self.stages.passes
            for n, a in self._accumulators(p)
            for k, t in enumerate(a.types(1))
        }
        self.point, self.start, self.stop = IterPoint({}), self.f.i64(0), self.f.i64(0)
        self.ready: set[int] = set()  # column values already spilled

    def _row_buffers(self) -> dict[int, list[Value]]:
        """Spill buffers for reductions, and for column values that elements use."""
        used = {a for i in self.nest.code if i.level != ROW for a in i.args}
        found: dict[int, list[Value]] = {}
        for n, i in enumerate(self.nest.code):
            is_made = i.level == ROW and isinstance(i, (Apply, BoundsCheck)) and n in used
            if is_made or isinstance(i, Reduce):
                found[n] = [self.f.alloca(WIDTH * t.bytes) for t in _memory_types(i.dtype)]
        return found

    def _accumulators(self, pass_: Pass) -> list[tuple[int, Accumulator]]:
        vector_body = VectorBody(self.body, self.stages, pass_, {}, spills=True, wide=True)
        return list(zip(pass_.reductions, vector_body.accumulators, strict=True))

    # -- tiles --------------------------------------------------------------------------------

    def emit(self) -> None:
        f, body = self.f, self.body
        body.reject_empty_gathers()
        *others, last = self.nest.rows
        size = body.number(last)
        blocks = f.ceil_div(size, WIDTH)
        count = body.product(others) * blocks
        splits = self._arg(self.split.count.index) if self.split is not None else f.i64(1)
        lo, hi = f.split(count * splits)
        for item in f.range(lo, hi):
            tile = item.udiv(splits)
            row = tile.udiv(blocks)
            self.point = body.at_row(row, others) if others else body.origin()
            self.start = (tile - row * blocks) * WIDTH
            self.stop = f.min(self.start + WIDTH, size)
            if self.split is None:
                self._emit_tile()
            else:
                self._emit_split(self.split, item - tile * splits, splits, row * size)

    def _arg(self, index: int) -> Value:
        return self.f.arg(self.f["args"], index, i64)

    def _emit_tile(self) -> None:
        self.ready = set()
        for stage in range(-1, self.stages.last + 1):
            for pass_ in self._passes(stage):
                self._emit_pass(pass_, None)
                self._finish(pass_, self._load_state)
            self._values(stage)
            self._stores(stage)

    def _passes(self, stage: int) -> list[Pass]:
        return [p for p in self.stages.passes if p.stage == stage]

    def _each(self, point: IterPoint, body: Callable[[VectorPoint], None]) -> None:
        """Emit `body` for all columns of the tile, with a masked or scalar tail."""
        f, lanes = self.f, self.lanes
        whole = self.start + (self.stop - self.start & -lanes)
        for i in f.range(self.start, whole, lanes):
            body(self._vpoint(point, i, lanes, None))
        if self.masks and lanes > 1:
            mask = f.lane_mask(self.stop - whole, lanes)
            f.if_(whole < self.stop, lambda: body(self._vpoint(point, whole, lanes, mask)))
            return
        for i in f.range(whole if lanes > 1 else self.stop, self.stop):
            body(self._vpoint(point, i, 1, None))

    def _vpoint(
        self, point: IterPoint, index: Value, lanes: int, mask: Value | None
    ) -> VectorPoint:
        return VectorPoint(point, index, lanes, mask, {}, reload=self._reload)

    # -- one pass -----------------------------------------------------------------------------

    def _emit_pass(self, pass_: Pass, bounds: tuple[Value, Value] | None) -> None:
        """All elements of the tile, or a range of the outermost axis."""
        vector_body = VectorBody(self.body, self.stages, pass_, {}, spills=True, wide=True)
        if pass_.reductions:
            self._each(self.point, lambda vpoint: self._begin(vector_body, vpoint))
        self._axes(vector_body, self.point, 0, bounds)

    def _begin(self, vector_body: VectorBody, vpoint: VectorPoint) -> None:
        for number, state in zip(
            vector_body.pass_.reductions, vector_body.start(vpoint.lanes), strict=True
        ):
            self._store_state(number, state, vpoint)

    def _axes(
        self,
        vector_body: VectorBody,
        point: IterPoint,
        position: int,
        bounds: tuple[Value, Value] | None,
    ) -> None:
        f, space = self.f, vector_body.pass_.space
        sizes = self.nest.spaces[space]
        lo, hi = bounds or (f.i64(0), self.body.number(sizes[position]))
        if position < len(sizes) - 1:
            for i in f.range(lo, hi):
                self._axes(
                    vector_body, self.body.advance(point, space, position, i), position + 1, None
                )
            return
        step = ROWS_PER_STEP if self.stages.code_size(vector_body.pass_) <= 14 else 1
        whole = lo + (hi - lo & -step)
        for i in f.range(lo, whole, step):
            self._rows(vector_body, point, position, [i + k for k in range(step)])
        # the rest is one step too: zeros that pad a column do not change its sum
        for count in range(1, step):
            rest = [whole + k for k in range(count)]
            f.if_(
                (hi - whole).eq(count),
                lambda rest=rest: self._rows(vector_body, point, position, rest),  # type: ignore[misc]
            )

    def _rows(
        self, vector_body: VectorBody, point: IterPoint, position: int, indices: list[Value]
    ) -> None:
        """All columns at some indices of the innermost axis."""
        points = [self.body.advance(point, vector_body.pass_.space, position, i) for i in indices]
        self._each(point, lambda vpoint: self._elements(vector_body, vpoint, points))

    def _elements(
        self, vector_body: VectorBody, vpoint: VectorPoint, points: list[IterPoint]
    ) -> None:
        """Reduce a few rows in registers, then update the states in memory."""
        narrow = VectorBody(self.body, self.stages, vector_body.pass_, {}, spills=True)
        new = narrow.start(vpoint.lanes)
        for point in points:
            new = narrow.emit(replace(vpoint, point=point, values={}), new)
        for number, a, state in zip(
            vector_body.pass_.reductions, vector_body.accumulators, new, strict=True
        ):
            old = self._load_state(number, a, vpoint)
            self._store_state(number, a.combine(old, a.widened(state)), vpoint)

    def _finish(self, pass_: Pass, get: Callable[[int, Accumulator, VectorPoint], State]) -> None:
        """Spill the results of the pass's reductions as column values."""

        def emit_results(vpoint: VectorPoint) -> None:
            for number, a in self._accumulators(pass_):
                self._spill(number, a.result(get(number, a, vpoint)), vpoint)

        if pass_.reductions:
            self._each(self.point, emit_results)
            self.ready |= set(pass_.reductions)

    def _values(self, stage: int) -> None:
        """Compute and spill the column values that are known after a stage."""
        spilled = [n for n in self.stages.row_code(stage) if n in self.spilled]

        def emit_values(vpoint: VectorPoint) -> None:
            for number in spilled:
                self._spill(number, self.body.value(number, vpoint), vpoint)

        if spilled:
            self._each(self.point, emit_values)
            self.ready |= set(spilled)

    def _stores(self, stage: int) -> None:
        written = self.stages.row_stores(stage)

        def emit_values(vpoint: VectorPoint) -> None:
            for store in written:
                self.body.store(store.access, self.body.value(store.operand, vpoint), vpoint)

        if written:
            self._each(self.point, emit_values)

    # -- split tiles ----------------------------------------------------------------------------

    def _emit_split(self, split: Split, split_id: Value, splits: Value, first: Value) -> None:
        """One stage of a split; `first` is the linear index of the row's first column."""
        f = self.f
        self.ready = set()

        def combine(number: int, a: Accumulator, vpoint: VectorPoint) -> State:
            def combine_one(i: Value, *state: Value) -> list[Value]:
                types = a.types(vpoint.lanes)
                slots = [self._slot_address(split, number, k, i, first) for k in range(len(types))]
                pairs = zip(slots, types, strict=True)
                new = [f.load(f.gep(c, vpoint.index, t.scalar), t) for c, t in pairs]
                return a.combine(list(state), new)

            return f.loop(0, splits, 1, a.start(vpoint.lanes), combine_one)

        for stage in range(-1, split.stage):
            for pass_ in self._passes(stage):
                self._finish(pass_, combine)
            self._values(stage)
        f.if_(split_id.eq(0), lambda: self._stores(split.stage - 1))
        chunk = self._arg(split.chunk.index)
        for pass_ in self._passes(split.stage):
            size = self.body.number(self.nest.spaces[pass_.space][0])
            start = f.min(split_id * chunk, size)
            self._emit_pass(pass_, (start, f.min(start + chunk, size)))
            self._store_states(split, pass_, split_id, first)

    def _store_states(self, split: Split, pass_: Pass, split_id: Value, first: Value) -> None:
        """Store the states of a split to scratch memory, for the next kernel."""

        def save(vpoint: VectorPoint) -> None:
            for number, a in self._accumulators(pass_):
                for k, value in enumerate(self._load_state(number, a, vpoint)):
                    slot = self._slot_address(split, number, k, split_id, first)
                    at = self.f.gep(slot, vpoint.index, value.type.scalar)
                    if vpoint.mask is None:
                        self.f.store(value, at)
                    else:
                        self.f.masked_store(value, at, vpoint.mask)

        if pass_.reductions:
            self._each(self.point, save)

    def _slot_address(
        self, split: Split, number: int, component: int, split_id: Value, first: Value
    ) -> Value:
        """Scratch address of a split's state component, at the row's first column."""
        f = self.f
        position = list(self.states).index((number, component))
        total = self.body.product(self.nest.rows)
        base = f.load(f["args"], ptr, 8 * split.memory.index)
        row = f.gep(base, (self._arg(split.count.index) * position + split_id) * total, STATE_SLOT)
        found = [a for p in self.stages.passes for n, a in self._accumulators(p) if n == number]
        return f.gep(row, first, found[0].types(1)[component])

    # -- stack buffers of the tile --------------------------------------------------------------

    def _load_state(self, number: int, a: Accumulator, vpoint: VectorPoint) -> State:
        return [
            self._load(self.states[number, k], t, vpoint)
            for k, t in enumerate(a.types(vpoint.lanes))
        ]

    def _store_state(self, number: int, state: State, vpoint: VectorPoint) -> None:
        for k, value in enumerate(state):
            self._save(self.states[number, k], value, vpoint)

    def _load(self, base: Value, type_: Type, vpoint: VectorPoint) -> Value:
        return self.f.load(self._at(base, type_, vpoint), type_)

    def _save(self, base: Value, value: Value, vpoint: VectorPoint) -> None:
        self.f.store(value, self._at(base, value.type, vpoint))

    def _at(self, base: Value, type_: Type, vpoint: VectorPoint) -> Value:
        """Buffers hold full vectors, so that no masks are needed."""
        return self.f.gep(base, vpoint.index - self.start, type_.scalar)

    def _spill(self, number: int, x: Element, vpoint: VectorPoint) -> None:
        for base, value in zip(
            self.spilled[number], parts(spread(self.f, x, vpoint.lanes)), strict=True
        ):
            is_flag = self.nest.code[number].dtype is bool_
            self._save(base, value.to(i8, signed=False) if is_flag else value, vpoint)

    def _reload(self, number: int, vpoint: VectorPoint) -> Element | None:
        """A column value that an earlier stage has spilled."""
        if number not in self.ready:
            return None
        dtype = self.nest.code[number].dtype
        types = [t.with_lanes(vpoint.lanes) for t in _memory_types(dtype)]
        pairs = zip(self.spilled[number], types, strict=True)
        emit_values = [self._load(base, t, vpoint) for base, t in pairs]
        return emit_values[0].ne(0) if dtype is bool_ else joined(emit_values)


def _memory_types(dtype: DType) -> list[Type]:
    if dtype.is_complex:
        return [register_type(dtype.part)] * 2
    return [i8 if dtype is bool_ else register_type(dtype)]
