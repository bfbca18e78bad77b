"""Between numbers and the integers that stand for them, in arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import DType, f64, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.quantize import LARGEST
from rlx.passes.common.registry import common


def _along(g: Graph, v: Value, axis: int | None, rank: int) -> Value:
    """A scale or zero point, shaped to broadcast against a tensor of that rank."""
    after = 0 if axis is None else rank - 1 - axis % rank
    dims = () if axis is None else (v.shape.dims[0], *[1] * after)
    return g.reshape(v, shape=dims)


def _encoded(g: Graph, op: Any, inputs: Sequence[Value], dtype: DType) -> Value:
    x, scale, *zp = inputs
    rank = x.shape.rank
    steps = g.div(wide(g, x), _along(g, wide(g, scale), op.axis, rank))
    if dtype.is_float:
        limit = float(LARGEST[dtype])
        return g.cast(g.clamp(steps, low=-limit, high=limit), dtype)
    # f64 holds every value and bound of i32 exactly
    whole = g.round(cast(g, steps, f64))
    whole = g.where(g.is_nan(whole), g.constant(0.0, f64), whole)
    if zp:
        whole = g.add(whole, cast(g, _along(g, zp[0], op.axis, rank), f64))
    bounds = np.iinfo(dtype.numpy)
    whole = g.clamp(whole, low=float(bounds.min), high=float(bounds.max))
    return g.cast(whole, dtype)


def _decoded(g: Graph, op: Any, q: Value, scale: Value, zp: Sequence[Value]) -> Value:
    rank = q.shape.rank
    if zp:
        q = g.sub(cast(g, q, i64), cast(g, _along(g, zp[0], op.axis, rank), i64))
    return g.mul(cast(g, q, scale.shape.dtype), _along(g, scale, op.axis, rank))


@common("quantize")
def quantize(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    return _encoded(g, op, inputs, op.dtype)


@common("dequantize")
def dequantize(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, scale, *zp = inputs
    return cast(g, _decoded(g, op, x, wide(g, scale), zp), scale.shape.dtype)


@common("fake_quantize")
def fake_quantize(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, scale, *zp = inputs
    q = _encoded(g, op, inputs, op.dtype)
    return cast(g, _decoded(g, op, q, wide(g, scale), zp), x.shape.dtype)
