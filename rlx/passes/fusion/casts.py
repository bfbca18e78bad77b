"""Removes casts around ops that compute in f32 anyway.

cast(op(cast(x, f32)), f16) = op(x) for ops that widen their 16-bit operands and round once.
"""

from __future__ import annotations

from typing import Any

from rlx.ir.node import Node, Value
from rlx.passes.pattern import Match, op
from rlx.passes.rewrite import Result, Rule
from rlx.passes.simplify import represents

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
