"""Convolutions: filters are packed beforehand where they are known, else by a step of their own."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    lowers,
)
from rlx.codegen.conv import Conv, tile_rows
from rlx.codegen.conv_filters import PackFilters
from rlx.codegen.depthwise import CausalDepthwise, Depthwise
from rlx.codegen.line import MOST_LOADS
from rlx.codegen.target import Target
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.graph import Graph
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.ops.activation import activation_kinds, is_default
from rlx.ir.ops.conv import ConvTranspose
from rlx.ir.ops.pack_conv import Axis, packed_sizes, phases
from rlx.ir.shape import Shape
from rlx.passes.rewrite import Editor
from rlx.support.records import dataclass

_FEW_FILTERS = 4  # with fewer per channel, packing costs more than it saves
_PIECE = 128  # tokens of a sequence that one unit of work of the causal kernel takes at most
_ONE_LINE = Axis(0, 1, 1, 0, 1, 1)  # the axis that a 1-D convolution lacks


def pack_conv(graph: Graph, target: Target) -> Graph:
    """Filters that are known before any run are packed by `prepare`; an activation is taken in."""
    editor = Editor(graph, "pack_conv")
    for node in list(graph.nodes):
        if node.op.name not in ("conv", "conv_transpose") or not editor.is_fixed(node.inputs[1]):
            continue
        job = _job(node)
        if not node.inputs[1].shape.is_static or job.is_depthwise:
            continue
        last = _activation(node, editor) or node
        result, _ = editor.build(last, partial(_packed, graph, node, last, job, target))
        editor.replace(last.output, result)
    return editor.finish()


def _activation(node: Node, editor: Editor) -> Node | None:
    """The op that alone takes the result, if it is a function the kernel can apply."""
    if editor.uses(node.output) != 1 or not editor.users[node.output]:
        return None
    user = editor.users[node.output][0]
    plain = user.op.name in activation_kinds() and is_default(user.op)
    return user if plain and user.output.shape is node.output.shape else None


def _packed(graph: Graph, node: Node, last: Node, job: _Job, target: Target) -> Value:
    x, w, *bias = node.inputs
    attributes = {k: getattr(job.record, k) for k in _SHARED}
    attributes["transposed"] = isinstance(job.record, ConvTranspose)
    attributes["output_padding"] = getattr(job.record, "output_padding", (0,))
    attributes["tile"] = tile_rows(target, job.filters)
    packed = graph.append(lookup("pack_conv")(**attributes, dtype=job.packed), (w,))
    activation = last.op.name if last is not node else "none"
    made = lookup("packed_conv")(**attributes, w=w.shape, activation=activation)
    result: Value = graph.append(made, (x, packed, *bias), last.name)
    return result


_SHARED = ("stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class _Job:
    """What the op does, whichever way its filters come."""

    record: Any  # Conv or ConvTranspose
    w: Shape
    x: Value
    bias: Value | None
    out: Value

    @property
    def filters(self) -> int:
        """Filters of one group."""
        size = self.w.static_dims[1 if isinstance(self.record, ConvTranspose) else 0]
        return size if isinstance(self.record, ConvTranspose) else size // int(self.record.groups)

    @property
    def channels(self) -> int:
        """Channels of one group."""
        if isinstance(self.record, ConvTranspose):
            return self.w.static_dims[0] // self.record.groups
        return self.w.static_dims[1]

    @property
    def is_depthwise(self) -> bool:
        plain = not isinstance(self.record, ConvTranspose)
        return plain and self.channels == 1 and self.filters < _FEW_FILTERS

    @property
    def packed(self) -> DType:
        """The type that packed filters have: that of the sums."""
        return f64 if self.out.shape.dtype is f64 else f32

    @property
    def terms(self) -> int:
        return self.channels * prod(self.w.static_dims[2:])


def _job(node: Node) -> _Job:
    op: Any = node.op
    x, w, *bias = node.inputs
    packed = op.name == "packed_conv"
    record, shape = (op.plain, op.w) if packed else (op, w.shape)
    return _Job(record, shape, x, bias[0] if bias else None, node.output)


def _image(x: Shape) -> tuple[Dim, Dim]:
    """Lines and columns; a 1-D image is one line."""
    return (1, x.dims[2]) if x.rank == 3 else (x.dims[2], x.dims[3])


def image_args(x: Shape, out: Shape, down: Axis, right: Axis) -> dict[str, KernelArg]:
    """The args of a kernel over windows that say where they lie."""
    height, width = _image(x)
    lines, columns = _image(out)
    return {
        "height": height, "width": width, "lines": lines, "columns": columns,
        "step_y": down.step, "step_x": right.step, "taps_y": down.taps, "first_y": down.first,
        "tap_y": down.tap, "first_x": right.first,
    }  # fmt: skip


def in_line(step: int) -> int:
    """The step that Line takes: one known only at run time where it is long."""
    return step if step <= MOST_LOADS else 0


def _filter_bytes(node: Node, target: Target) -> int:
    """Scratch for filters that are packed with every run."""
    job = _job(node)
    if node.op.name == "packed_conv" or job.is_depthwise:
        return 0
    tile = tile_rows(target, job.filters)
    sizes = packed_sizes(job.record, job.w.static_dims, tile)
    return aligned(sum(n for _, n in sizes) * job.packed.bytes)


def _scratch(node: Node, target: Target, threads: int) -> int:
    job = _job(node)
    if job.is_depthwise:
        return 0
    spec = Conv(job.x.shape.dtype, job.out.shape.dtype)
    return _filter_bytes(node, target) + threads * spec.scratch(target, job.terms)


def _is_fixed_size(node: Node) -> bool:
    return _job(node).w.is_static


@lowers("conv", "conv_transpose", "packed_conv", when=_is_fixed_size, scratch=_scratch)
def lower_conv(node: Node, ctx: Context) -> list[KernelLaunch]:
    job = _job(node)
    if job.is_depthwise:
        return [_depthwise(node, job)]
    packed = node.op.name == "packed_conv"
    tile = getattr(node.op, "tile", 0) or tile_rows(ctx.target, job.filters)
    steps: list[KernelLaunch] = []
    start = 0
    for axes, size in packed_sizes(job.record, job.w.static_dims, tile):
        filters: KernelArg = Scratch(node, start * job.packed.bytes)
        if packed:
            filters = Pointer(node.inputs[1], start)
        else:
            steps.insert(0, _pack_launch(node, job, axes, tile, filters))
        steps.append(_conv_launch(node, job, axes, tile, filters, ctx))
        start += size
    return steps


def _both(axes: tuple[Axis, ...]) -> tuple[Axis, Axis]:
    return (_ONE_LINE, axes[0]) if len(axes) == 1 else (axes[0], axes[1])


def _conv_launch(
    node: Node, job: _Job, axes: tuple[Axis, ...], tile: int, filters: KernelArg, ctx: Context
) -> KernelLaunch:
    down, right = _both(axes)
    x, out = job.x.shape, job.out.shape
    height, width = _image(x)
    spread = down.out_step > 1 or right.out_step > 1
    bias = job.bias.shape.dtype if job.bias is not None else None
    activation = getattr(node.op, "activation", "none")
    spec = Conv(x.dtype, out.dtype, bias, tile, in_line(right.step), spread, activation)
    stride = spec.scratch(ctx.target, job.terms)
    lines, columns = _image(out)
    args: dict[str, KernelArg] = {
        "x": Pointer(job.x), "filters": filters, "out": Pointer(job.out),
        "scratch": Scratch(node, _filter_bytes(node, ctx.target)), "stride": stride,
        "batch": x.dims[0], "groups": job.record.groups, "channels": job.channels,
        "tiles": -(-job.filters // tile), "rows": job.filters,
        "chunk": spec.chunk(ctx.target, job.terms), "height": height, "width": width,
        "lines": down.outputs(lines), "columns": right.outputs(columns),
        "step_y": down.step, "step_x": right.step,
        "taps_y": down.taps, "first_y": down.first, "tap_y": down.tap,
        "taps_x": right.taps, "first_x": right.first, "tap_x": right.tap,
        "plane": lines * columns, "line": columns,
        "out_first_y": down.out_first, "out_first_x": right.out_first,
        "out_step_y": down.out_step, "out_step_x": right.out_step,
    }  # fmt: skip
    if job.bias is not None:
        args["bias"] = Pointer(job.bias)
    cost = job.record.cost([x, job.w], [out])
    return KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [job.out],
        uses_scratch=True, flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


def _pack_launch(
    node: Node, job: _Job, axes: tuple[Axis, ...], tile: int, to: KernelArg
) -> KernelLaunch:
    down, right = _both(axes)
    w = node.inputs[1]
    line = job.w.static_dims[-1]
    taps = prod(job.w.static_dims[2:])
    by_filter, by_channel = job.channels * taps, taps
    if isinstance(job.record, ConvTranspose):
        by_filter, by_channel = taps, job.filters * taps
    args: dict[str, KernelArg] = {
        "w": Pointer(w, down.start * line + right.start), "to": to,
        "groups": job.record.groups, "tiles": -(-job.filters // tile), "rows": job.filters,
        "channels": job.channels, "taps_y": down.taps, "taps_x": right.taps,
        "by_group": job.filters * job.channels * taps, "by_row": by_filter,
        "by_channel": by_channel, "by_y": down.skip * line, "by_x": right.skip,
    }  # fmt: skip
    spec = PackFilters(w.shape.dtype, job.packed, tile)
    return KernelLaunch(spec, [args[name] for name in spec.args], [w], [], uses_scratch=True)


def _depthwise(node: Node, job: _Job) -> KernelLaunch:
    down, right = _both(phases(job.record, job.w.dims)[0])
    x, out = job.x.shape, job.out.shape
    bias = job.bias.shape.dtype if job.bias is not None else None
    spec = Depthwise(
        x.dtype, job.w.dtype, out.dtype, bias, right.taps, right.tap, in_line(right.step)
    )
    args: dict[str, KernelArg] = {
        "x": Pointer(job.x), "w": Pointer(node.inputs[1]), "out": Pointer(job.out),
        "planes": x.dims[0] * job.w.static_dims[0], "filters": job.w.static_dims[0],
        "multiple": job.filters,
    }  # fmt: skip
    args |= image_args(x, out, down, right)
    if job.bias is not None:
        args["bias"] = Pointer(job.bias)
    cost = job.record.cost([x, job.w], [out])
    return KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [job.out],
        flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


@lowers("depthwise_conv1d_causal")
def lower_causal(node: Node, ctx: Context) -> list[KernelLaunch]:
    x, w, before = node.inputs
    batch, seq, channels = x.shape.dims
    taps = w.shape.dims[1]
    assert isinstance(taps, int)
    out = node.output
    spec = CausalDepthwise(x.shape.dtype, w.shape.dtype, before.shape.dtype, out.shape.dtype, taps)
    args: list[KernelArg] = [Pointer(v) for v in (x, w, before, out)]
    args += [batch, seq, channels, _PIECE]
    cost = node.op.cost([v.shape for v in node.inputs], [out.shape])
    return [KernelLaunch(spec, args, [x, w, before], [out], flops=cost.flops, bytes=cost.bytes)]
