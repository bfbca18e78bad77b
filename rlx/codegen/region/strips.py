"""Tall nests with vectors across the rows: strips of columns, walked in the order of memory.

The states of folds, one for each column of a strip, lie on the stack between two rows of memory, as
do values of the columns that later passes want. Sums of f32 are made in f64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.codegen.emit import Function, Module, Type, Value, i8, i64, ptr
from rlx.codegen.region.body import Body, Frame, Spot
from rlx.codegen.region.folds import Accumulator, State
from rlx.codegen.region.nest import ROW, Apply, Checked, Fold, Nest
from rlx.codegen.region.parts import CELL, Split
from rlx.codegen.region.registers import Element, joined, parts, register_type, spread
from rlx.codegen.region.stages import Pass, Stages
from rlx.codegen.region.sweep import Sweep
from rlx.codegen.region.vectors import lanes_for, masks_tail
from rlx.ir.dtype import DType, bool_, c64

WIDTH = 1024  # columns of a strip: some kilobytes of each row of memory
TOGETHER = 4  # rows of memory that are read at a time
FEW = 64  # elements of a column below which its states rather stay in registers


def is_tall(nest: Nest) -> bool:
    """Whether columns are too long for states in registers: their rows of memory lie far apart."""
    for sizes in nest.spaces:
        total = 1
        for size in sizes:
            if not isinstance(size, int):
                return True
            total *= size
        if total > FEW:
            return True
    return False


class StripEmitter:
    def __init__(self, m: Module, nest: Nest, split: Split | None = None) -> None:
        self.f: Function = m.kernel()
        self.nest, self.split = nest, split
        self.body = Body(self.f, nest, columns=True)
        self.stages = Stages(nest, buffers=False)
        self.lanes = lanes_for(nest, m.target, columns=True)
        self.masks = masks_tail(nest, m.target, columns=True)
        self.kept = self._row_buffers()
        self.states = {
            (n, k): self.f.alloca(WIDTH * t.bytes)
            for p in self.stages.passes
            for n, a in self._accumulators(p)
            for k, t in enumerate(a.types(1))
        }
        self.frame, self.start, self.stop = Frame({}), self.f.i64(0), self.f.i64(0)
        self.ready: set[int] = set()  # values of the columns that are in memory

    def _row_buffers(self) -> dict[int, list[Value]]:
        """Values of the columns that elements use, or that are folds."""
        used = {a for i in self.nest.code if i.level != ROW for a in i.args}
        found: dict[int, list[Value]] = {}
        for n, i in enumerate(self.nest.code):
            is_made = i.level == ROW and isinstance(i, (Apply, Checked)) and n in used
            if is_made or isinstance(i, Fold):
                found[n] = [self.f.alloca(WIDTH * t.bytes) for t in _memory_types(i.dtype)]
        return found

    def _accumulators(self, this: Pass) -> list[tuple[int, Accumulator]]:
        sweep = Sweep(self.body, self.stages, this, {}, keeps=True, wide=True)
        return list(zip(this.folds, sweep.folds, strict=True))

    # -- strips -------------------------------------------------------------------------------

    def emit(self) -> None:
        f, body = self.f, self.body
        body.refuse_empty_tables()
        *others, last = self.nest.rows
        size = body.number(last)
        blocks = f.ceil_div(size, WIDTH)
        count = body.product(others) * blocks
        cuts = self._arg(self.split.parts.index) if self.split is not None else f.i64(1)
        lo, hi = f.split(count * cuts)
        for item in f.range(lo, hi):
            strip = item.udiv(cuts)
            row = strip.udiv(blocks)
            self.frame = body.at_row(row, others) if others else body.home()
            self.start = (strip - row * blocks) * WIDTH
            self.stop = f.min(self.start + WIDTH, size)
            if self.split is None:
                self._strip()
            else:
                self._part(self.split, item - strip * cuts, cuts, row * size)

    def _arg(self, index: int) -> Value:
        return self.f.arg(self.f["args"], index, i64)

    def _strip(self) -> None:
        self.ready = set()
        for stage in range(-1, self.stages.last + 1):
            for this in self._passes(stage):
                self._sweep(this, None)
                self._finish(this, self._get)
            self._values(stage)
            self._stores(stage)

    def _passes(self, stage: int) -> list[Pass]:
        return [p for p in self.stages.passes if p.stage == stage]

    def _each(self, frame: Frame, body: Callable[[Spot], None]) -> None:
        """`body` for all columns of the strip."""
        f, lanes = self.f, self.lanes
        whole = self.start + (self.stop - self.start & -lanes)
        for i in f.range(self.start, whole, lanes):
            body(self._spot(frame, i, lanes, None))
        if self.masks and lanes > 1:
            mask = f.lane_mask(self.stop - whole, lanes)
            f.if_(whole < self.stop, lambda: body(self._spot(frame, whole, lanes, mask)))
            return
        for i in f.range(whole if lanes > 1 else self.stop, self.stop):
            body(self._spot(frame, i, 1, None))

    def _spot(self, frame: Frame, index: Value, lanes: int, mask: Value | None) -> Spot:
        return Spot(frame, index, lanes, mask, {}, recall=self._recall)

    # -- one pass -----------------------------------------------------------------------------

    def _sweep(self, this: Pass, part: tuple[Value, Value] | None) -> None:
        """All elements of the strip, or of a part of the outermost axis."""
        sweep = Sweep(self.body, self.stages, this, {}, keeps=True, wide=True)
        if this.folds:
            self._each(self.frame, lambda spot: self._begin(sweep, spot))
        self._axes(sweep, self.frame, 0, part)

    def _begin(self, sweep: Sweep, spot: Spot) -> None:
        for number, state in zip(sweep.this.folds, sweep.start(spot.lanes), strict=True):
            self._put(number, state, spot)

    def _axes(
        self, sweep: Sweep, frame: Frame, position: int, part: tuple[Value, Value] | None
    ) -> None:
        f, space = self.f, sweep.this.space
        sizes = self.nest.spaces[space]
        lo, hi = part or (f.i64(0), self.body.number(sizes[position]))
        if position < len(sizes) - 1:
            for i in f.range(lo, hi):
                self._axes(sweep, self.body.move(frame, space, position, i), position + 1, None)
            return
        several = TOGETHER if self.stages.weight(sweep.this) <= 14 else 1
        whole = lo + (hi - lo & -several)
        for i in f.range(lo, whole, several):
            self._rows(sweep, frame, position, [i + k for k in range(several)])
        if several > 1:
            for i in f.range(whole, hi):
                self._rows(sweep, frame, position, [i])

    def _rows(self, sweep: Sweep, frame: Frame, position: int, indices: list[Value]) -> None:
        """All columns at some indices of the innermost axis."""
        frames = [self.body.move(frame, sweep.this.space, position, i) for i in indices]
        self._each(frame, lambda spot: self._elements(sweep, spot, frames))

    def _elements(self, sweep: Sweep, spot: Spot, frames: list[Frame]) -> None:
        """Elements of a few rows of memory, taken together before they join the states."""
        narrow = Sweep(self.body, self.stages, sweep.this, {}, keeps=True)
        new = narrow.start(spot.lanes)
        for frame in frames:
            new = narrow.element(replace(spot, frame=frame, values={}), new)
        for number, a, state in zip(sweep.this.folds, sweep.folds, new, strict=True):
            old = self._get(number, a, spot)
            self._put(number, a.join(old, a.widened(state)), spot)

    def _finish(self, this: Pass, get: Callable[[int, Accumulator, Spot], State]) -> None:
        """Folds have ended: their results are values of the columns."""

        def end(spot: Spot) -> None:
            for number, a in self._accumulators(this):
                self._remember(number, a.result(get(number, a, spot)), spot)

        if this.folds:
            self._each(self.frame, end)
            self.ready |= set(this.folds)

    def _values(self, stage: int) -> None:
        """Values of the columns that are known after a stage."""
        kept = [n for n in self.stages.row_code(stage) if n in self.kept]

        def values(spot: Spot) -> None:
            for number in kept:
                self._remember(number, self.body.value(number, spot), spot)

        if kept:
            self._each(self.frame, values)
            self.ready |= set(kept)

    def _stores(self, stage: int) -> None:
        written = self.stages.row_stores(stage)

        def values(spot: Spot) -> None:
            for store in written:
                self.body.store(store.walk, self.body.value(store.operand, spot), spot)

        if written:
            self._each(self.frame, values)

    # -- parts of tall strips -------------------------------------------------------------------

    def _part(self, split: Split, part: Value, cuts: Value, first: Value) -> None:
        """One stage of a part; `first` is the number of the row's first column, of all."""
        f = self.f
        self.ready = set()

        def join(number: int, a: Accumulator, spot: Spot) -> State:
            def more(i: Value, *state: Value) -> list[Value]:
                types = a.types(spot.lanes)
                cells = [self._cell(split, number, k, i, first) for k in range(len(types))]
                pairs = zip(cells, types, strict=True)
                new = [f.load(f.gep(c, spot.index, t.scalar), t) for c, t in pairs]
                return a.join(list(state), new)

            return f.loop(0, cuts, 1, a.start(spot.lanes), more)

        for stage in range(-1, split.stage):
            for this in self._passes(stage):
                self._finish(this, join)
            self._values(stage)
        f.if_(part.eq(0), lambda: self._stores(split.stage - 1))
        chunk = self._arg(split.chunk.index)
        for this in self._passes(split.stage):
            size = self.body.number(self.nest.spaces[this.space][0])
            start = f.min(part * chunk, size)
            self._sweep(this, (start, f.min(start + chunk, size)))
            self._leave(split, this, part, first)

    def _leave(self, split: Split, this: Pass, part: Value, first: Value) -> None:
        """States of a part's folds to memory that the next kernel reads."""

        def save(spot: Spot) -> None:
            for number, a in self._accumulators(this):
                for k, value in enumerate(self._get(number, a, spot)):
                    cell = self._cell(split, number, k, part, first)
                    at = self.f.gep(cell, spot.index, value.type.scalar)
                    if spot.mask is None:
                        self.f.store(value, at)
                    else:
                        self.f.masked_store(value, at, spot.mask)

        if this.folds:
            self._each(self.frame, save)

    def _cell(self, split: Split, number: int, component: int, part: Value, first: Value) -> Value:
        """The state of the first column of this row, of a part."""
        f = self.f
        position = list(self.states).index((number, component))
        total = self.body.product(self.nest.rows)
        base = f.load(f["args"], ptr, 8 * split.memory.index)
        row = f.gep(base, (self._arg(split.parts.index) * position + part) * total, CELL)
        found = [a for p in self.stages.passes for n, a in self._accumulators(p) if n == number]
        return f.gep(row, first, found[0].types(1)[component])

    # -- memory of the strip --------------------------------------------------------------------

    def _get(self, number: int, a: Accumulator, spot: Spot) -> State:
        return [
            self._load(self.states[number, k], t, spot) for k, t in enumerate(a.types(spot.lanes))
        ]

    def _put(self, number: int, state: State, spot: Spot) -> None:
        for k, value in enumerate(state):
            self._save(self.states[number, k], value, spot)

    def _load(self, base: Value, type_: Type, spot: Spot) -> Value:
        return self.f.load(self._at(base, type_, spot), type_)

    def _save(self, base: Value, value: Value, spot: Spot) -> None:
        self.f.store(value, self._at(base, value.type, spot))

    def _at(self, base: Value, type_: Type, spot: Spot) -> Value:
        """Buffers hold whole vectors, so that masks are not needed."""
        return self.f.gep(base, spot.index - self.start, type_.scalar)

    def _remember(self, number: int, x: Element, spot: Spot) -> None:
        for base, value in zip(
            self.kept[number], parts(spread(self.f, x, spot.lanes)), strict=True
        ):
            is_flag = self.nest.code[number].dtype is bool_
            self._save(base, value.to(i8, signed=False) if is_flag else value, spot)

    def _recall(self, number: int, spot: Spot) -> Element | None:
        """A value of the columns that a stage has left behind."""
        if number not in self.ready:
            return None
        dtype = self.nest.code[number].dtype
        types = [t.with_lanes(spot.lanes) for t in _memory_types(dtype)]
        pairs = zip(self.kept[number], types, strict=True)
        values = [self._load(base, t, spot) for base, t in pairs]
        return values[0].ne(0) if dtype is bool_ else joined(values)


def _memory_types(dtype: DType) -> list[Type]:
    if dtype is c64:
        return [register_type(DType.of("f32"))] * 2
    return [i8 if dtype is bool_ else register_type(dtype)]
