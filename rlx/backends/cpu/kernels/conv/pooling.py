"""Max and average pooling over sliding windows; resize by nearest neighbour or bilinearly.

The source columns and weights of a block of output columns that resize reads are computed once for
all rows of a worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rlx.backends.cpu.kernels.conv.lower_conv import constant_stride, image_args
from rlx.backends.cpu.kernels.conv.windows import (
    GEOMETRY,
    RowLoads,
    Windows,
    from_raw,
    raw_vector,
    store_masked,
)
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.layouts.pack_conv import Axis
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, lowers
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, f64, i32, i64, vec
from rlx.llvm.storage import compute_type, memory_type, store
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


@dataclass(frozen=True)
class Pool(KernelSpec):
    """args: x, out, planes, then GEOMETRY

    `kind` is "max" (NaN propagates), "mean" (padding counts as zeros) or "inner_mean" (padding does
    not count). `within_window`: vectors are along the rows of one window instead of across
    neighbouring windows, for few wide windows.
    """

    dtype: DType
    kind: str
    taps_x: int
    stride: int  # as in RowLoads
    within_window: bool = False

    args = ("x", "out", "planes", *GEOMETRY)

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("x", "out"))
        reduction = _Reduction(f, self)
        if self.within_window:
            _emit_within_window(f, o, self, reduction)
        else:
            _Pool(f, o, self, reduction).emit(o["planes"])


class _Reduction:
    """The reduction of a window: sum or maximum."""

    def __init__(self, f: Function, spec: Pool) -> None:
        self.f, self.spec, self.type = f, spec, compute_type(spec.dtype)
        self.unsigned = spec.dtype.kind == "uint"

    @property
    def identity(self) -> float:
        """The identity of the reduction: the value of padding."""
        if self.spec.kind != "max" or self.unsigned:
            return 0
        return float("-inf") if self.type.is_float else -(1 << self.spec.dtype.bits - 1)

    def combine(self, a: Value, b: Value) -> Value:
        if self.spec.kind != "max":
            return a + b
        return self.f.umax(a, b) if self.unsigned else self.f.max(a, b)

    def reduce(self, vector: Value) -> Value:
        lanes = vector.type.lanes
        while lanes > 1:
            lanes //= 2
            vector = self.combine(
                self.f.slice(vector, 0, lanes), self.f.slice(vector, lanes, lanes)
            )
        return vector


def _count_inside(f: Function, first: Value, taps: Value, limit: Value) -> Value:
    """How many of `taps` indices from `first` on are within 0 … limit - 1."""
    return f.max(f.min(first + taps, limit) - f.max(first, 0), 0)


class _Pool(Windows):
    def __init__(self, f: Function, o: Operands, spec: Pool, reduction: _Reduction) -> None:
        self.spec, self.reduction = spec, reduction
        lanes = f.target.lanes(reduction.type.bits)
        loads = RowLoads(spec.dtype, reduction.type, lanes, spec.stride, reduction.identity)
        super().__init__(f, o, loads, spec.dtype, spec.taps_x, 1)

    def begin_plane(self, plane: Value) -> Value:
        return plane

    def initial(self) -> Value:
        return self.f.const(self.reduction.identity, vec(self.lanes, self.reduction.type))

    def accumulate(
        self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value
    ) -> list[Value]:
        if inputs is None:
            return sums
        return [self.reduction.combine(total, x) for total, x in zip(sums, inputs, strict=True)]

    def finish(self, total: Value, top: Value, left: Value) -> Value:
        f, o, type_ = self.f, self.o, total.type
        if self.spec.kind == "max":
            return total
        if self.spec.kind == "mean":
            return total / f.splat((o["taps_y"] * self.taps_x).to(type_.scalar), self.lanes)
        rows = f.splat(_count_inside(f, top, o["taps_y"], o["height"]).to(type_.scalar), self.lanes)
        offsets = f.iota(vec(self.lanes, i32)) * f.splat(o["stride_x"].to(i32), self.lanes)
        first = offsets + f.splat(left.to(i32), self.lanes)
        taps = f.const(self.taps_x, first.type)
        columns = _count_inside(f, first, taps, f.splat(o["width"].to(i32), self.lanes))
        return total / (columns.to(type_.scalar) * rows)


def _emit_within_window(f: Function, o: Operands, spec: Pool, reduction: _Reduction) -> None:
    lo, hi = f.split(o["planes"] * o["out_height"] * o["out_width"])
    size = memory_type(spec.dtype).bytes
    for at in f.range(lo, hi):
        row, x = at.udiv(o["out_width"]), at.urem(o["out_width"])
        plane, y = row.udiv(o["out_height"]), row.urem(o["out_height"])
        top = y * o["stride_y"] + o["start_y"]
        left = x * o["stride_x"] + o["start_x"]
        start = (plane * o["height"] + f.max(top, 0)) * o["width"] + f.max(left, 0)
        rows = _count_inside(f, top, o["taps_y"], o["height"])
        columns = _count_inside(f, left, f.i64(spec.taps_x), o["width"])
        total = _reduce_window(f, o, spec, reduction, start, rows, columns)
        if spec.kind != "max":
            taps = o["taps_y"] * spec.taps_x if spec.kind == "mean" else rows * columns
            total = total / taps.to(reduction.type)
        store(f, total, f.gep(o["out"], at, size), spec.dtype)


def _reduce_window(
    f: Function,
    o: Operands,
    spec: Pool,
    reduction: _Reduction,
    start: Value,
    rows: Value,
    columns: Value,
) -> Value:
    """The reduction of one window, inside the image."""
    lanes = f.target.lanes(reduction.type.bits)
    loads = RowLoads(spec.dtype, reduction.type, lanes, 1, reduction.identity)
    whole = columns - columns.urem(lanes)
    zero, one, size = f.i64(0), f.i64(1), memory_type(spec.dtype)
    plain = loads.loader(f, zero, columns, one, inside=True)
    rest = loads.loader(f, zero, columns - whole, one, inside=False)

    def row(i: Value, total: Value) -> Value:
        base = f.gep(o["x"], start + i * o["width"], size)
        [total] = f.loop(
            0, whole, lanes, [total], lambda k, t: reduction.combine(t, plain(f.gep(base, k, size)))
        )
        return reduction.combine(total, rest(f.gep(base, whole, size)))

    initial = f.const(reduction.identity, vec(lanes, reduction.type))
    return reduction.reduce(f.loop(0, rows, 1, [initial], row)[0])


# "nearest" only copies elements: types of one size are the same.
_UINT = {1: DType.of("u8"), 2: DType.of("u16"), 4: DType.of("u32"), 8: DType.of("u64")}


@lowers("max_pool", "avg_pool")
def lower_pool(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, out = node.inputs[0].shape, node.output.shape
    window = op.window(x.rank - 2)
    axes = [
        Axis(0, 1, k, -low, 1, step)
        for k, low, step in zip(window.kernel, window.low, window.stride, strict=True)
    ]
    down, right = (Axis(0, 1, 1, 0, 1, 1), axes[0]) if len(axes) == 1 else axes
    kind = "max"
    if op.name == "avg_pool":
        kind = "mean" if op.count_include_pad else "inner_mean"
    within_window = right.taps > ctx.upper(out.dims[-1])
    spec = Pool(x.dtype, kind, right.taps, constant_stride(right.step), within_window)
    args: dict[str, KernelArg] = {
        "x": Pointer(node.inputs[0]), "out": Pointer(node.output), "planes": x.dims[0] * x.dims[1],
    }  # fmt: skip
    args |= image_args(x, out, down, right)
    cost = op.cost([x], [out])
    return [
        KernelLaunch(
            spec, [args[name] for name in spec.args], [node.inputs[0]], [node.output],
            flops=cost.flops, bytes=cost.bytes,
        )
    ]  # fmt: skip


@lowers("resize")
def lower_resize(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, out = node.inputs[0].shape, node.output.shape
    sizes: tuple[Dim, ...] = (*x.dims[2:], *out.dims[2:])
    if x.rank == 3:
        sizes = (1, sizes[0], 1, sizes[1])
    mode, dtype = op.mode, x.dtype
    if mode == "nearest":
        dtype = _UINT[dtype.bytes]
    elif op.align_corners:
        mode = "corners"
    args: list[KernelArg] = [Pointer(node.inputs[0]), Pointer(node.output), x.dims[0] * x.dims[1]]
    cost = op.cost([x], [out])
    return [
        KernelLaunch(
            Resize(dtype, mode), [*args, *sizes], [node.inputs[0]], [node.output],
            flops=cost.flops, bytes=cost.bytes,
        )
    ]  # fmt: skip
