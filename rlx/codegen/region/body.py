"""Instructions of a nest at one place of its loops, for one vector of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace

import numpy as np

from rlx.codegen import math
from rlx.codegen.emit import Function, Value, f32, i64, vec
from rlx.codegen.region.elements import apply
from rlx.codegen.region.nest import (
    ROW,
    Apply,
    Arg,
    Checked,
    Count,
    Literal,
    Load,
    Nest,
    Quantity,
    Table,
    Walk,
)
from rlx.codegen.region.registers import (
    Complex,
    Element,
    constant,
    from_memory,
    lanes_of,
    raw_type,
    spread,
    to_memory,
)
from rlx.codegen.region.weights import is_weight
from rlx.codegen.storage import stream
from rlx.errors import CodegenError
from rlx.ir.dtype import DType, c64
from rlx.support.records import dataclass


@dataclass
class Frame:
    """A place in the loops but for the lanes: where each tensor is, and the indices of the axes."""

    pointers: dict[Walk, Value]
    rows: tuple[Value, ...] = ()
    inner: tuple[Value, ...] = ()


@dataclass
class Spot:
    """One vector: `lanes` elements from `index` of the axis of lanes on, those of the mask.

    `values` are the elements computed so far, `row` those of the row that is walked.
    """

    frame: Frame
    index: Value
    lanes: int
    mask: Value | None
    row: dict[int, Element]
    values: dict[int, Element] = field(default_factory=dict)
    recall: Callable[[int, Spot], Element | None] | None = None  # of values of the row in memory


class Body:
    def __init__(self, f: Function, nest: Nest, columns: bool) -> None:
        self.f, self.nest, self.columns = f, nest, columns
        self.streams = False  # whether vectors are stored past the caches
        self.args = self._read_args()
        self.levels = self._walk_levels()

    # -- args --------------------------------------------------------------------------------

    def _read_args(self) -> dict[Arg, Value]:
        """All of them, before any loop."""
        f, nest = self.f, self.nest
        pointers = {w.pointer for w in nest.walks() if isinstance(w.pointer, Arg)}
        numbers: set[Quantity] = {*nest.rows, *(q for space in nest.spaces for q in space)}
        for walk in nest.walks():
            numbers |= {*walk.steps.rows, *walk.steps.inner, *(q for _, q in walk.terms)}
        for i in nest.code:
            if isinstance(i, Count):
                numbers |= {i.start, *i.steps.rows, *i.steps.inner}
            elif isinstance(i, Checked):
                numbers.add(i.size)
        if nest.report is not None:
            pointers.add(nest.report.address)
            numbers.add(nest.report.node)
        wanted = [(w.index, w) for w in {*pointers, *numbers} if isinstance(w, Arg)]
        return {
            w: f.arg(f["args"], at) if w in pointers else f.arg(f["args"], at, i64)
            for at, w in sorted(wanted, key=lambda pair: pair[0])
        }

    def number(self, q: Quantity) -> Value:
        return self.f.i64(q) if isinstance(q, int) else self.args[q]

    def product(self, quantities: Sequence[Quantity]) -> Value:
        total = self.f.i64(1)
        for q in quantities:
            total = self.number(q) * total
        return total

    def refuse_empty_tables(self) -> None:
        """Where there is something to look up, but nothing to find, report and leave."""
        f = self.f
        sizes = [i.size for i in self.nest.code if isinstance(i, Checked)]
        if not sizes:
            return
        least = self.number(sizes[0])
        for size in sizes[1:]:
            least = f.min(least, self.number(size))
        wanted = self.product(self.nest.rows)
        for space in self.nest.spaces:
            wanted = wanted * self.product(space)

        def leave() -> None:
            f.if_(wanted > 0, self.report)
            f.ret()

        f.if_(least.eq(0), leave)

    # -- places -------------------------------------------------------------------------------

    def home(self) -> Frame:
        """The first element of every tensor."""
        return Frame({w: self._start(w) for w in self.nest.walks()})

    def _start(self, walk: Walk) -> Value:
        if isinstance(walk.pointer, Arg):
            return self.args[walk.pointer]
        table: Table = walk.pointer
        base = self.f.module.table(self.f, table.data)
        return self.f.gep(base, table.shift, walk.dtype.bytes)

    def at_row(self, row: Value, sizes: Sequence[Quantity]) -> Frame:
        """The frame of a row, its number taken apart into indices."""
        indices: list[Value] = []
        for size in reversed(sizes[1:]):
            above = row.udiv(self.number(size))
            indices.append(row - above * self.number(size))
            row = above
        indices.append(row)
        frame = self.home()
        for position, index in enumerate(reversed(indices)):
            frame = self.move(frame, ROW, position, index)
        return frame

    def move(self, frame: Frame, level: int, position: int, index: Value) -> Frame:
        """The frame at `index` of a row axis (level ROW) or of an inner axis of a space."""
        pointers = dict(frame.pointers)
        for walk, pointer in frame.pointers.items():
            steps = walk.steps.rows if level == ROW else walk.steps.inner
            if level != ROW and not self._in_space(walk, level):
                continue
            if position < len(steps) and steps[position] != 0:
                offset = index * self.number(steps[position])
                pointers[walk] = self.f.gep(pointer, offset, walk.dtype.bytes)
        if level == ROW:
            return replace(frame, pointers=pointers, rows=(*frame.rows, index))
        return replace(frame, pointers=pointers, inner=(*frame.inner, index))

    def _in_space(self, walk: Walk, space: int) -> bool:
        return space in self.levels.get(walk, ())

    def _walk_levels(self) -> dict[Walk, set[int]]:
        """The spaces in which each tensor is walked."""
        found: dict[Walk, set[int]] = {}
        for i in self.nest.code:
            if isinstance(i, Load):
                found.setdefault(i.walk, set()).add(i.level)
        for s in self.nest.stores:
            found.setdefault(s.walk, set()).add(s.level)
        return found

    # -- instructions -------------------------------------------------------------------------

    def value(self, number: int, spot: Spot) -> Element:
        """The element of an instruction; computed unless known."""
        is_row = self.nest.code[number].level == ROW
        known = spot.row if is_row else spot.values
        found = known.get(number)
        if found is None and is_row and spot.recall is not None:
            found = spot.recall(number, spot)
        if found is None:
            found = self._compute(number, spot)
        known[number] = found
        return found

    def _compute(self, number: int, spot: Spot) -> Element:
        i = self.nest.code[number]
        if isinstance(i, Load):
            return self.load(i.walk, spot)
        if isinstance(i, Literal):
            return constant(self.f, _number(i.data, i.dtype), i.dtype)
        if isinstance(i, Count):
            return self._count(i, spot)
        if isinstance(i, Checked):
            return self._checked(i, spot)
        if isinstance(i, Apply):
            operands = [(self.value(a, spot), self.nest.code[a].dtype) for a in i.args]
            if is_weight(self.nest, i):
                return math.exp_down(operands[0][0])  # type: ignore[arg-type]
            return apply(self.f, i.record, operands, i.dtype)
        raise CodegenError("a fold is not known yet", where="region", got=repr(i))

    def _count(self, i: Count, spot: Spot) -> Value:
        total = self.number(i.start)
        for index, step in [
            *zip(spot.frame.rows, i.steps.rows, strict=False),
            *zip(spot.frame.inner, i.steps.inner, strict=False),
        ]:
            total = total + index * self.number(step)
        step = i.steps.between_lanes(self.columns)
        if step == 0:
            return total
        return self.f.splat(total, spot.lanes) + self._lane_offsets(spot, step)

    def _lane_offsets(self, spot: Spot, step: Quantity) -> Value:
        """step · (index + lane) for each lane."""
        f = self.f
        lanes = f.splat(spot.index, spot.lanes) + f.iota(vec(spot.lanes, i64))
        return lanes * f.splat(self.number(step), spot.lanes)

    def _checked(self, i: Checked, spot: Spot) -> Value:
        f = self.f
        x, dtype = self.value(i.index, spot), self.nest.code[i.index].dtype
        assert isinstance(x, Value)
        index = x.to(i64, signed=dtype.kind == "int")
        size = spread(f, self.number(i.size), index.type.lanes)
        assert isinstance(size, Value)
        if dtype.kind == "int":
            index = f.select(index < 0, index + size, index)
        good = index.ult(size)
        bad = ~good
        if spot.mask is not None and bad.type.lanes > 1:
            bad = bad & spot.mask
        f.if_(f.any(bad), self.report)
        return f.select(good, index, 0)

    def report(self) -> None:
        report = self.nest.report
        assert report is not None
        self.f.store(self.args[report.node], self.args[report.address])

    # -- memory -------------------------------------------------------------------------------

    def load(self, walk: Walk, spot: Spot) -> Element:
        pointer, lanes = self._data_terms(walk, spot)
        step = walk.steps.between_lanes(self.columns)
        if lanes is None and step == 0:
            return self._read(pointer, walk.dtype, 1, None)
        if lanes is None and (step == 1 or spot.lanes == 1):
            at = self.f.gep(pointer, spot.index * self.number(step), walk.dtype.bytes)
            return self._read(at, walk.dtype, spot.lanes, spot.mask)
        offsets = self._lane_offsets(spot, step) if step != 0 else None
        if lanes is not None:
            offsets = lanes if offsets is None else offsets + lanes
        assert offsets is not None
        return self._gather(pointer, offsets, walk.dtype, spot.mask)

    def _data_terms(self, walk: Walk, spot: Spot) -> tuple[Value, Value | None]:
        """The pointer moved by indices that are data, and offsets of the lanes that they add."""
        f, pointer = self.f, spot.frame.pointers[walk]
        lanes: Value | None = None
        for number, step in walk.terms:
            index = self.value(number, spot)
            assert isinstance(index, Value)
            if index.type.lanes == 1:
                pointer = f.gep(pointer, index * self.number(step), walk.dtype.bytes)
                continue
            offsets = index * f.splat(self.number(step), index.type.lanes)
            lanes = offsets if lanes is None else lanes + offsets
        return pointer, lanes

    def _read(self, at: Value, dtype: DType, lanes: int, mask: Value | None) -> Element:
        f = self.f
        if dtype is c64:
            both = f.load(at, vec(2 * lanes, f32))
            picks = [range(k, 2 * lanes, 2) for k in (0, 1)]
            if lanes == 1:
                return Complex(f.extract(both, 0), f.extract(both, 1))
            return Complex(*[f.shuffle(both, None, p) for p in picks])
        type_ = vec(lanes, raw_type(dtype))
        raw = f.load(at, type_) if mask is None or lanes == 1 else f.masked_load(at, type_, mask)
        return from_memory(f, raw, dtype)

    def _gather(self, base: Value, offsets: Value, dtype: DType, mask: Value | None) -> Element:
        f, lanes = self.f, offsets.type.lanes
        if dtype is c64:
            re, im = offsets << 1, (offsets << 1) + 1
            return Complex(*[f.gather(base, i, vec(lanes, f32), mask) for i in (re, im)])
        return from_memory(f, f.gather(base, offsets, vec(lanes, raw_type(dtype)), mask), dtype)

    def store(self, walk: Walk, x: Element, spot: Spot) -> None:
        """Elements to their place; one of one lane fills all lanes of a vector."""
        f = self.f
        step = walk.steps.between_lanes(self.columns)
        pointer = spot.frame.pointers[walk]
        if step == 0:
            self._write(pointer, x, walk.dtype, None)
            return
        x = spread(f, x, spot.lanes)
        if step == 1 or spot.lanes == 1:
            at = f.gep(pointer, spot.index * self.number(step), walk.dtype.bytes)
            self._write(at, x, walk.dtype, spot.mask)
            return
        offsets = self._lane_offsets(spot, step)
        if isinstance(x, Complex):
            for part, value in enumerate(x):
                f.scatter(value, pointer, (offsets << 1) + part, spot.mask)
        else:
            f.scatter(to_memory(f, x, walk.dtype), pointer, offsets, spot.mask)

    def _write(self, at: Value, x: Element, dtype: DType, mask: Value | None) -> None:
        f = self.f
        if isinstance(x, Complex):
            f.store(f.interleave(*x) if lanes_of(x) > 1 else f.concat(*x), at)
            return
        raw = to_memory(f, x, dtype)
        if self.streams and mask is None:
            stream(f, raw, at)
        elif mask is None or raw.type.lanes == 1:
            f.store(raw, at)
        else:
            f.masked_store(raw, at, mask)


def _number(data: bytes, dtype: DType) -> complex | float:
    found = np.frombuffer(data, dtype.numpy)[0]
    if dtype is c64:
        return complex(found)
    return float(found) if dtype.is_float else int(found)
