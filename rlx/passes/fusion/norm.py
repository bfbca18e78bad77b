"""Recognises decomposed norms and softmax; fuses residual add + norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.ir.node import Value
from rlx.passes.fusion.linear import as_vector
from rlx.passes.pattern import Match, OpPattern, const, op
from rlx.passes.rewrite import Result, Rule


def _last_axis(value: Value) -> bool:
    """Whether a reduction is over the last axis of its operand, which stays as size 1."""
    record: Any = value.node.op
    rank = value.node.inputs[0].shape.rank
    axes = record.axis
    if axes is None:
        return rank == 1 and bool(record.keepdims)
    return len(axes) == 1 and axes[0] % rank == rank - 1 and bool(record.keepdims)


# -- mean, from a sum ------------------------------------------------------------------------


def _mean(m: Match) -> Result:
    """sum / n = mean where n is the number of elements summed."""
    record: Any = m.op("s")
    source = m.x.shape
    axes = range(source.rank) if record.axis is None else record.axis
    count = source.with_dims([source.dims[a] for a in axes]).num_elements
    number = m.number("n")
    if not isinstance(count, int) or not count or number is None or not source.dtype.is_float:
        return None
    wanted = float(count) if m.op().name == "div" else 1.0 / count
    if abs(number - wanted) > 1e-6 * wanted:
        return None
    return m.if_same(m.g.mean(m.x, axis=record.axis, keepdims=record.keepdims))


# -- x · rsqrt(mean(x²) + eps) · gamma -------------------------------------------------------


def _scaled(x: Any, power: OpPattern) -> list[OpPattern]:
    """x / sqrt(`power` + eps), in its usual forms."""
    sum_ = op("add", power, const("eps"))
    return [
        op("mul", x, op("rsqrt", sum_)),
        op("div", x, op("sqrt", sum_)),
        op("mul", x, op("reciprocal", op("sqrt", sum_))),
    ]


def _eps(m: Match) -> float | None:
    eps = m.number("eps")
    return eps if eps is not None and eps >= 0 else None


def _norm(name: str) -> Callable[[Match], Result]:
    def result(m: Match) -> Result:
        eps = _eps(m)
        if eps is None or not m.x.shape.dtype.is_float or not _last_axis(m.power):
            return None
        if not m.same_precision(m.x):
            return m.miss(f"gamma is wider than {m.x.shape.dtype}")
        if m.has("mu") and not _last_axis(m.mu):
            return None
        if m.gamma.shape.rank == 0 or m.gamma.shape.rank > m.x.shape.rank:
            return None
        gamma = as_vector(m, m.gamma, m.x.shape.dims[-1])
        if gamma is None or not gamma.shape.dtype.is_float:
            return None
        return m.if_same(m.g.apply(name, m.x, gamma, eps=eps))

    return result


def _beta(m: Match) -> Result:
    """norm + beta, where the norm has none yet"""
    x, gamma, *rest = m.y.node.inputs
    if rest:
        return None
    beta = as_vector(m, m.beta, x.shape.dims[-1])
    if beta is None or not beta.shape.dtype.is_float or m.beta.shape.rank > x.shape.rank:
        return None
    if not m.same_precision(m.y):
        return m.miss(f"beta is wider than {m.y.shape.dtype}")
    return m.if_same(m.g.append(m.op("y"), [x, gamma, beta]))


def _l2(m: Match) -> Result:
    eps = _eps(m)
    axes = m.op("power").axis
    if eps is None or axes is None or len(axes) != 1 or not m.op("power").keepdims:
        return None
    if not m.x.shape.dtype.is_float:
        return None
    return m.if_same(m.g.l2_norm(m.x, axis=axes[0], eps=eps))


# -- e^(x - max x) / sum ---------------------------------------------------------------------


def _softmax(name: str) -> Callable[[Match], Result]:
    def result(m: Match) -> Result:
        tops, sums = m.op("top"), m.op("total")
        if tops.axis is None or len(tops.axis) != 1 or not tops.keepdims or not sums.keepdims:
            return None
        rank = m.x.shape.rank
        axis = tops.axis[0] % rank
        if sums.axis is None or [a % rank for a in sums.axis] != [axis]:
            return None
        if not m.x.shape.dtype.is_float:
            return None
        return m.if_same(m.g.apply(name, m.x, axis=axis - rank))

    return result


# -- norm(x + residual) ----------------------------------------------------------------------


def _residual(m: Match) -> Result:
    """Returns the sum too, for its other users."""
    fused = {"rms_norm": "fused_residual_rms_norm", "layer_norm": "fused_residual_layer_norm"}
    total = m.total
    a, b = total.node.inputs
    if not a.shape.same_dims(b.shape):
        return m.miss(f"the sum broadcasts {a.shape} and {b.shape}")
    if a.shape.dtype is not b.shape.dtype or not a.shape.dtype.is_float:
        return m.miss(f"the sum mixes {a.shape.dtype} and {b.shape.dtype}")
    if not m.same_precision(total):
        return m.miss(f"gamma is wider than the sum, which is rounded to {total.shape.dtype}")
    gains = m.root.inputs[1:]
    for gain in gains:
        if not gain.node.op.is_source and m.editor.depends(gain.node, total.node):
            return m.miss("gamma or beta depends on the sum")
    # x is the operand computed last, the residual the one computed before
    x, residual = (a, b) if a.node.id >= b.node.id else (b, a)
    normed, added = m.g.apply(fused[m.op().name], x, residual, *gains, eps=m.op().eps)
    if m.if_same(normed) is None:
        return None
    m.replace_too(total, added)
    return normed


_POWER = op("mean", op("square", "x"), name="power")
_CENTRED = op("sub", "x", op("mean", "x", name="mu"), name="d")
_VARIANCE = op("mean", op("square", "d"), name="power")
_SUM_OF_SQUARES = op("sum", op("square", "x"), name="power")
_SHIFTED = op("sub", "x", op("max", "x", name="top"), name="low")
_EXP = op("exp", _SHIFTED, name="e")

NORM: tuple[Rule, ...] = (
    Rule("decomposed mean", op("div", op("sum", "x", name="s"), const("n")), _mean, owns=True),
    Rule("decomposed mean", op("mul", op("sum", "x", name="s"), const("n")), _mean, owns=True),
    # a layer norm is an rms norm of x - mean, so its pattern comes first
    *(
        Rule("decomposed layer_norm", op("mul", y, "gamma"), _norm("layer_norm"), owns=True)
        for y in _scaled(_CENTRED, _VARIANCE)
    ),
    *(
        Rule("decomposed rms_norm", op("mul", y, "gamma"), _norm("rms_norm"), owns=True)
        for y in _scaled("x", _POWER)
    ),
    *(Rule("decomposed l2_norm", y, _l2, owns=True) for y in _scaled("x", _SUM_OF_SQUARES)),
    Rule("norm + beta", op("add", op(("rms_norm", "layer_norm"), name="y"), "beta"), _beta, True),
    Rule(
        "decomposed softmax",
        op("div", _EXP, op("sum", "e", name="total")),
        _softmax("softmax"),
        owns=True,
    ),
    Rule(
        "decomposed softmax",
        op("mul", _EXP, op("reciprocal", op("sum", "e", name="total"))),
        _softmax("softmax"),
        owns=True,
    ),
    Rule(
        "decomposed log_softmax",
        op("sub", _SHIFTED, op("log", op("sum", op("exp", "low"), name="total"))),
        _softmax("log_softmax"),
        owns=True,
    ),
)

RESIDUAL: tuple[Rule, ...] = (
    Rule(
        "residual + norm",
        op(("rms_norm", "layer_norm"), op("add", name="total"), "gamma"),
        _residual,
    ),
    Rule(
        "residual + norm",
        op(("rms_norm", "layer_norm"), op("add", name="total"), "gamma", "beta"),
        _residual,
    ),
)
