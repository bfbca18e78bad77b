"""Pooling: the largest element, or the mean, of every window."""

from __future__ import annotations

from rlx.codegen.emit import Function, Module, Value, i32, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.line import Line
from rlx.codegen.operands import Operands
from rlx.codegen.storage import compute_type, memory_type, store
from rlx.codegen.windows import GEOMETRY, Windows
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Pool(KernelSpec):
    """args: x, out, planes, then GEOMETRY

    `kind` is "max" (NaN wins), "mean" (elements outside count as zeros) or "inner_mean" (they do
    not count). `across`: vectors lie along the rows of one window instead of over neighbouring
    windows, which pays where windows are wide and few.
    """

    dtype: DType
    kind: str
    taps_x: int
    step: int  # as in Line
    across: bool = False

    args = ("x", "out", "planes", *GEOMETRY)

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("x", "out"))
        fold = _Fold(f, self)
        if self.across:
            _emit_across(f, o, self, fold)
        else:
            _Pool(f, o, self, fold).emit(o["planes"])


class _Fold:
    """How elements of a window become one."""

    def __init__(self, f: Function, spec: Pool) -> None:
        self.f, self.spec, self.type = f, spec, compute_type(spec.dtype)
        self.unsigned = spec.dtype.kind == "uint"

    @property
    def nothing(self) -> float:
        """What elements outside the image count as."""
        if self.spec.kind != "max" or self.unsigned:
            return 0
        return float("-inf") if self.type.is_float else -(1 << self.spec.dtype.bits - 1)

    def join(self, a: Value, b: Value) -> Value:
        if self.spec.kind != "max":
            return a + b
        return self.f.umax(a, b) if self.unsigned else self.f.max(a, b)

    def reduce(self, vector: Value) -> Value:
        lanes = vector.type.lanes
        while lanes > 1:
            lanes //= 2
            vector = self.join(self.f.slice(vector, 0, lanes), self.f.slice(vector, lanes, lanes))
        return vector


def _inside(f: Function, first: Value, taps: Value, limit: Value) -> Value:
    """How many of `taps` places from `first` on lie within 0 .. limit - 1."""
    return f.max(f.min(first + taps, limit) - f.max(first, 0), 0)


class _Pool(Windows):
    def __init__(self, f: Function, o: Operands, spec: Pool, fold: _Fold) -> None:
        self.spec, self.fold = spec, fold
        lanes = f.target.lanes(fold.type.bits)
        line = Line(spec.dtype, fold.type, lanes, spec.step, fold.nothing)
        super().__init__(f, o, line, spec.dtype, spec.taps_x, 1)

    def enter(self, plane: Value) -> Value:
        return plane

    def begin(self) -> Value:
        return self.f.const(self.fold.nothing, vec(self.lanes, self.fold.type))

    def tap(self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value) -> list[Value]:
        if inputs is None:
            return sums
        return [self.fold.join(total, x) for total, x in zip(sums, inputs, strict=True)]

    def finish(self, total: Value, top: Value, left: Value) -> Value:
        f, o, type_ = self.f, self.o, total.type
        if self.spec.kind == "max":
            return total
        if self.spec.kind == "mean":
            return total / f.splat((o["taps_y"] * self.taps_x).to(type_.scalar), self.lanes)
        rows = f.splat(_inside(f, top, o["taps_y"], o["height"]).to(type_.scalar), self.lanes)
        places = f.iota(vec(self.lanes, i32)) * f.splat(o["step_x"].to(i32), self.lanes)
        first = places + f.splat(left.to(i32), self.lanes)
        taps = f.const(self.taps_x, first.type)
        columns = _inside(f, first, taps, f.splat(o["width"].to(i32), self.lanes))
        return total / (columns.to(type_.scalar) * rows)


def _emit_across(f: Function, o: Operands, spec: Pool, fold: _Fold) -> None:
    lo, hi = f.split(o["planes"] * o["lines"] * o["columns"])
    size = memory_type(spec.dtype).bytes
    for at in f.range(lo, hi):
        row, x = at.udiv(o["columns"]), at.urem(o["columns"])
        plane, y = row.udiv(o["lines"]), row.urem(o["lines"])
        top = y * o["step_y"] + o["first_y"]
        left = x * o["step_x"] + o["first_x"]
        start = (plane * o["height"] + f.max(top, 0)) * o["width"] + f.max(left, 0)
        rows = _inside(f, top, o["taps_y"], o["height"])
        columns = _inside(f, left, f.i64(spec.taps_x), o["width"])
        total = _window(f, o, spec, fold, start, rows, columns)
        if spec.kind != "max":
            taps = o["taps_y"] * spec.taps_x if spec.kind == "mean" else rows * columns
            total = total / taps.to(fold.type)
        store(f, total, f.gep(o["out"], at, size), spec.dtype)


def _window(
    f: Function, o: Operands, spec: Pool, fold: _Fold, start: Value, rows: Value, columns: Value
) -> Value:
    """All elements of one window, folded."""
    lanes = f.target.lanes(fold.type.bits)
    line = Line(spec.dtype, fold.type, lanes, 1, fold.nothing)
    whole = columns - columns.urem(lanes)
    zero, one, size = f.i64(0), f.i64(1), memory_type(spec.dtype)
    plain = line.reader(f, zero, columns, one, inside=True)
    rest = line.reader(f, zero, columns - whole, one, inside=False)

    def row(i: Value, total: Value) -> Value:
        base = f.gep(o["x"], start + i * o["width"], size)
        [total] = f.loop(
            0, whole, lanes, [total], lambda k, t: fold.join(t, plain(f.gep(base, k, size)))
        )
        return fold.join(total, rest(f.gep(base, whole, size)))

    begin = f.const(fold.nothing, vec(lanes, fold.type))
    return fold.reduce(f.loop(0, rows, 1, [begin], row)[0])
