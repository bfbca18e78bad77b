"""Rewrites matmuls with constant quantised weights to integer GEMMs on column tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlx.backends.cpu.kernels.qgemm.fuse_epilogue import EPILOGUES, merge_biases
from rlx.backends.cpu.kernels.qgemm.gather import has_tile_rows
from rlx.backends.cpu.kernels.qgemm.qgemm import has_integer_path, row_layout
from rlx.backends.cpu.layouts.quant_ops import (
    PackedDequantGather,
    PackedDequantGrouped,
    PackedDequantMatMul,
    PackQuant,
    QuantizeRows,
)
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.target import Target
from rlx.passes.rewrite import Editor, apply

NAME = "pack_quantised"
_KINDS = ("dequant_matmul", "dequant_grouped_matmul")
_MIN_CHANNELS = 4  # a column tile of fewer output channels is mostly padding


def pack_quantised(graph: Graph, target: Target) -> Graph:
    """Matmuls whose quantised weight depends on params alone take it in column tiles."""
    if not any(n.op.name in _KINDS for n in graph.nodes):
        return graph
    editor = Editor(graph, NAME)
    packer = _Packer(editor, target)
    fitting = [n for n in graph.nodes if n.op.name in _KINDS and packer.fits(n)]
    tables = {n.inputs[1] for n in fitting if n.op.name == "dequant_matmul"}
    gathers = [n for n in graph.nodes if n.op.name == "dequant_gather" and n.inputs[0] in tables]
    for node in [*fitting, *[n for n in gathers if has_tile_rows(_scheme(n))]]:
        result, _ = editor.build(node, partial(_MAKERS[node.op.name], packer, node))
        editor.replace(node.output, result)
    return apply(merge_biases(editor.finish()), EPILOGUES, NAME)


class _Packer:
    def __init__(self, editor: Editor, target: Target) -> None:
        self.editor, self.graph, self.target = editor, editor.graph, target
        self.rows: dict[tuple[Value, str], Value] = {}  # each x is quantised once

    def fits(self, node: Node) -> bool:
        record: Any = node.op
        x, w, *rest = node.inputs
        scale_and_zp = rest[1:] if record.name == "dequant_grouped_matmul" else rest
        fixed = all(self.editor.is_param_only(v) and v.shape.is_static for v in (w, *scale_and_zp))
        if not fixed or x.dtype.bytes > 4 or self.editor.is_param_only(node.output):
            return False
        k = x.shape.dims[-1]
        if not isinstance(k, int) or w.shape.static_dims[-2] < _MIN_CHANNELS:
            return False
        return has_integer_path(record.scheme, k, self.target)

    def gemm(self, node: Node) -> Value:
        record: Any = node.op
        x, *weight = node.inputs
        k, n = _columns(x), weight[0].shape.static_dims[0]
        layout = str(row_layout(record.scheme, k, self.target))
        if (x, layout) not in self.rows:
            self.rows[x, layout] = self.append(QuantizeRows(layout), x)
        packed = self.append(PackQuant(record.scheme), *weight)
        made = PackedDequantMatMul(record.scheme, layout, x.shape.dims[:-1], n, k, x.dtype)
        return self.append(made, self.rows[x, layout], packed)

    def grouped(self, node: Node) -> Value:
        record: Any = node.op
        x, w, expert, *scale_and_zp = node.inputs
        n, k = w.shape.static_dims[1], _columns(x)
        layout = str(row_layout(record.scheme, k, self.target))
        packed = self.append(PackQuant(record.scheme), w, *scale_and_zp)
        made = PackedDequantGrouped(record.scheme, layout, n, k)
        return self.append(made, x, packed, expert)

    def gather(self, node: Node) -> Value:
        """Rows of a table that a GEMM reads as well: kept once, in column tiles."""
        table, ids = node.inputs
        scheme, n = _scheme(node), table.shape.static_dims[0]
        packed = self.append(PackQuant(scheme), table)
        return self.append(PackedDequantGather(scheme, n, _columns(node.output)), packed, ids)

    def append(self, record: Any, *operands: Value) -> Value:
        made: Value = self.graph.append(record, operands)
        return made


_MAKERS = {
    "dequant_matmul": _Packer.gemm,
    "dequant_grouped_matmul": _Packer.grouped,
    "dequant_gather": _Packer.gather,
}


def _scheme(node: Node) -> QuantScheme:
    record: Any = node.op
    scheme: QuantScheme = record.scheme
    return scheme


def _columns(x: Value) -> int:
    k = x.shape.dims[-1]
    assert isinstance(k, int)
    return k
