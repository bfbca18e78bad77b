"""Collectives: every element of the mapped axis has a loss of its own, and the derivative is that
of their sum. So the sum over the axis is its own transpose, as in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops._common import wide
from rlx.ir.shape import normalize_axis
from rlx.passes.grad.rules import LINEAR, Grads, in_type, jvp, vjp

Values = Sequence[Value]
LINEAR |= {"psum", "pmean", "all_gather"}


@vjp("psum", "pmean")
def _sum(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    return [g.append_node(op, [grads[0]]).output]


@vjp("all_gather")
def _all_gather(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    """An element has its own slice of the summed cotangents."""
    axis = normalize_axis(op.axis, outputs[0].shape.rank)
    total = g.psum(grads[0], axis_name=op.axis_name)
    return [g.gather(total, g.axis_index(axis_name=op.axis_name), axis=axis)]


def _shares(op: Any, g: Graph, x: Value, y: Value) -> Value:
    """What each element has of the extreme: equal ones share it."""
    at = wide(g, g.cast(g.eq(x, y), x.shape.dtype))
    return g.div(at, g.psum(at, axis_name=op.axis_name))


@vjp("pmax", "pmin")
def _extreme(op: Any, g: Graph, inputs: Values, outputs: Values, grads: Grads) -> Grads:
    (x,), (y,), (ct,) = inputs, outputs, grads
    total = wide(g, g.psum(ct, axis_name=op.axis_name))
    return [in_type(g, g.mul(_shares(op, g, x, y), total), x.shape.dtype)]


@jvp("pmax", "pmin")
def _extreme_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    (x,), (y,), (t,) = inputs, outputs, tangents
    moved = g.mul(_shares(op, g, x, y), wide(g, t))
    return [in_type(g, g.psum(moved, axis_name=op.axis_name), y.shape.dtype)]
