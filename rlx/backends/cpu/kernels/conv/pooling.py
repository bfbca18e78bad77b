"""Max and average pooling over sliding windows.

Lowering of pooling and resize.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.conv.lower_conv import constant_stride, image_args
from rlx.backends.cpu.kernels.conv.resize import Resize
from rlx.backends.cpu.kernels.conv.row_loads import RowLoads
from rlx.backends.cpu.kernels.conv.windows import GEOMETRY, Windows
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.layouts.pack_conv import Axis
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, lowers
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, i32, vec
from rlx.llvm.storage import compute_type, memory_type, store
from rlx.support.records import dataclass


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
