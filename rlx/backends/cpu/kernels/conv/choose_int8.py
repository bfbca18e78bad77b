"""Which convolutions of 8-bit integers have a kernel, and their nodes with channels last.

Others become convolutions of floats, which have the sums exactly, before layouts are chosen.
"""

from __future__ import annotations

from typing import Any

from rlx.backends.cpu.kernels.conv.channels_last_gemm import panel_width
from rlx.backends.cpu.kernels.conv.channels_last_int8 import has_int8, packs_halves
from rlx.backends.cpu.layouts.channels_last_int8 import ConvChannelsLastInt8
from rlx.ir.dtype import i32
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import lookup
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor
from rlx.passes.simplify import dce

INT8_OPS = frozenset(("conv_integer", "qlinear_conv"))
_WORD = 4


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
    """Weights are params; no group has so few channels that words would be mostly padding."""
    x, w = node.inputs[:2]
    record: Any = node.op
    if not has_int8(target) or not w.shape.is_static or not editor.is_param_only(w):
        return False
    whole = record.groups == 1 or w.shape.static_dims[1] % _WORD == 0
    return whole and not editor.is_param_only(x)


def build(graph: Graph, target: Target, node: Node, image: Value) -> Value:
    """The convolution of `image`, which has channels last."""
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
    sums = graph.sum(graph.cast(w, i32), axis=tuple(range(1, w.shape.rank)))
    quantized = record.name == "qlinear_conv"
    op = ConvChannelsLastInt8(
        stride=record.stride, padding=record.padding, dilation=record.dilation, **packing,
        w=w.shape, quantized=quantized, activation=record.activation if quantized else "none",
        has_bias=quantized and len(rest) == 3,
    )  # fmt: skip
    made: Value = graph.append(op, (image, packed, sums, x_zero, *rest))
    return made


def _last(rank: int, more: int) -> tuple[int, ...]:
    return (*(0,) * (rank - 1), more)


def _second(rank: int, more: int) -> tuple[int, ...]:
    return (0, more, *(0,) * (rank - 2))
