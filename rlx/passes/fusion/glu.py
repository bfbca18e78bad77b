"""Gated linear units, act(x·gate) * (x·up): SwiGLU, GeGLU and their like."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import same
from rlx.ir.node import Value
from rlx.ir.ops.elementwise import activation_ops, is_default
from rlx.passes.fusion.linear import as_vector, is_linear
from rlx.passes.fusion.shared_input import concat_obstacle
from rlx.passes.pattern import Match, op
from rlx.passes.rewrite import Result, Rule


def _activation(m: Match) -> str | None:
    """The name of the activation; "none" where there is none."""
    if not m.has("act"):
        return "none"
    return m.op("act").name if is_default(m.op("act")) else None


def _plain(m: Match) -> Result:
    """Two matmuls of one x, no bias -> fused_swiglu"""
    activation = _activation(m)
    if activation is None or not is_linear(m.gate) or not is_linear(m.up):
        return None
    if not m.same_precision(m.gate, m.up):
        return m.miss(f"gate is {m.gate.shape.dtype}, up {m.up.shape.dtype}")
    if not m.g_w.shape.same_dims(m.u_w.shape):
        return m.miss(f"gate {m.g_w.shape} and up {m.u_w.shape} differ")
    return m.if_same(m.g.fused_swiglu(m.x, m.g_w, m.u_w, activation=activation))


def _biased(m: Match) -> Result:
    """With biases -> one matmul with the weights concatenated, then fused_gated_act"""
    activation = _activation(m)
    if activation is None or not is_linear(m.gate) or not is_linear(m.up):
        return None
    if not m.same_precision(m.gate, m.up):
        return m.miss(f"gate is {m.gate.shape.dtype}, up {m.up.shape.dtype}")
    if not m.g_w.shape.same_dims(m.u_w.shape) or m.g_w.shape.dtype is not m.u_w.shape.dtype:
        return m.miss(f"gate {m.g_w.shape} and up {m.u_w.shape} differ")
    size = m.g_w.shape.dims[1]
    biases = [as_vector(m, b, size) for b in (m.g_b, m.u_b)]
    if None in biases or m.g_b.shape.dtype is not m.u_b.shape.dtype:
        return None
    why = _obstacle(m, [m.g_w, m.u_w, m.g_b, m.u_b])
    if why:
        return m.miss(why)
    joined = m.g.matmul(m.x, m.g.concat(m.g_w, m.u_w, axis=1))
    joined = m.g.add(joined, m.g.concat(*biases, axis=0))
    return m.if_same(m.g.fused_gated_act(joined, activation=activation))


def _packed(m: Match) -> Result:
    """Quantised weights of one scheme -> their rows concatenated, then fused_gated_act"""
    activation = _activation(m)
    gate, up = m.gate.node, m.up.node
    if activation is None or gate.inputs[0] is not up.inputs[0]:
        return None
    if gate.op != up.op:
        return m.miss(f"gate is {gate.op}, up is {up.op}")
    if not gate.inputs[1].shape.same_dims(up.inputs[1].shape):
        return m.miss(f"gate {gate.inputs[1].shape} and up {up.inputs[1].shape} differ")
    why = _obstacle(m, [*gate.inputs[1:], *up.inputs[1:]])
    if why:
        return m.miss(why)
    pairs = zip(gate.inputs[1:], up.inputs[1:], strict=True)
    weights = [m.g.concat(a, b, axis=0) for a, b in pairs]
    joined = m.g.append(gate.op, [gate.inputs[0], *weights])
    return m.if_same(m.g.fused_gated_act(joined, activation=activation))


def _obstacle(m: Match, weights: list[Value]) -> str:
    """Why the weights should not be concatenated; empty when they may."""
    return next((why for w in weights if (why := concat_obstacle(m.editor, w))), "")


def _halves(m: Match) -> Result:
    """The two halves of one tensor -> fused_gated_act"""
    activation = _activation(m)
    x: Value = m.x
    rank = x.shape.rank
    gate, up = m.op("gate"), m.op("up")
    half = x.shape.dims[-1] // 2
    fits = (
        gate.axis % rank == up.axis % rank == rank - 1
        and same(gate.start, 0)
        and same(up.start, half)
        and same(gate.length, half)
        and same(half * 2, x.shape.dims[-1])
        and x.shape.dtype.is_float
    )
    if activation is None or not fits:
        return None
    return m.if_same(m.g.fused_gated_act(x, activation=activation))


def _table(name: str, gate: Any, up: Any, result: Any, bare: bool) -> list[Rule]:
    """The rule with an activation on the gate; with `bare` also the one without."""
    rules = [Rule(name, op("mul", op(activation_ops, gate, name="act"), up), result, owns=True)]
    if bare:
        rules.append(Rule(name, op("mul", gate, up), result, owns=True))
    return rules


_GATE, _UP = op("matmul", "x", "g_w", name="gate"), op("matmul", "x", "u_w", name="up")
_Q_GATE, _Q_UP = op("dequant_matmul", name="gate"), op("dequant_matmul", name="up")

GLU: tuple[Rule, ...] = (
    *_table("gated linear unit", _GATE, _UP, _plain, bare=True),
    *_table(
        "gated linear unit with biases",
        op("add", _GATE, "g_b"),
        op("add", _UP, "u_b"),
        _biased,
        bare=False,
    ),
    *_table("gated linear unit, quantised", _Q_GATE, _Q_UP, _packed, bare=False),
    *_table(
        "gated halves",
        op("narrow", "x", name="gate"),
        op("narrow", "x", name="up"),
        _halves,
        bare=True,
    ),
)
