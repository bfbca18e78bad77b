"""Rewrites matmuls with constant quantised weights to integer GEMMs on column tiles.

What follows them is fused into the epilogue: bias, activation, residual, gate.
"""

from __future__ import annotations

from typing import Any, cast

from rlx.backends.cpu.kernels.qgemm.gather import has_tile_rows
from rlx.backends.cpu.kernels.qgemm.qgemm import has_integer_path, row_layout
from rlx.backends.cpu.layouts.quant_ops import (
    PackedDequantGather,
    PackedDequantGrouped,
    PackedDequantMatMul,
    PackQuant,
    QuantizeRows,
)
from rlx.ir.dim import same
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.ops.activation import activation_ops, is_default
from rlx.ir.quant.scheme import QuantScheme
from rlx.llvm.target import Target
from rlx.passes.fusion.linear import as_vector
from rlx.passes.pattern import Match, op
from rlx.passes.rewrite import Editor, Result, Rule, apply

GEMM = "packed_dequant_matmul"


def _with(m: Match, *extras: Value, **changes: Any) -> Result:
    """The GEMM with an extended epilogue."""
    gemm = m.p.node
    made = m.g.append(gemm.op.replace(**changes), [*gemm.inputs, *extras])
    return m.if_same(made)


def _bias(m: Match) -> Result:
    p = m.op("p")
    if p.has_bias or p.has_residual or p.pair or p.activation != "none":
        return None
    bias = as_vector(m, m.bias, p.n)
    return None if bias is None else _with(m, bias, has_bias=True)


def _activation(m: Match) -> Result:
    p = m.op("p")
    if p.has_residual or p.pair or p.activation != "none" or not is_default(m.op()):
        return None
    return _with(m, activation=m.op().name)


def _residual(m: Match) -> Result:
    p = m.op("p")
    alike = m.residual.dtype is m.p.dtype and m.residual.shape.same_dims(m.p.shape)
    return _with(m, m.residual, has_residual=True) if alike and not p.has_residual else None


def _gated(m: Match) -> Result:
    """Gate and up, concatenated: their column tiles alternate, so that one panel holds both."""
    p = m.op("p")
    if p.has_bias or p.has_residual or p.pair or p.activation != "none" or p.n % 2:
        return None
    rows, packed = m.p.node.inputs
    weight = packed.node
    pair = m.g.append(weight.op.replace(pair=True), weight.inputs)
    changes = {"n": p.n // 2, "pair": True, "activation": m.op().activation}
    return m.if_same(m.g.append(p.replace(**changes), [rows, pair]))


def _region(m: Match) -> Result:
    """An elementwise region that is nothing but the epilogue of a GEMM."""
    operands = m.root.inputs
    for place, value in enumerate(operands):
        gemm = value.node
        plain = gemm.op.name == GEMM and len(gemm.inputs) == 2
        if plain and m.editor.uses(value) == 1 and len(m.root.outputs) == 1:
            found = _read(m, m.op().body.graph, place)
            if found is not None:
                extras, changes = found
                record: Any = gemm.op
                made = m.g.append(record.replace(**changes), [*gemm.inputs, *extras])
                return m.if_same(made)
    return None


def _read(m: Match, body: Graph, place: int) -> tuple[list[Value], dict[str, Any]] | None:
    """The ops of a region from operand `place` to its result, as operands and attributes."""
    inputs = [n.output for n in body.sources("input")]
    operand = dict(zip(inputs, m.root.inputs, strict=True))
    value, left = inputs[place], {n for n in body.nodes if not n.op.is_source}
    gemm: Any = m.root.inputs[place].node.op
    if gemm.pair or gemm.activation != "none":
        return None
    extras: list[Value] = []
    changes: dict[str, Any] = {}
    while value is not body.outputs[0]:
        users = [n for n in left if any(v is value for v in n.inputs)]
        if len(users) != 1 or users[0].output.dtype is not value.dtype:
            return None
        node = users[0]
        if not _take(m, node, value, operand, extras, changes, gemm.n):
            return None
        left.remove(node)
        value = node.output
    return None if left else (extras, changes)


def _take(
    m: Match,
    node: Node,
    value: Value,
    operand: dict[Value, Value],
    extras: list[Value],
    changes: dict[str, Any],
    n: int,
) -> bool:
    """Add one op to the epilogue; False when it does not fit there."""
    if "has_residual" in changes:
        return False
    if node.op.name in activation_ops() and is_default(node.op) and "activation" not in changes:
        changes["activation"] = node.op.name
        return True
    if node.op.name != "add":
        return False
    others = [v for v in node.inputs if v is not value]
    if len(others) != 1 or others[0] not in operand:
        return False
    given = operand[others[0]]
    bias = None if changes else as_vector(m, given, n)
    if bias is not None:
        extras.append(bias)
        changes["has_bias"] = True
        return True
    if given.dtype is not value.dtype or not given.shape.same_dims(value.shape):
        return False
    extras.append(given)
    changes["has_residual"] = True
    return True


def merge_biases(graph: Graph) -> Graph:
    """Biases of the slices of a concatenated GEMM become one bias of the GEMM."""
    editor = Editor(graph, "merge_biases")
    for node in list(graph.nodes):
        if node.op.name == GEMM and len(node.inputs) == 2:
            slices = _slices(editor, node)
            if slices is not None:
                _merge_biases(editor, node, slices)
    return editor.finish()


def _slices(editor: Editor, node: Node) -> list[tuple[Node, Node, Value]] | None:
    """(slice, addition, bias) of all columns in order; None when a column has another use."""
    record: Any = node.op
    if record.pair or record.activation != "none" or node.output in editor.returned:
        return None
    found, column = [], 0
    views = [n for n in editor.users[node.output] if n.op.name == "narrow"]
    views.sort(key=lambda n: n.op.start if isinstance(n.op.start, int) else -1)  # type: ignore[attr-defined]
    if len(views) < 2 or len(views) != len(editor.users[node.output]):
        return None
    for view in views:
        cut: Any = view.op
        users = editor.users[view.output]
        if not same(cut.start, column) or view.output.shape.rank - 1 != cut.axis:
            return None
        if len(users) != 1 or users[0].op.name != "add" or view.output in editor.returned:
            return None
        bias = next((v for v in users[0].inputs if v is not view.output), None)
        fits = bias is not None and bias.shape.dims == (cut.length,) and editor.is_param_only(bias)
        if not fits or users[0].output.dtype is not node.output.dtype:
            return None
        assert bias is not None
        found.append((view, users[0], bias))
        column += cut.length
    return found if column == record.n else None


def _merge_biases(editor: Editor, node: Node, slices: list[tuple[Node, Node, Value]]) -> None:
    g, record = editor.graph, cast(Any, node.op)
    with editor.building(node):
        bias = g.concat(*[bias for _, _, bias in slices], axis=0)
        gemm = g.append(record.replace(has_bias=True), [*node.inputs, bias])
        views = [g.append(view.op, [gemm]) for view, _, _ in slices]
    for (_, addition, _), view in zip(slices, views, strict=True):
        editor.replace(addition.output, view)


def _coarse(m: Match) -> Result:
    """Attention over a 16- or 8-bit KV cache between quantised GEMMs uses bf16: its queries come
    from 8-bit codes, and its results become such codes. bf16 (8 bits of mantissa with an exponent
    per number) adds a tenth to the noise of the codes."""
    attention = m.a.node
    k, v = attention.inputs[1:3]
    record: Any = attention.op
    if record.coarse or max(k.dtype.bytes, v.dtype.bytes) > 2:
        return None
    with m.g.origin(attention.origin):  # it stays in its own block
        made = m.g.append(record.replace(coarse=True), attention.inputs)
    return m.g.append(m.op(), [made])


_GEMM = op(GEMM, name="p")
_ATTENTION = ("attention", "paged_attention")

EPILOGUES: tuple[Rule, ...] = (
    Rule("quantised GEMM, gated", op("fused_gated_act", _GEMM), _gated, owns=True),
    Rule("quantised GEMM + bias", op("add", _GEMM, "bias"), _bias, owns=True),
    Rule("quantised GEMM + activation", op(activation_ops, _GEMM), _activation, owns=True),
    Rule("quantised GEMM + residual", op("add", _GEMM, "residual"), _residual, owns=True),
    Rule("quantised GEMM + region", op("elementwise_region", having=GEMM), _region),
    Rule("quantised attention", op("quantize_rows", op(_ATTENTION, name="a")), _coarse, owns=True),
)


NAME = "pack_quantised"
QUANTISED = frozenset(("dequant_matmul", "dequant_grouped_matmul"))
_MIN_CHANNELS = 4  # a column tile of fewer output channels is mostly padding


def pack_quantised(graph: Graph, target: Target) -> Graph:
    """Matmuls whose quantised weight depends on params alone take it in column tiles."""
    editor = Editor(graph, NAME)
    packer = _Packer(editor, target)
    fitting = [n for n in graph.nodes if n.op.name in QUANTISED and packer.fits(n)]
    tables = {n.inputs[1] for n in fitting if n.op.name == "dequant_matmul"}
    gathers = [n for n in graph.nodes if n.op.name == "dequant_gather" and n.inputs[0] in tables]
    for node in [*fitting, *[n for n in gathers if has_tile_rows(_scheme(n))]]:
        with editor.building(node):
            result = _MAKERS[node.op.name](packer, node)
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
