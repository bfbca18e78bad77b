"""Epilogue fusion: matmul + bias + activation + residual -> fused_matmul_bias_act, in stages."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import same
from rlx.ir.node import Value
from rlx.ir.ops.elementwise import activation_ops, is_default
from rlx.ir.ops.fused import FusedMatMulBiasAct
from rlx.passes.pattern import Match, const, op
from rlx.passes.rewrite import Result, Rule

FUSED = "fused_matmul_bias_act"


def _fused(matmul: Value) -> tuple[FusedMatMulBiasAct, list[Value]]:
    """The fused op and the operands of a matmul, fused already or not."""
    record = matmul.node.op
    known = record if isinstance(record, FusedMatMulBiasAct) else FusedMatMulBiasAct()
    return known, list(matmul.node.inputs)


def is_linear(matmul: Value) -> bool:
    """Whether a matmul is rows times one float matrix, as the fused op requires."""
    x, w = matmul.node.inputs[:2]
    floats = x.shape.dtype.is_float and w.shape.dtype.is_float
    return w.shape.rank == 2 and x.shape.rank >= 2 and floats


def as_vector(m: Match, value: Value, size: Any) -> Value | None:
    """`value` as [size], when its other axes are 1."""
    dims = value.shape.dims
    if not dims or not same(dims[-1], size) or any(not same(d, 1) for d in dims[:-1]):
        return None
    return value if len(dims) == 1 else m.g.reshape(value, shape=(size,))


def _bias(m: Match) -> Result:
    record, operands = _fused(m.p)
    out = m.root.output.shape
    if not is_linear(m.p) or record.activation != "none" or record.has_bias or record.has_residual:
        return None
    if not m.same_precision(m.p):
        return m.miss(f"{m.bias.shape.dtype} is wider than the matmul, which is rounded first")
    if m.bias.shape.same_dims(m.p.shape) and not same(m.bias.shape.num_elements, out.dims[-1]):
        return None  # that is a residual
    bias = as_vector(m, m.bias, out.dims[-1])
    if bias is None or not bias.shape.dtype.is_float:
        return None
    return _build(m, [*operands, bias], record, has_bias=True)


def _activation(m: Match) -> Result:
    record, operands = _fused(m.p)
    if not is_linear(m.p) or record.activation != "none" or record.has_residual:
        return None
    if not is_default(m.op()):
        return m.miss(f"{m.op()} is not the default {m.op().name}")
    return _build(m, operands, record, activation=m.op().name)


def _residual(m: Match) -> Result:
    record, operands = _fused(m.p)
    if not is_linear(m.p) or record.has_residual:
        return None
    if not m.residual.shape.same_dims(m.p.shape):
        return m.miss(f"{m.residual.shape} is neither a bias nor a residual of {m.p.shape}")
    if not m.residual.shape.dtype.is_float or not m.same_precision(m.p):
        return None
    return _build(m, [*operands, m.residual], record, has_residual=True)


def _build(m: Match, operands: list[Value], record: FusedMatMulBiasAct, **more: Any) -> Result:
    return m.if_same(m.g.append(record.replace(**more), operands))


def _lora(m: Match) -> Result:
    scale = m.number("scale")
    parts = (m.x, m.w, m.a, m.b)
    if scale is None or any(v.shape.rank != 2 for v in parts[1:]):
        return None
    if not all(v.shape.dtype.is_float for v in parts) or not m.same_precision(*parts):
        return None
    return m.if_same(m.g.lora_matmul(*parts, scale=scale))


def _conv_bias(m: Match) -> Result:
    """conv + bias [O, 1, ...] -> conv with a bias"""
    x, w = m.p.node.inputs[:2]
    channels, spatial = w.shape.dims[0], w.shape.rank - 2
    dims = m.bias.shape.dims
    if len(m.p.node.inputs) != 2 or not m.same_precision(m.p) or not m.bias.shape.dtype.is_float:
        return None
    if m.bias.shape.rank > spatial + 2 or len(dims) <= spatial:
        return None
    *before, size = dims[: len(dims) - spatial]
    after = dims[len(dims) - spatial :]
    if not same(size, channels) or any(not same(d, 1) for d in (*before, *after)):
        return None
    bias = m.g.reshape(m.bias, shape=(channels,))
    return m.if_same(m.g.append(m.op("p"), [x, w, bias]))


_MATMULS = ("matmul", FUSED)

_LORA = op(
    "add",
    op("matmul", "x", "w"),
    op("mul", op("matmul", op("matmul", "x", "a"), "b"), const("scale")),
)

LINEAR: tuple[Rule, ...] = (
    Rule("decomposed lora", _LORA, _lora, owns=True),
    Rule("matmul + bias", op("add", op("matmul", name="p"), "bias"), _bias, owns=True),
    Rule("matmul + activation", op(activation_ops, op(_MATMULS, name="p")), _activation, True),
    Rule("matmul + residual", op("add", op(_MATMULS, name="p"), "residual"), _residual, True),
    Rule("conv + bias", op("add", op("conv", name="p"), "bias"), _conv_bias, owns=True),
)
