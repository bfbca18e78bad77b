"""Rewrites products with packed weights for integer dot products: strips and quantised rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlx.backends.cpu.qmatmul_epilogue import EPILOGUES, join_biases
from rlx.codegen.qmatmul.gather import has_strip_rows
from rlx.codegen.qmatmul.product import has_integer_path, row_layout
from rlx.codegen.target import Target
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.ops.qpack import (
    PackedDequantGather,
    PackedDequantGrouped,
    PackedDequantMatMul,
    PackQuant,
    QuantizeRows,
)
from rlx.ir.quant import QuantScheme
from rlx.passes.rewrite import Editor, apply

NAME = "pack_quantised"
_KINDS = ("dequant_matmul", "dequant_grouped_matmul")
_LEAST_ROWS = 4  # a strip of fewer rows is mostly filling, more than `prepare` would keep


def pack_quantised(graph: Graph, target: Target) -> Graph:
    """Products whose packed weight is made of params alone take it in strips, repacked once."""
    if not any(n.op.name in _KINDS for n in graph.nodes):
        return graph
    editor = Editor(graph, NAME)
    packer = _Packer(editor, target)
    fitting = [n for n in graph.nodes if n.op.name in _KINDS and packer.fits(n)]
    tables = {n.inputs[1] for n in fitting if n.op.name == "dequant_matmul"}
    lookups = [n for n in graph.nodes if n.op.name == "dequant_gather" and n.inputs[0] in tables]
    for node in [*fitting, *[n for n in lookups if has_strip_rows(_scheme(n))]]:
        result, _ = editor.build(node, partial(_MAKERS[node.op.name], packer, node))
        editor.replace(node.output, result)
    return apply(join_biases(editor.finish()), EPILOGUES, NAME)


class _Packer:
    def __init__(self, editor: Editor, target: Target) -> None:
        self.editor, self.graph, self.target = editor, editor.graph, target
        self.rows: dict[tuple[Value, str], Value] = {}  # each x is quantised once

    def fits(self, node: Node) -> bool:
        record: Any = node.op
        x, w, *rest = node.inputs
        sides = rest[1:] if record.name == "dequant_grouped_matmul" else rest
        fixed = all(self.editor.is_fixed(v) and v.shape.is_static for v in (w, *sides))
        if not fixed or x.dtype.bytes > 4 or self.editor.is_fixed(node.output):
            return False
        k = x.shape.dims[-1]
        if not isinstance(k, int) or w.shape.static_dims[-2] < _LEAST_ROWS:
            return False
        return has_integer_path(record.scheme, k, self.target)

    def product(self, node: Node) -> Value:
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
        x, w, expert, *sides = node.inputs
        n, k = w.shape.static_dims[1], _columns(x)
        layout = str(row_layout(record.scheme, k, self.target))
        packed = self.append(PackQuant(record.scheme), w, *sides)
        made = PackedDequantGrouped(record.scheme, layout, n, k)
        return self.append(made, x, packed, expert)

    def lookup(self, node: Node) -> Value:
        """Rows of a table that is multiplied with as well: kept once, in strips."""
        table, ids = node.inputs
        scheme, n = _scheme(node), table.shape.static_dims[0]
        packed = self.append(PackQuant(scheme), table)
        return self.append(PackedDequantGather(scheme, n, _columns(node.output)), packed, ids)

    def append(self, record: Any, *operands: Value) -> Value:
        made: Value = self.graph.append(record, operands)
        return made


_MAKERS = {
    "dequant_matmul": _Packer.product,
    "dequant_grouped_matmul": _Packer.grouped,
    "dequant_gather": _Packer.lookup,
}


def _scheme(node: Node) -> QuantScheme:
    record: Any = node.op
    scheme: QuantScheme = record.scheme
    return scheme


def _columns(x: Value) -> int:
    k = x.shape.dims[-1]
    assert isinstance(k, int)
    return k
