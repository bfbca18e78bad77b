"""Lowering of convolutions and pooling with channels last."""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.conv.channels_last_gemm import ChannelsLastGemm
from rlx.backends.cpu.kernels.conv.channels_last_int8 import ChannelsLastInt8
from rlx.backends.cpu.kernels.conv.channels_last_windows import (
    ChannelsLastWindows,
    tile_vectors,
)
from rlx.backends.cpu.kernels.conv.channels_last_winograd import ChannelsLastWinograd
from rlx.backends.cpu.kernels.conv.depthwise_int8 import DepthwiseInt8
from rlx.backends.cpu.layouts.channels_last import plain_size
from rlx.backends.cpu.layouts.depthwise_int8 import Tile
from rlx.backends.cpu.lowering import Context, KernelArg, KernelLaunch, Pointer, Scratch, lowers
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.ops.conv import Window
from rlx.ir.shape import Shape
from rlx.llvm.target import Target
from rlx.support.records import dataclass


@dataclass(frozen=True)
class _Axis:
    """One spatial axis of a window."""

    size: Dim
    out: Dim
    taps: int
    stride: int
    start: int
    dilation: int


def _axes(window: Window, x: Shape, out: Shape) -> tuple[_Axis, _Axis]:
    """The vertical and the horizontal axis; an image of one axis has one row."""
    found = [
        _Axis(
            x.dims[1 + i], out.dims[1 + i], window.kernel[i], window.stride[i], -window.low[i],
            window.dilation[i],
        )
        for i in range(len(window.kernel))
    ]  # fmt: skip
    return (found[0], found[1]) if len(found) == 2 else (_Axis(1, 1, 1, 1, 0, 1), found[0])


def _geometry(down: _Axis, right: _Axis) -> dict[str, KernelArg]:
    return {
        "height": down.size, "width": right.size, "out_height": down.out, "out_width": right.out,
        "stride_y": down.stride, "stride_x": right.stride, "taps_y": down.taps,
        "taps_x": right.taps, "start_y": down.start, "start_x": right.start,
        "dilation_y": down.dilation, "dilation_x": right.dilation,
    }  # fmt: skip


class _Problem:
    """A convolution with channels last, and its kernel. Sizes count words of 32 bits."""

    def __init__(self, node: Node, target: Target) -> None:
        op: Any = node.op
        self.node, self.op = node, op
        self.x, self.filters = node.inputs[:2]
        window = op.plain.window(op.w.dims)
        self.down, self.right = _axes(window, self.x.shape, node.output.shape)
        self.channels = self._words(op.w.static_dims[1])
        self.columns = op.w.static_dims[0] // op.groups
        self._join_taps(window)
        lanes = op.lanes
        vectors = -(-self.columns // lanes)
        self.panels = -(-vectors * lanes // op.width)
        width = op.width // lanes
        self.spec = self._spec(width, vectors % width or width, self.columns % lanes > 0)
        area = min(self.down.stride * self.right.stride, self.taps)
        self.block = self.spec.block(target, self.channels * op.groups, area)
        self.zeros, self.table, tiles = self.spec.scratch(target, self.taps, self.run, self.block)
        self.worker_bytes = aligned(self.zeros + self.table + tiles)

    def _words(self, channels: int) -> int:
        return channels

    def _spec(self, width: int, last: int, masked: bool) -> ChannelsLastGemm:
        op = self.op
        return ChannelsLastGemm(
            width, last, masked, self.is_pointwise, op.has_bias, op.has_residual, op.activation
        )  # fmt: skip

    def _operands(self) -> dict[str, Value | None]:
        bias, residual = self.op.extras(*self.node.inputs[2:])
        return {"bias": bias, "residual": residual}

    def _join_taps(self, window: Window) -> None:
        """A row of taps is contiguous where nothing is padded beside it."""
        self.run = self.channels
        right = self.right
        joins = not (window.low[-1] or window.high[-1]) and right.dilation == 1
        self.taps_x = right.taps
        if joins and self.op.groups == 1:
            self.run, self.taps_x = self.channels * right.taps, 1
        self.taps = self.down.taps * self.taps_x

    @property
    def is_pointwise(self) -> bool:
        """Whether pixels follow each other as the rows of a matrix."""
        plain = {(a.taps, a.stride, a.start) for a in (self.down, self.right)} == {(1, 1, 0)}
        return plain and self._keeps_size

    @property
    def _keeps_size(self) -> bool:
        window = self.op.plain.window(self.op.w.dims)
        return not any((*window.low, *window.high))

    def launch(self) -> KernelLaunch:
        op, node = self.op, self.node
        taps, run = self.spec.chunk(self.taps, self.run)
        args: dict[str, KernelArg] = _geometry(self.down, self.right)
        args |= {
            "x": Pointer(self.x), "filters": Pointer(self.filters), "out": Pointer(node.output),
            "scratch": Scratch(node) if self.worker_bytes else 0,
            "scratch_bytes": self.worker_bytes, "batch": self.x.shape.dims[0],
            "groups": op.groups, "columns": self.columns, "panels": self.panels,
            "channels": self.channels, "taps_x": self.taps_x, "run": self.run,
            "block": self.block, "chunk_taps": taps, "chunk_run": run,
        }  # fmt: skip
        args |= {name: Pointer(v) for name, v in self._operands().items() if v is not None}
        return _launch(node, self.spec, args)


class _Int8Problem(_Problem):
    """A convolution of 8-bit integers, four channels to a word."""

    def _words(self, channels: int) -> int:
        return channels // 4

    def _spec(self, width: int, last: int, masked: bool) -> ChannelsLastGemm:
        op, node = self.op, self.node
        return ChannelsLastInt8(
            width, last, masked, self.is_pointwise, op.has_bias, op.has_residual, op.activation,
            self.x.shape.dtype, node.output.shape.dtype if op.quantized else None,
            *self._residual_types(),
        )  # fmt: skip

    def _residual_types(self) -> list[DType]:
        """The element types of the result before the sum, and of the residual."""
        given = self._operands()
        if not self.op.has_residual:
            return []
        return [v.shape.dtype for v in (given["y_zero"], given["residual"]) if v is not None]

    def _operands(self) -> dict[str, Value | None]:
        names = ["sums", "x_zero"] + ["scale", "y_zero"] * self.op.quantized
        names += ["bias"] * self.op.has_bias
        names += ["residual", "r_zero", "factors", "sum_zero"] * self.op.has_residual
        return dict(zip(names, self.node.inputs[2:], strict=True))


def _launch(node: Node, spec: Any, args: dict[str, KernelArg]) -> KernelLaunch:
    cost = node.op.cost([v.shape for v in node.inputs], [v.shape for v in node.outputs])
    return KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [node.output],
        uses_scratch=any(isinstance(a, Scratch) for a in args.values()),
        flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


def _winograd_spec(node: Node) -> ChannelsLastWinograd:
    op: Any = node.op
    columns, width = op.w.static_dims[0], op.width // op.lanes
    last = -(-columns // op.lanes) % width or width
    masked = columns % op.lanes > 0
    return ChannelsLastWinograd(
        width, last, masked, op.has_bias, op.has_residual, op.activation
    )  # fmt: skip


def _winograd(node: Node, target: Target) -> KernelLaunch:
    op: Any = node.op
    x, filters = node.inputs[:2]
    bias, residual = op.extras(*node.inputs[2:])
    dims, spec = op.w.static_dims, _winograd_spec(node)
    args: dict[str, KernelArg] = _geometry(
        *_axes(op.plain.window(dims), x.shape, node.output.shape)
    )
    each = aligned(spec.scratch(target, dims[1]))
    plain = plain_size(dims, 1, op.form, op.width, op.lanes)
    args |= {
        "x": Pointer(x), "filters": Pointer(filters), "points": Pointer(filters, plain),
        "out": Pointer(node.output), "scratch": Scratch(node), "scratch_bytes": each,
        "batch": x.shape.dims[0], "columns": dims[0], "panels": -(-dims[0] // op.width),
        "channels": dims[1], "block": spec.block(target),
    }  # fmt: skip
    given = {"bias": bias, "residual": residual}
    args |= {name: Pointer(v) for name, v in given.items() if v is not None}
    return _launch(node, spec, args)


def _conv_scratch(node: Node, target: Target, threads: int) -> int:
    op: Any = node.op
    if op.form == "depthwise":
        return 0
    if op.form == "winograd":
        return aligned(_winograd_spec(node).scratch(target, op.w.static_dims[1])) * threads
    return _Problem(node, target).worker_bytes * threads


@lowers("conv_channels_last", scratch=_conv_scratch)
def lower_conv(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    if op.form == "depthwise":
        return [_depthwise(node, ctx.target)]
    if op.form == "winograd":
        return [_winograd(node, ctx.target)]
    return [_Problem(node, ctx.target).launch()]


def _windows(node: Node, window: Window) -> dict[str, KernelArg]:
    x, out = node.inputs[0], node.output
    args = _geometry(*_axes(window, x.shape, out.shape))
    return args | {
        "x": Pointer(x), "out": Pointer(out), "batch": x.shape.dims[0],
        "channels": x.shape.dims[-1],
    }  # fmt: skip


def _channel_tiles(channels: Dim, dtype: DType, target: Target) -> tuple[bool, int]:
    """Whether the channels fill a tile of windows, and how many vectors those after it need."""
    assert isinstance(channels, int)
    lanes, vectors = target.lanes(8 * dtype.bytes), tile_vectors(target)
    return channels >= vectors * lanes, -(-(channels % (vectors * lanes)) // lanes)


def _dilation(window: Window) -> tuple[int, int]:
    """Down and to the right."""
    return (1, 1, *window.dilation)[-2], window.dilation[-1]


def _depthwise(node: Node, target: Target) -> KernelLaunch:
    op: Any = node.op
    bias, residual = op.extras(*node.inputs[2:])
    window = op.plain.window(op.w.dims)
    spec = ChannelsLastWindows(
        "depthwise", window.kernel[-1], window.stride[-1], _dilation(window),
        *_channel_tiles(node.output.shape.dims[-1], f32, target), bias is not None,
        residual is not None, op.activation,
    )  # fmt: skip
    args = _windows(node, window) | {"filters": Pointer(node.inputs[1])}
    given = {"bias": bias, "residual": residual}
    args |= {name: Pointer(v) for name, v in given.items() if v is not None}
    return _launch(node, spec, args)


def _int8_scratch(node: Node, target: Target, threads: int) -> int:
    return _Int8Problem(node, target).worker_bytes * threads


@lowers("conv_channels_last_int8", scratch=_int8_scratch)
def lower_int8(node: Node, ctx: Context) -> list[KernelLaunch]:
    return [_Int8Problem(node, ctx.target).launch()]


@lowers("depthwise_channels_last_int8")
def lower_depthwise_int8(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    window = op.plain.window(op.w.dims)
    rows = window.kernel[0] if len(window.kernel) == 2 else 1
    spec = DepthwiseInt8(
        Tile(*op.tile), rows, _dilation(window)[0], op.vector, op.halves, op.has_bias,
        op.activation == "relu", node.inputs[0].shape.dtype, node.output.shape.dtype,
    )  # fmt: skip
    names = ["x", "filters", "sums", "x_zero", "scale", "y_zero"] + ["bias"] * op.has_bias
    given = zip(names, node.inputs, strict=True)
    args: dict[str, KernelArg] = {name: Pointer(v) for name, v in given}
    return [_launch(node, spec, _windows(node, window) | args)]


@lowers("pool_channels_last")
def lower_pool(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    window = op.plain.window(node.inputs[0].shape.rank - 2)
    kind = "max" if op.largest else "mean" if op.count_include_pad else "inner"
    out = node.output.shape
    tiles = _channel_tiles(out.dims[-1], out.dtype, ctx.target)
    spec = ChannelsLastWindows(
        kind, window.kernel[-1], window.stride[-1], (1, 1), *tiles, dtype=out.dtype
    )
    return [_launch(node, spec, _windows(node, window))]
