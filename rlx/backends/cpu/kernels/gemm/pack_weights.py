"""Rewrites matmuls with constant weights to GEMMs on panels, which `prepare` packs once."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from rlx.backends.cpu.kernels.gemm.bf16_gemm import PANEL, suits_tiles
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.backends.cpu.kernels.gemm.strassen import suits_strassen, tall_tile
from rlx.backends.cpu.kernels.gemm.strassen_twice import suits_twice
from rlx.backends.cpu.layouts.pack import (
    PackedGroupedMatMul,
    PackedMatMul,
    PackMatMul,
    panel_layout,
    strassen_layout,
    tiles_layout,
)
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op, make_op
from rlx.ir.shape import Shape
from rlx.llvm.storage import compute_type
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor

# Padding the last panel makes narrow weights grow; beyond this they are packed in every run.
_MOST_GROWTH, _SMALL = 2, 1 << 20


def pack_weights(graph: Graph, target: Target) -> Graph:
    """Matmuls whose weight depends on params and constants alone take it in panels, packed once."""
    editor = Editor(graph, "pack_weights")
    packer = _Packer(editor, graph, target)
    for node in list(graph.nodes):
        rule = _RULES.get(node.op.name)
        if rule is None or editor.is_param_only(node.output):
            continue
        with editor.building(node) as new:
            result = rule(packer, node)
        if result is None:
            editor.drop(new)
        else:
            editor.replace(node.output, result)
    return editor.finish()


class _Packer:
    def __init__(self, editor: Editor, graph: Graph, target: Target) -> None:
        self.editor, self.graph, self.target = editor, graph, target

    def pack(
        self, result: DType, *weights: Value, layout: str | None = None
    ) -> tuple[Value, str] | None:
        """The weights in panels, and their layout (`layout` or plain panels); None if unfit."""
        first = weights[0].shape
        constant = all(self.editor.is_param_only(w) and w.shape.is_static for w in weights)
        same_shape = all(w.shape is first for w in weights)
        if not (constant and same_shape and first.rank in (2, 3)) or result.kind == "complex":
            return None
        width = TileShape.of(self.target, compute_type(result), first.dtype).nr
        op = PackMatMul(layout or panel_layout(width, pair=len(weights) == 2))
        shapes = [w.shape for w in weights]
        given = sum(map(_bytes, shapes))
        grows = layout is None or layout.startswith("tiles")
        if grows and _bytes(op.infer(*shapes)) > max(_MOST_GROWTH * given, _SMALL):
            return None
        return self.append(op, *weights), op.layout

    def append(self, op: Op, *operands: Value) -> Value:
        made: Value = self.graph.append(op, operands)
        return made

    def gemm(
        self,
        x: Value,
        weights: tuple[Value, ...],
        result: DType,
        *extras: Value,
        strassen: bool = False,
        **attributes: Any,
    ) -> Value | None:
        """packed_matmul of x with the weights; None when they cannot be packed."""
        first = weights[0].shape
        if first.rank != 2 or not first.is_static:
            return None
        k, n = first.static_dims
        layout = None
        if strassen and suits_strassen(self.target, x.dtype, first.dtype, result, k, n):
            levels = 2 if suits_twice(self.target, k, n) else 1
            layout = strassen_layout(tall_tile(self.target).nr, levels)
        if suits_tiles(self.target, x.dtype, first.dtype, result) and len(weights) == 1:
            layout = tiles_layout(PANEL)
        packed = self.pack(result, *weights, layout=layout)
        if packed is None:
            return None
        op = PackedMatMul(n=n, k=k, layout=packed[1], dtype=result, **attributes)
        return self.append(op, x, packed[0], *extras)


def _bytes(shape: Shape) -> int:
    return prod(shape.static_dims) * shape.dtype.bytes


def _matmul(packer: _Packer, node: Node) -> Value | None:
    x, w = node.inputs
    result = node.output.dtype
    if result.kind == "complex":
        return _complex(packer, node)
    return packer.gemm(x, (w,), result)


def _complex(packer: _Packer, node: Node) -> Value | None:
    """The complex GEMM takes operands of the result's type only: cast others."""
    result = node.output.dtype
    if all(v.dtype is result for v in node.inputs):
        return None
    cast = make_op("cast", {"dtype": result})
    wide = [v if v.dtype is result else packer.append(cast, v) for v in node.inputs]
    return packer.append(node.op, *wide)


def _fused(packer: _Packer, node: Node) -> Value | None:
    x, w, *extras = node.inputs
    return packer.gemm(x, (w,), node.output.dtype, *extras, **node.op.attributes())


def _swiglu(packer: _Packer, node: Node) -> Value | None:
    x, *pair = node.inputs
    return packer.gemm(x, tuple(pair), node.output.dtype, **node.op.attributes())


def _lora(packer: _Packer, node: Node) -> Value | None:
    """x·w + scale·(x·a)·b; intermediate results are f32 at least."""
    x, w, a, b = node.inputs
    wide = f64 if node.output.dtype is f64 else f32
    down = packer.gemm(x, (a,), wide)
    if down is None:
        return None
    up = packer.gemm(down, (b,), wide, **node.op.attributes())
    if up is None:
        return None
    return packer.gemm(x, (w,), node.output.dtype, up, has_residual=True)


def _grouped(packer: _Packer, node: Node) -> Value | None:
    x, w, expert = node.inputs
    packed = packer.pack(node.output.dtype, w)
    if packed is None:
        return None
    _, k, n = w.shape.static_dims
    return packer.append(PackedGroupedMatMul(n=n, k=k, layout=packed[1]), x, packed[0], expert)


_RULES: dict[str, Callable[[_Packer, Node], Value | None]] = {
    "matmul": _matmul,
    "fused_matmul_bias_act": _fused,
    "fused_swiglu": _swiglu,
    "lora_matmul": _lora,
    "grouped_matmul": _grouped,
}
MATMULS = frozenset(_RULES)
