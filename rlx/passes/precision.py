"""The precision of matmuls and their weights, where options ask for less than the graph has.

Mixed precision: matmuls and attention run in 16 bits. Their operands are cast down and their
results back to f32; all other ops stay in f32. Weights are cast once, by `prepare`. A cast up
followed by a cast down cancels: it loses nothing.

Weight quantisation: x·w becomes dequant_matmul(x, quantize_weight(wᵀ)) for every param-only weight;
`prepare` packs it once. Fused ops that contain matmuls are decomposed first.

Casts around ops that compute in f32 anyway go: cast(op(cast(x, f32)), f16) = op(x) for ops that
widen their 16-bit operands and round once.
"""

from __future__ import annotations

import warnings
from typing import Any

from rlx.errors import OptionError
from rlx.ir import dtype as dt
from rlx.ir.dtype import DType, f64
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.ops.quantize import QuantizeWeight
from rlx.ir.quant.scheme import QuantScheme
from rlx.passes.pattern import Match, op
from rlx.passes.report import FusionReport
from rlx.passes.rewrite import GONE, Editor, Result, Rule
from rlx.passes.simplify import represents


def lower_precision(graph: Graph, precision: str = "f32") -> Graph:
    """Run f32 matmuls in `precision`; the types of inputs, params and outputs do not change."""
    element = DType.of(precision)
    if element is dt.f32:
        return graph
    if element not in (dt.f16, dt.bf16):
        raise OptionError("not a precision", got=precision, expected="f32, f16 or bf16")
    editor = Editor(graph, "precision")
    casts: dict[Value, Value] = {}
    for node in list(graph.nodes):
        lowers = node.op.runs_in_low_precision and node.id != GONE
        if lowers and node.output.shape.dtype is dt.f32:
            _lower(editor, node, element, casts)
    return editor.finish()


def _lower(editor: Editor, node: Node, element: DType, casts: dict[Value, Value]) -> None:
    g = editor.graph

    def narrowed(value: Value) -> Value:
        if value.shape.dtype is not dt.f32 or _is_scale(node, value):
            return value
        if value not in casts:
            casts[value] = g.cast(value, dtype=element)
        return casts[value]

    with editor.building(node):
        result = g.append(node.op, [narrowed(v) for v in node.inputs])
        wide = g.cast(result, dtype=dt.f32)
    editor.replace(node.output, wide)


def _is_scale(node: Node, value: Value) -> bool:
    """Whether `value` is a scale of a packed weight, whose type the scheme determines."""
    return node.op.name.startswith("dequant") and value is not node.inputs[0]


NAME = "quantize"
_QUANTISED = "quantised weight"
_MATMULS = frozenset(["matmul", "grouped_matmul"])


def quantize_weights(graph: Graph, scheme: QuantScheme, report: FusionReport) -> Graph:
    """Pack the float weights of the graph; OptionError when the scheme has no encoder."""
    _require_encoder(scheme)
    editor = Editor(graph, NAME)
    todo = list(reversed(graph.nodes))
    while todo:
        node = todo.pop()
        if node.id == GONE or editor.is_param_only(node.outputs[0]):
            continue
        if node.op.holds_weights and _has_weight(editor, node):
            with editor.building(node) as new:
                result = node.op.decompose(graph, *node.inputs)
            _replace(editor, node, result)
            todo.extend(reversed(new))
        elif node.op.name in _MATMULS and _fits(editor, node, scheme, report):
            with editor.building(node):
                result = _packed(graph, node, scheme)
            _replace(editor, node, result)
            report.add(_QUANTISED, node.origin)
    _say_missed(report)
    return editor.finish()


def _say_missed(report: FusionReport) -> None:
    """Raise if the scheme fits no weight, and warn if it does not fit some."""
    missed = [m for m in report.missed if m.rule == _QUANTISED]
    if missed and not report.count(_QUANTISED):
        raise OptionError(
            "the quant scheme fits no weight of the model", where="quant", got=missed[0].reason,
            origin=missed[0].origin, hint="choose smaller blocks, such as Q8_0 or int8_b32",
        )  # fmt: skip
    if missed:
        more = f", and {len(missed) - 1} more" if len(missed) > 1 else ""
        text = f"[quant] a weight stays as it is: {missed[0].reason} ({missed[0].origin}){more}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _replace(editor: Editor, node: Node, result: Any) -> None:
    values = result if isinstance(result, tuple) else (result,)
    for old, new in zip(node.outputs, values, strict=True):
        editor.replace(old, new)


def _has_weight(editor: Editor, node: Node) -> bool:
    return any(editor.is_param_only(v) and v.shape.rank > 1 for v in node.inputs[1:])


def _fits(editor: Editor, node: Node, scheme: QuantScheme, report: FusionReport) -> bool:
    x, w = node.inputs[:2]
    rank = 3 if node.op.name == "grouped_matmul" else 2
    plain = w.shape.rank == rank and w.shape.dtype.is_float and w.shape.dtype is not f64
    if not (
        editor.is_param_only(w) and plain and x.shape.dtype.is_float and x.shape.dtype is not f64
    ):
        return False
    k = w.shape.static_dims[-2]
    if k % scheme.block_size or (scheme.block and k % scheme.block):
        reason = f"{k} rows are not a multiple of the block of {scheme}"
        report.miss(_QUANTISED, reason, node.origin)
        return False
    return True


def _packed(g: Graph, node: Node, scheme: QuantScheme) -> Any:
    x, w, *rest = node.inputs
    axes = (1, 0) if w.shape.rank == 2 else (0, 2, 1)
    made: Any = g.append(QuantizeWeight(scheme), [g.transpose(w, axes=axes)])
    packed, *sides = made if isinstance(made, tuple) else (made,)
    if node.op.name == "grouped_matmul":
        y: Value = g.dequant_grouped_matmul(x, packed, *rest, *sides, scheme=scheme)
    else:
        y = g.dequant_matmul(x, packed, *sides, scheme=scheme)
    wanted = node.output.shape.dtype
    return y if y.shape.dtype is wanted else g.cast(y, dtype=wanted)


def _require_encoder(scheme: QuantScheme) -> None:
    # imported late: its tables take some milliseconds
    from rlx.ir.quant.codecs import blocks

    free = sorted(n for n in blocks.ENCODERS if not QuantScheme.parse(n).needs_importance)
    if scheme.ggml_type is not None and scheme.name not in free:
        raise OptionError(
            "weights cannot be packed by this scheme here", where="quant", got=scheme,
            expected=", ".join([*free, "int8", "int4", "fp8_e4m3", "fp8_e5m2"]),
            hint="give the model a file that is packed already; rlx quantize --calibrate makes one",
        )  # fmt: skip


# Ops whose reference computes in f32 (f64 for f64) for operands of any type.
WIDENING = (
    "rms_norm", "layer_norm", "group_norm", "l2_norm", "softmax", "rope", "attention",
    "fused_qk_norm_rope", "fused_residual_rms_norm", "fused_residual_layer_norm", "matmul",
    "fused_matmul_bias_act", "fused_swiglu",
)  # fmt: skip
_VIEWS = ("reshape", "transpose", "narrow")


def _is_widening(cast: Node) -> bool:
    source, target = cast.inputs[0].shape.dtype, cast.output.shape.dtype
    return source.is_float and target.is_float and target.bytes > source.bytes


def _uncast(value: Value) -> Value:
    node = value.node
    exact = node.op.name == "cast" and _is_widening(node)
    if exact and represents(value.shape.dtype, node.inputs[0].shape.dtype):
        return node.inputs[0]
    return value


def _casts_of(m: Match, value: Value) -> list[Node] | None:
    """The casts that use `value`; None when it has other users."""
    users = m.editor.users[value]
    if value in m.editor.returned or any(u.op.name != "cast" for u in users):
        return None
    return users


def _narrow(m: Match) -> Result:
    wide = m.y.node
    operands = [_uncast(v) for v in wide.inputs]
    if all(a is b for a, b in zip(operands, wide.inputs, strict=True)):
        return None
    made: Any = m.g.append(wide.op, operands)
    results = made if isinstance(made, tuple) else (made,)
    found = None
    for old, new in zip(wide.outputs, results, strict=True):
        casts = _casts_of(m, old)
        if casts is None or any(c.op.dtype is not new.shape.dtype for c in casts):  # type: ignore[attr-defined]
            return None
        for cast in casts:
            if cast is m.root:
                found = new
            else:
                m.replace_too(cast.output, new)
    return found


def _cast_after_view(m: Match) -> Result:
    """view(widen(x)) = widen(view(x)): moves the cast next to its user"""
    cast = m.y.node
    if not _is_widening(cast):
        return None
    view = m.g.append(m.root.op, [cast.inputs[0]])
    return m.g.cast(view, dtype=cast.output.shape.dtype)


def _cast_before_view(m: Match) -> Result:
    """narrow(view(x)) = view(narrow(x))"""
    source, target = m.x.shape.dtype, m.op().dtype
    if not (source.is_float and target.is_float and target.bytes < source.bytes):
        return None
    return m.g.append(m.op("y"), [m.g.cast(m.x, dtype=target)])


PRECISION: tuple[Rule, ...] = (
    Rule("16-bit operands", op("cast", op(WIDENING, name="y")), _narrow),
    Rule("cast after view", op(_VIEWS, op("cast", name="y")), _cast_after_view, owns=True),
    Rule("cast before view", op("cast", op(_VIEWS, "x", name="y")), _cast_before_view, owns=True),
)
