"""Lowering of convolutions; filters are packed once by `prepare` if constant, else in every run."""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.conv.depthwise import CausalDepthwise, Depthwise
from rlx.backends.cpu.kernels.conv.direct import DirectConv, PackFilters, tile_rows
from rlx.backends.cpu.kernels.conv.windows import MAX_SHUFFLED_STRIDE
from rlx.backends.cpu.kernels.conv.winograd import PackWinograd, WinogradConv
from rlx.backends.cpu.layouts.pack_conv import Axis, packed_sizes, phases, transformed_size
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    lowers,
)
from rlx.ir.dim import Dim, upper_bound
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.graph import Graph
from rlx.ir.lir import aligned
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.ir.ops.activation import activation_ops, is_default
from rlx.ir.ops.conv import ConvTranspose
from rlx.ir.shape import Shape
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor
from rlx.support.records import dataclass

MIN_PACKED_FILTERS = 4  # with fewer per channel, packing does not pay
CAUSAL_SEGMENT = 128  # tokens of a work item of the causal kernel
_UNIT_AXIS = Axis(0, 1, 1, 0, 1, 1)  # the missing axis of a 1-D convolution


CONVOLUTIONS = frozenset(("conv", "conv_transpose"))


def pack_conv(graph: Graph, target: Target) -> Graph:
    """Pack constant filters in `prepare`, and fuse an activation."""
    editor = Editor(graph, "pack_conv")
    for node in list(graph.nodes):
        if node.op.name not in CONVOLUTIONS or not editor.is_param_only(node.inputs[1]):
            continue
        problem = _problem(node)
        if not node.inputs[1].shape.is_static or problem.is_depthwise:
            continue
        last = _activation(node, editor) or node
        with editor.building(last):
            result = _packed(graph, node, last, problem, target)
        editor.replace(last.output, result)
    return editor.finish()


def _activation(node: Node, editor: Editor) -> Node | None:
    """The only user of the result, if it is an activation that the kernel can fuse."""
    if editor.uses(node.output) != 1 or not editor.users[node.output]:
        return None
    user = editor.users[node.output][0]
    plain = user.op.name in activation_ops() and is_default(user.op)
    return user if plain and user.output.shape is node.output.shape else None


def _packed(graph: Graph, node: Node, last: Node, problem: _ConvProblem, target: Target) -> Value:
    x, w, *bias = node.inputs
    attributes = {k: getattr(problem.record, k) for k in _SHARED}
    attributes["transposed"] = isinstance(problem.record, ConvTranspose)
    attributes["output_padding"] = getattr(problem.record, "output_padding", (0,))
    attributes["tile"] = tile_rows(target, problem.filters)
    attributes["winograd"] = _suits_winograd(problem, target)
    packed = graph.append(lookup("pack_conv")(**attributes, dtype=problem.packed), (w,))
    activation = last.op.name if last is not node else "none"
    made = lookup("packed_conv")(**attributes, w=w.shape, activation=activation)
    result: Value = graph.append(made, (x, packed, *bias), last.name)
    return result


WINOGRAD_CHANNELS = range(8, 257)  # more do not fit in the L2 cache


def _suits_winograd(problem: _ConvProblem, target: Target) -> bool:
    record, w = problem.record, problem.w.static_dims
    if isinstance(record, ConvTranspose) or w[2:] != (3, 3) or problem.packed is not f32:
        return False
    if set(record.stride) | set(record.dilation) | {record.groups} != {1}:
        return False
    width, lanes = problem.out.shape.dims[3], target.lanes(32)
    if w[1] not in WINOGRAD_CHANNELS or w[0] < WINOGRAD_CHANNELS.start:
        return False
    return lanes > 1 and not (isinstance(width, int) and width < lanes)


def _runs_winograd(node: Node, target: Target) -> bool:
    packed = node.op.name == "packed_conv"
    transformed = not packed or getattr(node.op, "winograd", False)
    return transformed and _suits_winograd(_problem(node), target)


_SHARED = ("stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class _ConvProblem:
    """A convolution, whether its filters are packed or not."""

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
        return plain and self.channels == 1 and self.filters < MIN_PACKED_FILTERS

    @property
    def packed(self) -> DType:
        """The type of packed filters: that of the accumulators."""
        return f64 if self.out.shape.dtype is f64 else f32

    @property
    def terms(self) -> int:
        return self.channels * prod(self.w.static_dims[2:])


def _problem(node: Node) -> _ConvProblem:
    op: Any = node.op
    x, w, *bias = node.inputs
    packed = op.name == "packed_conv"
    record, shape = (op.plain, op.w) if packed else (op, w.shape)
    return _ConvProblem(record, shape, x, bias[0] if bias else None, node.output)


def _image(x: Shape) -> tuple[Dim, Dim]:
    """Height and width; a 1-D image has one row."""
    return (1, x.dims[2]) if x.rank == 3 else (x.dims[2], x.dims[3])


def image_args(x: Shape, out: Shape, down: Axis, right: Axis) -> dict[str, KernelArg]:
    """The geometry arguments of a kernel over windows."""
    height, width = _image(x)
    lines, columns = _image(out)
    return {
        "height": height, "width": width, "out_height": lines, "out_width": columns,
        "stride_y": down.step, "stride_x": right.step, "taps_y": down.taps, "start_y": down.first,
        "dilation_y": down.tap, "start_x": right.first,
    }  # fmt: skip


def constant_stride(step: int) -> int:
    """The stride as a constant of the code; 0 (an argument) if it is too long to shuffle."""
    return step if step <= MAX_SHUFFLED_STRIDE else 0


def _filter_bytes(node: Node, target: Target) -> int:
    """Scratch bytes for filters that are packed in every run."""
    problem = _problem(node)
    if node.op.name == "packed_conv" or problem.is_depthwise:
        return 0
    tile = tile_rows(target, problem.filters)
    dims = problem.w.static_dims
    size = sum(n for _, n in packed_sizes(problem.record, dims, tile))
    if _runs_winograd(node, target):
        size += transformed_size(dims, tile)
    return aligned(size * problem.packed.bytes)


def _worker_bytes(node: Node, target: Target) -> int:
    """Scratch bytes of each worker."""
    problem = _problem(node)
    x, out, tile = problem.x.shape.dtype, problem.out.shape.dtype, _tile(node, target)
    size = DirectConv(x, out).scratch(target, problem.terms)
    if _runs_winograd(node, target):
        size = max(size, WinogradConv(x, out, None, tile, problem.channels).scratch(target))
    return aligned(size)


def _tile(node: Node, target: Target) -> int:
    return getattr(node.op, "tile", 0) or tile_rows(target, _problem(node).filters)


def _scratch(node: Node, target: Target, threads: int) -> int:
    problem = _problem(node)
    if problem.is_depthwise:
        return 0
    flags = 0
    if _runs_winograd(node, target):
        images = upper_bound(problem.x.shape.dims[0], node.graph.live)
        flags = 8 * threads * images
    return _filter_bytes(node, target) + threads * _worker_bytes(node, target) + aligned(flags)


def _is_fixed_size(node: Node) -> bool:
    return _problem(node).w.is_static


@lowers("conv", "conv_transpose", "packed_conv", when=_is_fixed_size, scratch=_scratch)
def lower_conv(node: Node, ctx: Context) -> list[KernelLaunch]:
    problem = _problem(node)
    if problem.is_depthwise:
        return [_depthwise(node, problem)]
    packed = node.op.name == "packed_conv"
    tile = _tile(node, ctx.target)
    if _runs_winograd(node, ctx.target):
        return _winograd_launches(node, problem, tile, ctx)
    steps: list[KernelLaunch] = []
    start = 0
    for axes, size in packed_sizes(problem.record, problem.w.static_dims, tile):
        filters: KernelArg = Scratch(node, start * problem.packed.bytes)
        if packed:
            filters = Pointer(node.inputs[1], start)
        else:
            steps.insert(0, _pack_launch(node, problem, axes, tile, filters))
        steps.append(_conv_launch(node, problem, axes, tile, filters, ctx))
        start += size
    return steps


def _winograd_launches(
    node: Node, problem: _ConvProblem, tile: int, ctx: Context
) -> list[KernelLaunch]:
    """The convolution, and the direct kernel for images with infinite results."""
    [(axes, size)] = packed_sizes(problem.record, problem.w.static_dims, tile)
    plain: KernelArg = Scratch(node, 0)
    transformed: KernelArg = Scratch(node, size * f32.bytes)
    steps: list[KernelLaunch] = []
    if node.op.name == "packed_conv":
        plain, transformed = Pointer(node.inputs[1], 0), Pointer(node.inputs[1], size)
    else:
        w = node.inputs[1]
        sizes = [-(-problem.filters // tile), problem.filters, problem.channels]
        steps = [
            _pack_launch(node, problem, axes, tile, plain),
            KernelLaunch(
                PackWinograd(w.shape.dtype, tile), [Pointer(w), transformed, *sizes], [w], [],
                uses_scratch=True,
            ),
        ]  # fmt: skip
    down, right = _two_axes(axes)
    x, out = problem.x.shape, problem.out.shape
    bias = problem.bias.shape.dtype if problem.bias is not None else None
    activation = getattr(node.op, "activation", "none")
    spec = WinogradConv(x.dtype, out.dtype, bias, tile, problem.channels, activation)
    args = image_args(x, out, down, right) | _memory_args(node, problem, ctx)
    args |= {"filters": transformed}
    cost = problem.record.cost([x, problem.w], [out])
    launch = KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [problem.out],
        uses_scratch=True, flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip
    again = _conv_launch(node, problem, axes, tile, plain, ctx, again=True)
    return [*steps, launch, again]


def _memory_args(node: Node, problem: _ConvProblem, ctx: Context) -> dict[str, KernelArg]:
    """Operands, scratch memory, and how many images and filters there are."""
    filters, each = _filter_bytes(node, ctx.target), _worker_bytes(node, ctx.target)
    tile = _tile(node, ctx.target)
    args: dict[str, KernelArg] = {
        "x": Pointer(problem.x), "out": Pointer(problem.out), "scratch": Scratch(node, filters),
        "scratch_bytes": each, "flags": Scratch(node, filters + ctx.threads * each),
        "batch": problem.x.shape.dims[0], "tiles": -(-problem.filters // tile),
        "rows": problem.filters,
    }  # fmt: skip
    if problem.bias is not None:
        args["bias"] = Pointer(problem.bias)
    return args


def _two_axes(axes: tuple[Axis, ...]) -> tuple[Axis, Axis]:
    return (_UNIT_AXIS, axes[0]) if len(axes) == 1 else (axes[0], axes[1])


def _conv_launch(
    node: Node,
    problem: _ConvProblem,
    axes: tuple[Axis, ...],
    tile: int,
    filters: KernelArg,
    ctx: Context,
    again: bool = False,
) -> KernelLaunch:
    down, right = _two_axes(axes)
    x, out = problem.x.shape, problem.out.shape
    height, width = _image(x)
    strided_output = down.out_step > 1 or right.out_step > 1
    bias = problem.bias.shape.dtype if problem.bias is not None else None
    activation = getattr(node.op, "activation", "none")
    spec = DirectConv(
        x.dtype, out.dtype, bias, tile, constant_stride(right.step), strided_output, activation,
        again,
    )  # fmt: skip
    lines, columns = _image(out)
    args: dict[str, KernelArg] = _memory_args(node, problem, ctx)
    args |= {
        "filters": filters, "groups": problem.record.groups, "channels": problem.channels,
        "chunk": spec.chunk(ctx.target, problem.terms), "height": height, "width": width,
        "out_height": down.outputs(lines), "out_width": right.outputs(columns),
        "stride_y": down.step, "stride_x": right.step,
        "taps_y": down.taps, "start_y": down.first, "dilation_y": down.tap,
        "taps_x": right.taps, "start_x": right.first, "dilation_x": right.tap,
        "plane": lines * columns, "out_pitch": columns,
        "out_start_y": down.out_first, "out_start_x": right.out_first,
        "out_stride_y": down.out_step, "out_stride_x": right.out_step,
    }  # fmt: skip
    cost = problem.record.cost([x, problem.w], [out])
    return KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [problem.out],
        uses_scratch=True, flops=cost.flops, bytes=cost.bytes,
    )  # fmt: skip


def _pack_launch(
    node: Node, problem: _ConvProblem, axes: tuple[Axis, ...], tile: int, to: KernelArg
) -> KernelLaunch:
    down, right = _two_axes(axes)
    w = node.inputs[1]
    row_size = problem.w.static_dims[-1]
    taps = prod(problem.w.static_dims[2:])
    filter_stride, channel_stride = problem.channels * taps, taps
    if isinstance(problem.record, ConvTranspose):
        filter_stride, channel_stride = taps, problem.filters * taps
    args: dict[str, KernelArg] = {
        "w": Pointer(w, down.start * row_size + right.start), "to": to,
        "groups": problem.record.groups, "tiles": -(-problem.filters // tile),
        "rows": problem.filters, "channels": problem.channels,
        "taps_y": down.taps, "taps_x": right.taps,
        "stride_group": problem.filters * problem.channels * taps, "stride_row": filter_stride,
        "stride_channel": channel_stride, "stride_y": down.skip * row_size, "stride_x": right.skip,
    }  # fmt: skip
    spec = PackFilters(w.shape.dtype, problem.packed, tile)
    return KernelLaunch(spec, [args[name] for name in spec.args], [w], [], uses_scratch=True)


def _depthwise(node: Node, problem: _ConvProblem) -> KernelLaunch:
    down, right = _two_axes(phases(problem.record, problem.w.dims)[0])
    x, out = problem.x.shape, problem.out.shape
    bias = problem.bias.shape.dtype if problem.bias is not None else None
    spec = Depthwise(
        x.dtype,
        problem.w.dtype,
        out.dtype,
        bias,
        right.taps,
        right.tap,
        constant_stride(right.step),
    )
    args: dict[str, KernelArg] = {
        "x": Pointer(problem.x), "w": Pointer(node.inputs[1]), "out": Pointer(problem.out),
        "planes": x.dims[0] * problem.w.static_dims[0], "filters": problem.w.static_dims[0],
        "multiple": problem.filters,
    }  # fmt: skip
    args |= image_args(x, out, down, right)
    if problem.bias is not None:
        args["bias"] = Pointer(problem.bias)
    cost = problem.record.cost([x, problem.w], [out])
    return KernelLaunch(
        spec, [args[name] for name in spec.args], list(node.inputs), [problem.out],
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
    args += [batch, seq, channels, CAUSAL_SEGMENT]
    cost = node.op.cost([v.shape for v in node.inputs], [out.shape])
    return [KernelLaunch(spec, args, [x, w, before], [out], flops=cost.flops, bytes=cost.bytes)]
