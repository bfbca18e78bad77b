"""Resizing: nearest elements, or linear interpolation line by line.

Where the columns of a block of results come from is found once, for all lines a worker has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.codegen.emit import Function, Module, Value, f64, i32, i64, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.line import from_raw, raw_vector, store_some
from rlx.codegen.operands import Operands
from rlx.codegen.storage import compute_type
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

_BLOCK = 256  # columns whose sources are kept on the stack


@dataclass(frozen=True)
class Resize(KernelSpec):
    """args: x, out, planes, height, width, lines, columns

    `mode` is "nearest", "linear" or "corners" (linear, first and last elements kept). Elements of
    "nearest" are moved, not computed, so a type of the same size may stand for any other.
    """

    dtype: DType
    mode: str

    args = ("x", "out", "planes", "height", "width", "lines", "columns")

    def emit(self, m: Module) -> None:
        f = m.kernel()
        emitter = _Nearest if self.mode == "nearest" else _Linear
        emitter(f, self).emit()


class _Resize(ABC):
    def __init__(self, f: Function, spec: Resize) -> None:
        self.f, self.spec = f, spec
        self.type = compute_type(spec.dtype)
        self.lanes = f.target.lanes(max(self.type.bits, 32))
        self.size = spec.dtype.bytes
        self.o = Operands(f, spec.args, ("x", "out"))
        self.below = f.alloca(_BLOCK * 4)

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["planes"] * o["lines"])
        for start in f.range(0, o["columns"], _BLOCK):
            count = f.min(o["columns"] - start, _BLOCK)
            for i in f.range(0, count):
                self.column(start + i, i)
            for row in f.range(lo, hi):
                plane, y = row.udiv(o["lines"]), row.urem(o["lines"])
                out = f.gep(o["out"], row * o["columns"] + start, self.size)
                self._row(plane * o["height"], y, count, out)

    def _row(self, first: Value, y: Value, count: Value, out: Value) -> None:
        """`first` is the number of the plane's first line."""
        f = self.f
        self.lines(first, y)
        whole = count - count.urem(self.lanes)
        for i in f.range(0, whole, self.lanes):
            self._put(i, out, None)
        rest = f.lane_mask(count - whole, self.lanes)
        f.if_(whole < count, lambda: self._put(whole, out, rest))

    def _put(self, i: Value, out: Value, mask: Value | None) -> None:
        f = self.f
        value = self.value(i, mask)
        store_some(f, value, f.gep(out, i, self.size), self.spec.dtype, mask)

    def line(self, number: Value) -> Value:
        return self.f.gep(self.o["x"], number * self.o["width"], self.size)

    def take(self, line: Value, places: Value, mask: Value | None) -> Value:
        f, dtype = self.f, self.spec.dtype
        raw = f.gather(line, places, raw_vector(dtype, self.lanes), mask)
        return from_raw(f, raw, dtype, self.type)

    def places(self, i: Value) -> Value:
        """Where the columns from i on come from."""
        return self.f.load(self.f.gep(self.below, i, 4), vec(self.lanes, i32))

    @abstractmethod
    def column(self, x: Value, i: Value) -> None:
        """Note where column i of the block, x of the line, comes from."""

    @abstractmethod
    def lines(self, first: Value, y: Value) -> None:
        """Find the lines of the input that line y of the plane is made of."""

    @abstractmethod
    def value(self, i: Value, mask: Value | None) -> Value:
        """The results from column i of the block on."""


class _Nearest(_Resize):
    def column(self, x: Value, i: Value) -> None:
        place = (x * self.o["width"]).udiv(self.o["columns"])
        self.f.store(place.to(i32), self.f.gep(self.below, i, 4))

    def lines(self, first: Value, y: Value) -> None:
        self.source = self.line(first + (y * self.o["height"]).udiv(self.o["lines"]))

    def value(self, i: Value, mask: Value | None) -> Value:
        return self.take(self.source, self.places(i), mask)


class _Linear(_Resize):
    def __init__(self, f: Function, spec: Resize) -> None:
        super().__init__(f, spec)
        self.parts = f.alloca(_BLOCK * self.type.bytes)

    def between(self, i: Value, n: Value, size: Value) -> tuple[Value, Value]:
        """Where output i lies: the element before it, and the share of the one after."""
        f = self.f
        last = f.max(n - 1, 0)
        with f.exact():
            if self.spec.mode == "corners":
                step = last.to(f64) / f.max(size - 1, 1).to(f64)
                at = i.to(f64) * step
            else:
                at = (i.to(f64) + 0.5) * n.to(f64) / size.to(f64) - 0.5
                at = f.min(f.max(at, 0.0), last.to(f64))
            below = f.min(at.to(i64), last)
            part = at - below.to(f64)
        return below, part.to(self.type)

    def column(self, x: Value, i: Value) -> None:
        f = self.f
        below, part = self.between(x, self.o["width"], self.o["columns"])
        f.store(below.to(i32), f.gep(self.below, i, 4))
        f.store(part, f.gep(self.parts, i, self.type))

    def lines(self, first: Value, y: Value) -> None:
        f, o = self.f, self.o
        below, part = self.between(y, o["height"], o["lines"])
        above = f.min(below + 1, o["height"] - 1)
        self.upper, self.lower = self.line(first + below), self.line(first + above)
        self.part = f.splat(part, self.lanes)
        self.last = f.splat((o["width"] - 1).to(i32), self.lanes)

    def value(self, i: Value, mask: Value | None) -> Value:
        f = self.f
        left = self.places(i)
        right = f.min(left + 1, self.last)
        part = f.load(f.gep(self.parts, i, self.type), vec(self.lanes, self.type))
        near, far = self._mixed(left, mask), self._mixed(right, mask)
        return _mix(near, far, part)

    def _mixed(self, places: Value, mask: Value | None) -> Value:
        """The two lines, in the shares of this line of results."""
        upper, lower = (self.take(line, places, mask) for line in (self.upper, self.lower))
        return _mix(upper, lower, self.part)


def _mix(a: Value, b: Value, part: Value) -> Value:
    return a * (1.0 - part) + b * part
