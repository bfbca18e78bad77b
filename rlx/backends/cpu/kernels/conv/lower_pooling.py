"""Lowering of pooling and resize."""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.conv.lower_conv import constant_stride, image_args
from rlx.backends.cpu.kernels.conv.pooling import Pool
from rlx.backends.cpu.kernels.conv.resize import Resize
from rlx.backends.cpu.layouts.pack_conv import Axis
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, lowers
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType
from rlx.ir.node import Node

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
