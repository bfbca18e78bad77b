"""Vector code for the instructions of a nest, at one point of its iteration space.

Softmax in a nest: its weights exp(x - max x) are at most 1, so a cheaper exp will do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace

import numpy as np

from rlx.errors import CodegenError
from rlx.ir.dtype import DType
from rlx.llvm import math
from rlx.llvm.builder import Function, Value, i64, vec
from rlx.llvm.nest.elements import Operand, apply
from rlx.llvm.nest.registers import (
    Complex,
    Element,
    constant,
    from_memory,
    lanes_of,
    raw_type,
    spread,
    to_memory,
)
from rlx.llvm.storage import stream
from rlx.loops.nest import (
    ROW,
    Access,
    Apply,
    Arg,
    BoundsCheck,
    Instruction,
    Iota,
    Literal,
    Load,
    Nest,
    Quantity,
    Reduce,
    Table,
)
from rlx.support.records import dataclass

# Ops of floats that give NaN wherever an operand is NaN.
_PASS_NAN = ("add", "sub", "mul", "div", "neg", "log", "reciprocal", "cast")


def is_weight(nest: Nest, i: Apply) -> bool:
    """Whether this is exp(x - max x), computed in f32 or wider."""
    return i.dtype.bits >= 32 and _max_of(nest, i) is not None


def _max_of(nest: Nest, i: Apply) -> int | None:
    """The instruction of max x, if `i` is exp(x - max x)."""
    if i.record.name != "exp" or not i.dtype.is_float:
        return None
    low = nest.code[i.operands[0]]
    if not isinstance(low, Apply) or low.record.name != "sub":
        return None
    x, top = low.operands
    row_max = nest.code[top]
    found = isinstance(row_max, Reduce) and row_max.kind == "max" and row_max.operand == x
    return top if found else None


def may_drop_nan(nest: Nest, row_max: int) -> bool:
    """Whether a maximum may ignore NaN: a NaN element makes its weight and the sum of weights NaN,
    and every store that depends on the maximum is computed from this sum."""
    dependent, poisoned = {row_max}, set[int]()
    for number, i in enumerate(nest.code):
        if not dependent.intersection(i.args):
            continue
        dependent.add(number)
        if isinstance(i, Reduce):
            if i.kind == "sum" and _is_weight_of(nest, i.operand, row_max):
                poisoned.add(number)
        elif not isinstance(i, Apply):
            return False
        elif i.dtype.is_float and i.record.name in _PASS_NAN and poisoned.intersection(i.args):
            poisoned.add(number)
    return bool(poisoned) and all(
        s.operand in poisoned for s in nest.stores if s.operand in dependent
    )


def _is_weight_of(nest: Nest, number: int, row_max: int) -> bool:
    i = nest.code[number]
    return isinstance(i, Apply) and _max_of(nest, i) == row_max


@dataclass
class IterPoint:
    """A point of the loops without the vector axis: a pointer per access, and the loop indices."""

    pointers: dict[Access, Value]
    rows: tuple[Value, ...] = ()
    inner: tuple[Value, ...] = ()


@dataclass
class VectorPoint:
    """One vector: `lanes` elements from `index` of the vector axis on, under a mask.

    `values` are the elements computed so far, `row` those of the current row.
    """

    point: IterPoint
    index: Value
    lanes: int
    mask: Value | None
    row: dict[int, Element]
    values: dict[int, Element] = field(default_factory=dict)
    reload: Callable[[int, VectorPoint], Element | None] | None = None  # row values from memory


class NestBody:
    """Emits the instructions of a nest. `columns`: the vector axis is the last row axis."""

    def __init__(self, f: Function, nest: Nest, columns: bool) -> None:
        self.f, self.nest, self.columns = f, nest, columns
        self.streaming = False  # whether full vectors use streaming (non-temporal) stores
        self.ahead = False  # whether loads of a row prefetch the next one
        self.args = self._read_args()
        self.levels = self._access_levels()

    # -- arguments ----------------------------------------------------------------------------

    def _read_args(self) -> dict[Arg, Value]:
        """Load all kernel arguments before the first loop."""
        f, nest = self.f, self.nest
        pointers = {w.pointer for w in nest.accesses() if isinstance(w.pointer, Arg)}
        numbers: set[Quantity] = {*nest.rows, *(q for space in nest.spaces for q in space)}
        for access in nest.accesses():
            numbers |= {
                *access.strides.rows,
                *access.strides.inner,
                *(q for _, q in access.gathered),
            }
        for i in nest.code:
            if isinstance(i, Iota):
                numbers |= {i.start, *i.strides.rows, *i.strides.inner}
            elif isinstance(i, BoundsCheck):
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

    def reject_empty_gathers(self) -> None:
        """Report and return if elements are to be gathered from an axis of size 0."""
        f = self.f
        sizes = [i.size for i in self.nest.code if isinstance(i, BoundsCheck)]
        if not sizes:
            return
        least = self.number(sizes[0])
        for size in sizes[1:]:
            least = f.min(least, self.number(size))
        wanted = self.product(self.nest.rows)
        for space in self.nest.spaces:
            wanted = wanted * self.product(space)
        for _ in f.when(least.eq(0)):
            for _ in f.when(wanted > 0):
                self.report()
            f.ret()

    # -- iteration points ---------------------------------------------------------------------

    def origin(self) -> IterPoint:
        """The first element of every tensor."""
        return IterPoint({w: self._start(w) for w in self.nest.accesses()})

    def _start(self, access: Access) -> Value:
        if isinstance(access.pointer, Arg):
            return self.args[access.pointer]
        table: Table = access.pointer
        base = self.f.module.table(self.f, table.data)
        return self.f.gep(base, table.offset, access.dtype.bytes)

    def at_row(self, row: Value, sizes: Sequence[Quantity]) -> IterPoint:
        """The point of a row: its linear index, delinearised."""
        indices: list[Value] = []
        for size in reversed(sizes[1:]):
            above = row.udiv(self.number(size))
            indices.append(row - above * self.number(size))
            row = above
        indices.append(row)
        point = self.origin()
        for position, index in enumerate(reversed(indices)):
            point = self.advance(point, ROW, position, index)
        return point

    def advance(self, point: IterPoint, level: int, position: int, index: Value) -> IterPoint:
        """The point at `index` of a row axis (level ROW) or of an inner axis of a space."""
        pointers = dict(point.pointers)
        for access, pointer in point.pointers.items():
            strides = access.strides.rows if level == ROW else access.strides.inner
            if level != ROW and not self._in_space(access, level):
                continue
            if position < len(strides) and strides[position] != 0:
                offset = index * self.number(strides[position])
                pointers[access] = self.f.gep(pointer, offset, access.dtype.bytes)
        if level == ROW:
            return replace(point, pointers=pointers, rows=(*point.rows, index))
        return replace(point, pointers=pointers, inner=(*point.inner, index))

    def _in_space(self, access: Access, space: int) -> bool:
        return space in self.levels.get(access, ())

    def _access_levels(self) -> dict[Access, set[int]]:
        """The spaces that each access belongs to."""
        found: dict[Access, set[int]] = {}
        for i in self.nest.code:
            if isinstance(i, Load):
                found.setdefault(i.access, set()).add(i.level)
        for s in self.nest.stores:
            found.setdefault(s.access, set()).add(s.level)
        return found

    # -- instructions -------------------------------------------------------------------------

    def value(self, number: int, vpoint: VectorPoint) -> Element:
        """The value of an instruction; emitted on first use."""
        is_row = self.nest.code[number].level == ROW
        known = vpoint.row if is_row else vpoint.values
        found = known.get(number)
        if found is None and is_row and vpoint.reload is not None:
            found = vpoint.reload(number, vpoint)
        if found is None:
            i, operands = self.nest.code[number], list[Operand]()
            for a in i.args if isinstance(i, Apply) else ():
                operands.append((self.value(a, vpoint), self.nest.code[a].dtype))
            found = self._compute(i, operands, vpoint)
        known[number] = found
        return found

    def _compute(self, i: Instruction, operands: Sequence[Operand], vpoint: VectorPoint) -> Element:
        """`operands` are those of an `Apply`."""
        if isinstance(i, Load):
            return self.load(i.access, vpoint)
        if isinstance(i, Literal):
            return constant(self.f, _number(i.data, i.dtype), i.dtype)
        if isinstance(i, Iota):
            return self._iota(i, vpoint)
        if isinstance(i, BoundsCheck):
            return self._bounds_check(i, vpoint)
        if isinstance(i, Apply):
            if is_weight(self.nest, i):
                return math.exp_down(operands[0][0])  # type: ignore[arg-type]
            return apply(self.f, i.record, operands, i.dtype)
        raise CodegenError("a reduction is used before its pass", where="region", got=repr(i))

    def _iota(self, i: Iota, vpoint: VectorPoint) -> Value:
        total = self.number(i.start)
        for index, stride in [
            *zip(vpoint.point.rows, i.strides.rows, strict=False),
            *zip(vpoint.point.inner, i.strides.inner, strict=False),
        ]:
            total = total + index * self.number(stride)
        stride = i.strides.lane_stride(self.columns)
        if stride == 0:
            return total
        return self.f.splat(total, vpoint.lanes) + self._lane_offsets(vpoint, stride)

    def _lane_offsets(self, vpoint: VectorPoint, stride: Quantity) -> Value:
        """stride · (index + lane) for each lane."""
        f = self.f
        lanes = f.splat(vpoint.index, vpoint.lanes) + f.iota(vec(vpoint.lanes, i64))
        return lanes * f.splat(self.number(stride), vpoint.lanes)

    def _bounds_check(self, i: BoundsCheck, vpoint: VectorPoint) -> Value:
        f = self.f
        x, dtype = self.value(i.index, vpoint), self.nest.code[i.index].dtype
        assert isinstance(x, Value)
        index = x.to(i64, signed=dtype.kind == "int")
        size = spread(f, self.number(i.size), index.type.lanes)
        assert isinstance(size, Value)
        if dtype.kind == "int":
            index = f.select(index < 0, index + size, index)
        good = index.ult(size)
        bad = ~good
        if vpoint.mask is not None and bad.type.lanes > 1:
            bad = bad & vpoint.mask
        for _ in f.when(f.any(bad)):
            self.report()
        return f.select(good, index, 0)

    def report(self) -> None:
        report = self.nest.report
        assert report is not None
        self.f.store(self.args[report.node], self.args[report.address])

    # -- memory -------------------------------------------------------------------------------

    def load(self, access: Access, vpoint: VectorPoint) -> Element:
        pointer, lanes = self._indirect_offsets(access, vpoint)
        stride = access.strides.lane_stride(self.columns)
        if lanes is None and stride == 0:
            return self._read(pointer, access.dtype, 1, None)
        if lanes is None and (stride == 1 or vpoint.lanes == 1):
            at = self.f.gep(pointer, vpoint.index * self.number(stride), access.dtype.bytes)
            if self.ahead and vpoint.lanes > 1:
                self._prefetch_next_row(access, at)
            return self._read(at, access.dtype, vpoint.lanes, vpoint.mask)
        offsets = self._lane_offsets(vpoint, stride) if stride != 0 else None
        if lanes is not None:
            offsets = lanes if offsets is None else offsets + lanes
        assert offsets is not None
        return self._gather(pointer, offsets, access.dtype, vpoint.mask)

    def _prefetch_next_row(self, access: Access, at: Value) -> None:
        """Prefetch what lies at the same place of the next row."""
        step = access.strides.rows[-1] if access.strides.rows else 0
        if step != 0:
            self.f.prefetch(self.f.gep(at, self.number(step), access.dtype.bytes))

    def _indirect_offsets(self, access: Access, vpoint: VectorPoint) -> tuple[Value, Value | None]:
        """The pointer advanced by scalar gathered indices, and lane offsets from vectors."""
        f, pointer = self.f, vpoint.point.pointers[access]
        lanes: Value | None = None
        for number, stride in access.gathered:
            index = self.value(number, vpoint)
            assert isinstance(index, Value)
            if index.type.lanes == 1:
                pointer = f.gep(pointer, index * self.number(stride), access.dtype.bytes)
                continue
            offsets = index * f.splat(self.number(stride), index.type.lanes)
            lanes = offsets if lanes is None else lanes + offsets
        return pointer, lanes

    def _read(self, at: Value, dtype: DType, lanes: int, mask: Value | None) -> Element:
        f = self.f
        if dtype.is_complex:
            both = f.load(at, vec(2 * lanes, raw_type(dtype.part)))
            picks = [range(k, 2 * lanes, 2) for k in (0, 1)]
            if lanes == 1:
                return Complex(f.extract(both, 0), f.extract(both, 1))
            return Complex(*[f.shuffle(both, None, p) for p in picks])
        type_ = vec(lanes, raw_type(dtype))
        raw = f.load(at, type_) if mask is None or lanes == 1 else f.masked_load(at, type_, mask)
        return from_memory(f, raw, dtype)

    def _gather(self, base: Value, offsets: Value, dtype: DType, mask: Value | None) -> Element:
        f, lanes = self.f, offsets.type.lanes
        if dtype.is_complex:
            re, im = offsets << 1, (offsets << 1) + 1
            part = vec(lanes, raw_type(dtype.part))
            return Complex(*[f.gather(base, i, part, mask) for i in (re, im)])
        return from_memory(f, f.gather(base, offsets, vec(lanes, raw_type(dtype)), mask), dtype)

    def store(self, access: Access, x: Element, vpoint: VectorPoint) -> None:
        """Store a vector; a scalar is broadcast to all lanes."""
        f = self.f
        stride = access.strides.lane_stride(self.columns)
        pointer = vpoint.point.pointers[access]
        if stride == 0:
            self._write(pointer, x, access.dtype, None)
            return
        x = spread(f, x, vpoint.lanes)
        if stride == 1 or vpoint.lanes == 1:
            at = f.gep(pointer, vpoint.index * self.number(stride), access.dtype.bytes)
            self._write(at, x, access.dtype, vpoint.mask)
            return
        offsets = self._lane_offsets(vpoint, stride)
        if isinstance(x, Complex):
            for part, value in enumerate(x):
                f.scatter(value, pointer, (offsets << 1) + part, vpoint.mask)
        else:
            f.scatter(to_memory(f, x, access.dtype), pointer, offsets, vpoint.mask)

    def _write(self, at: Value, x: Element, dtype: DType, mask: Value | None) -> None:
        f = self.f
        if isinstance(x, Complex):
            f.store(f.interleave(*x) if lanes_of(x) > 1 else f.concat(*x), at)
            return
        raw = to_memory(f, x, dtype)
        if self.streaming and mask is None:
            stream(f, raw, at)
        elif mask is None or raw.type.lanes == 1:
            f.store(raw, at)
        else:
            f.masked_store(raw, at, mask)


def _number(data: bytes, dtype: DType) -> complex | float:
    found = np.frombuffer(data, dtype.numpy)[0]
    if dtype.is_complex:
        return complex(found)
    return float(found) if dtype.is_float else int(found)
