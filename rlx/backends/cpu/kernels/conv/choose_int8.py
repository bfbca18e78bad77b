"""Which convolutions of 8-bit integers have a kernel, and their nodes with channels last.

Others become convolutions of floats, which have the sums exactly, before layouts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.backends.cpu.kernels.conv.channels_last_gemm import panel_width
from rlx.backends.cpu.kernels.conv.channels_last_int8 import has_int8, packs_halves
from rlx.backends.cpu.kernels.conv.depthwise_int8 import block_channels, tile_of
from rlx.backends.cpu.layouts.channels_last_int8 import ConvChannelsLastInt8
from rlx.backends.cpu.layouts.depthwise_int8 import DepthwiseChannelsLastInt8
from rlx.ir.dtype import f32, i32
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor
from rlx.passes.simplify import dce

INT8_OPS = frozenset(("conv_integer", "qlinear_conv"))
_WORD = 4
_WITH_RESIDUAL = 10  # operands, a bias among them


def decompose_unsuited(graph: Graph, target: Target) -> Graph:
    """The graph without 8-bit convolutions that have no kernel."""
    editor = Editor(graph, "layout")
    for node in list(graph.nodes):
        if node.op.name in INT8_OPS and not suits(editor, node, target):
            with editor.building(node):
                made = node.op.decompose(graph, *node.inputs)
            editor.replace(node.output, made)
    return dce(editor.finish())


def suits(editor: Editor, node: Node, target: Target) -> bool:
    """Weights are params; no group has so few channels that words would be mostly padding, but for
    depthwise convolutions, of enough channels for a register."""
    x, w = node.inputs[:2]
    record: Any = node.op
    if not has_int8(target) or not w.shape.is_static or not editor.is_param_only(w):
        return False
    if is_depthwise(node):
        if has_residual(node):
            return False
        return block_channels(target, record.groups) > 0 and not editor.is_param_only(x)
    whole = record.groups == 1 or w.shape.static_dims[1] % _WORD == 0
    return whole and not editor.is_param_only(x)


def is_depthwise(node: Node) -> bool:
    """Whether each channel has one filter, and the sums become bytes again."""
    record: Any = node.op
    dims = node.inputs[1].shape.static_dims
    return record.name == "qlinear_conv" and record.groups > 1 and dims[:2] == (record.groups, 1)


def has_residual(node: Node) -> bool:
    return len(node.inputs) == _WITH_RESIDUAL


def _build_depthwise(graph: Graph, target: Target, node: Node, image: Value) -> Value:
    _, w, x_zero, scale, *rest = node.inputs
    record: Any = node.op
    window = record.window(w.shape.dims)
    tile = tile_of(target, window.kernel[-1], window.stride[-1], window.dilation[-1])
    packing: dict[str, Any] = {
        "tile": (tile.taps, tile.stride, tile.dilation, tile.pixels),
        "vector": block_channels(target, record.groups), "halves": packs_halves(target),
    }  # fmt: skip
    packed = graph.append(lookup("pack_depthwise_int8")(**packing), (w,))
    op = DepthwiseChannelsLastInt8(
        stride=record.stride, padding=record.padding, dilation=record.dilation, **packing,
        w=w.shape, activation=record.activation, has_bias=len(rest) == 2,
    )  # fmt: skip
    operands = (image, packed, _sums(graph, w), x_zero, _finite(graph, scale), *rest)
    made: Value = graph.append(op, operands)
    return made


def _sums(graph: Graph, w: Value) -> Value:
    """The sum of each filter's weights."""
    made: Value = graph.sum(graph.cast(w, i32), axis=tuple(range(1, w.shape.rank)))
    return made


def build(graph: Graph, target: Target, node: Node, to_last: Callable[[Value], Value]) -> Value:
    """The convolution with channels last; `to_last` gives an operand so."""
    image = to_last(node.inputs[0])
    if is_depthwise(node):
        return _build_depthwise(graph, target, node, image)
    _, w, x_zero, *rest = node.inputs
    record: Any = node.op
    more = -w.shape.static_dims[1] % _WORD
    if more:
        image = graph.pad(image, low=(0,) * image.shape.rank, high=_last(image.shape.rank, more))
        w = graph.pad(w, low=(0,) * w.shape.rank, high=_second(w.shape.rank, more))
    lanes = target.lanes(32)
    packing = {
        "groups": record.groups, "lanes": lanes, "halves": packs_halves(target),
        "width": panel_width(target, w.shape.static_dims[0] // record.groups) * lanes,
    }  # fmt: skip
    packed = graph.append(lookup("pack_channels_last_int8")(**packing), (w,))
    quantized = record.name == "qlinear_conv"
    if quantized:
        rest[0] = _finite(graph, rest[0])
    if has_residual(node):
        rest[3] = to_last(rest[3])
    op = ConvChannelsLastInt8(
        stride=record.stride, padding=record.padding, dilation=record.dilation, **packing,
        w=w.shape, quantized=quantized, activation=record.activation if quantized else "none",
        has_bias=quantized and len(rest) > 2, has_residual=has_residual(node),
    )  # fmt: skip
    made: Value = graph.append(op, (image, packed, _sums(graph, w), x_zero, *rest))
    return made


def _finite(graph: Graph, scale: Value) -> Value:
    """A scale with the same results that makes no NaN of a sum: 0 where it is NaN, and the largest
    float where it is infinite, by which the sum 0 stays 0."""
    number = graph.where(graph.is_nan(scale), graph.constant(0.0, f32), scale)
    most = float(np.finfo(np.float32).max)
    made: Value = graph.clamp(number, low=-most, high=most)
    return made


def _last(rank: int, more: int) -> tuple[int, ...]:
    return (*(0,) * (rank - 1), more)


def _second(rank: int, more: int) -> tuple[int, ...]:
    return (0, more, *(0,) * (rank - 2))
