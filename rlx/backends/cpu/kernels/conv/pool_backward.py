"""Backward of max pooling over windows side by side: each row of windows is read once, and all of
dx is written, zeros where no window reaches."""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, lowers
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, i1, vec
from rlx.llvm.storage import compute_type, load, store
from rlx.support.records import dataclass

_ARGS = ("x", "dy", "dx", "planes", "height", "width", "out_height", "out_width")
_COLUMNS = 2  # of a window: neighbours are taken apart by one shuffle
_MOST_ROWS = 4


@dataclass(frozen=True)
class MaxPoolBackwardRows(KernelSpec):
    """args: x, dy, dx, planes, height, width, out_height, out_width

    Windows have `rows` × 2 elements and do not overlap.
    """

    x: DType
    dy: DType
    rows: int

    def emit(self, m: Module) -> None:
        _Planes(self, m.kernel()).emit()


class _Planes:
    def __init__(self, spec: MaxPoolBackwardRows, f: Function) -> None:
        self.f, self.o = f, Operands(f, _ARGS, ("x", "dy", "dx"))
        self.x, self.dy, self.rows = spec.x, spec.dy, spec.rows

    def emit(self) -> None:
        f, o = self.f, self.o
        lo, hi = f.split(o["planes"])
        lanes = f.target.lanes(compute_type(self.x).bits)
        for plane in f.range(lo, hi):
            for y in f.range(0, o["out_height"]):
                first = plane * o["height"] + y * self.rows
                row = (plane * o["out_height"] + y) * o["out_width"]
                whole = o["out_width"] & -lanes
                for n, start, end in ((lanes, f.i64(0), whole), (1, whole, o["out_width"])):
                    for column in f.range(start, end, n):
                        self._windows(first, row, column, n)
                for r in range(self.rows):
                    line = (first + r) * o["width"]
                    self._clear(line + o["out_width"] * _COLUMNS, line + o["width"])
            below = (plane * o["height"] + o["out_height"] * self.rows) * o["width"]
            self._clear(below, (plane + 1) * o["height"] * o["width"])

    def _windows(self, first: Value, row: Value, column: Value, lanes: int) -> None:
        """Windows of a row, `lanes` of them: taps in order, the first largest gets it."""
        f, o = self.f, self.o
        dy = load(f, f.gep(o["dy"], row + column, self.dy.bytes), self.dy, lanes,
                  compute_type(self.x))  # fmt: skip
        places = [(first + r) * o["width"] + column * _COLUMNS for r in range(self.rows)]
        taps: list[Value] = []
        for place in places:
            at = f.gep(o["x"], place, self.x.bytes)
            pair = [
                load(f, at, self.x, lanes, compute_type(self.x), i * lanes * self.x.bytes)
                for i in range(_COLUMNS)
            ]
            taps += [f.deinterleave(pair, i) for i in range(_COLUMNS)]
        largest = taps[0]
        for tap in taps[1:]:
            largest = f.max(largest, tap)
        taken = f.const(0, vec(lanes, i1))
        found = []
        for tap in taps:
            hit = tap.eq(largest) | tap.is_nan()
            found.append(f.select(hit & ~taken, dy, f.const(0, dy.type)))
            taken = taken | hit
        for r, place in enumerate(places):
            at = f.gep(o["dx"], place, self.x.bytes)
            left, right = found[r * _COLUMNS : (r + 1) * _COLUMNS]
            both = [left, right]
            if lanes > 1:
                mixed = f.interleave(left, right)
                both = [f.slice(mixed, i * lanes, lanes) for i in range(_COLUMNS)]
            for i, value in enumerate(both):
                store(f, value, at, self.x, i * lanes * self.x.bytes)

    def _clear(self, start: Value, end: Value) -> None:
        f, acc = self.f, compute_type(self.x)
        for i in f.range(start, end):
            store(f, f.const(0, acc), f.gep(self.o["dx"], i, self.x.bytes), self.x)


def _is_native(node: Node) -> bool:
    """Two spatial axes, and windows of a few rows and two columns that lie side by side."""
    op: Any = node.op
    if node.inputs[0].shape.rank != 4:
        return False
    window = op.forward.window(2)
    side_by_side = window.stride == window.kernel and not any(window.low + window.high)
    return side_by_side and window.kernel[1] == _COLUMNS and window.kernel[0] <= _MOST_ROWS


@lowers("max_pool_backward", when=_is_native)
def lower_max_pool_backward(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, dy = node.inputs
    batch, channels, height, width = x.shape.dims
    sizes: list[KernelArg] = [batch * channels, height, width, *dy.shape.dims[2:]]
    spec = MaxPoolBackwardRows(x.dtype, dy.dtype, op.forward.window(2).kernel[0])
    args = [Pointer(x), Pointer(dy), Pointer(node.output), *sizes]
    return [KernelLaunch(spec, args, node.inputs, node.outputs)]
