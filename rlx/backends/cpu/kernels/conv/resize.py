"""Resize: nearest-neighbour, or bilinear interpolation.

The source columns and weights of a block of output columns are computed once for all rows of a
worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlx.backends.cpu.kernels.conv.row_loads import from_raw, raw_vector, store_masked
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Value, f64, i32, i64, vec
from rlx.llvm.storage import compute_type
from rlx.support.records import dataclass

_BLOCK = 256  # output columns whose source columns are on the stack


@dataclass(frozen=True)
class Resize(KernelSpec):
    """args: x, out, planes, height, width, lines, columns

    `mode` is "nearest", "linear" or "corners" (linear with align_corners). Elements of
    "nearest" are only copied, so a type of the same size may stand for any other.
    """

    dtype: DType
    mode: str

    args = ("x", "out", "planes", "height", "width", "out_height", "out_width")

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
        lo, hi = f.split(o["planes"] * o["out_height"])
        for start in f.range(0, o["out_width"], _BLOCK):
            count = f.min(o["out_width"] - start, _BLOCK)
            for i in f.range(0, count):
                self.locate_column(start + i, i)
            for row in f.range(lo, hi):
                plane, y = row.udiv(o["out_height"]), row.urem(o["out_height"])
                out = f.gep(o["out"], row * o["out_width"] + start, self.size)
                self._row(plane * o["height"], y, count, out)

    def _row(self, first: Value, y: Value, count: Value, out: Value) -> None:
        """One output row; `first` is the index of the plane's first input row."""
        f = self.f
        self.select_rows(first, y)
        whole = count - count.urem(self.lanes)
        for i in f.range(0, whole, self.lanes):
            self._store_block(i, out, None)
        rest = f.lane_mask(count - whole, self.lanes)
        f.if_(whole < count, lambda: self._store_block(whole, out, rest))

    def _store_block(self, i: Value, out: Value, mask: Value | None) -> None:
        f = self.f
        value = self.value(i, mask)
        store_masked(f, value, f.gep(out, i, self.size), self.spec.dtype, mask)

    def row_address(self, number: Value) -> Value:
        return self.f.gep(self.o["x"], number * self.o["width"], self.size)

    def gather(self, row: Value, sources: Value, mask: Value | None) -> Value:
        f, dtype = self.f, self.spec.dtype
        raw = f.gather(row, sources, raw_vector(dtype, self.lanes), mask)
        return from_raw(f, raw, dtype, self.type)

    def sources(self, i: Value) -> Value:
        """The source columns of the output columns from i on."""
        return self.f.load(self.f.gep(self.below, i, 4), vec(self.lanes, i32))

    @abstractmethod
    def locate_column(self, x: Value, i: Value) -> None:
        """Compute the source of column i of the block, which is column x of the row."""

    @abstractmethod
    def select_rows(self, first: Value, y: Value) -> None:
        """Select the input rows of output row y."""

    @abstractmethod
    def value(self, i: Value, mask: Value | None) -> Value:
        """The output vector from column i of the block on."""


class _Nearest(_Resize):
    def locate_column(self, x: Value, i: Value) -> None:
        source = (x * self.o["width"]).udiv(self.o["out_width"])
        self.f.store(source.to(i32), self.f.gep(self.below, i, 4))

    def select_rows(self, first: Value, y: Value) -> None:
        self.source = self.row_address(first + (y * self.o["height"]).udiv(self.o["out_height"]))

    def value(self, i: Value, mask: Value | None) -> Value:
        return self.gather(self.source, self.sources(i), mask)


class _Linear(_Resize):
    def __init__(self, f: Function, spec: Resize) -> None:
        super().__init__(f, spec)
        self.weights = f.alloca(_BLOCK * self.type.bytes)

    def interpolation(self, i: Value, n: Value, size: Value) -> tuple[Value, Value]:
        """The source of output i: the input element before it, and the weight of the next one."""
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
            weight = at - below.to(f64)
        return below, weight.to(self.type)

    def locate_column(self, x: Value, i: Value) -> None:
        f = self.f
        below, weight = self.interpolation(x, self.o["width"], self.o["out_width"])
        f.store(below.to(i32), f.gep(self.below, i, 4))
        f.store(weight, f.gep(self.weights, i, self.type))

    def select_rows(self, first: Value, y: Value) -> None:
        f, o = self.f, self.o
        below, weight = self.interpolation(y, o["height"], o["out_height"])
        above = f.min(below + 1, o["height"] - 1)
        self.upper, self.lower = self.row_address(first + below), self.row_address(first + above)
        self.weight = f.splat(weight, self.lanes)
        self.last = f.splat((o["width"] - 1).to(i32), self.lanes)

    def value(self, i: Value, mask: Value | None) -> Value:
        f = self.f
        left = self.sources(i)
        right = f.min(left + 1, self.last)
        weight = f.load(f.gep(self.weights, i, self.type), vec(self.lanes, self.type))
        near, far = self._lerp_rows(left, mask), self._lerp_rows(right, mask)
        return _lerp(near, far, weight)

    def _lerp_rows(self, sources: Value, mask: Value | None) -> Value:
        """The two input rows, interpolated."""
        upper, lower = (self.gather(row, sources, mask) for row in (self.upper, self.lower))
        return _lerp(upper, lower, self.weight)


def _lerp(a: Value, b: Value, weight: Value) -> Value:
    return a * (1.0 - weight) + b * weight
