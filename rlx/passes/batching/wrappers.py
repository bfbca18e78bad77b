"""Ops that say how a function is differentiated: their bodies and rules are batched. Custom ops."""

from __future__ import annotations

from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.custom import definition
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    batched,
    batched_flags,
)
from rlx.passes.batching.vectorize import batched_body


def _moves(value: Value) -> bool:
    """Whether a value has tangents and cotangents."""
    return value.shape.dtype.is_float or value.shape.dtype.is_complex


@batched_flags("checkpoint")
def _checkpoint(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    body, flags = batched_body(op.body.graph, mapped, over)
    return g.append_node(op.replace(body=Body(body)), inputs).outputs, flags


@batched("custom_jvp")
def _custom_jvp(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    """Tangents are mapped where their values are: all results are, and operands as they come."""
    every = [True] * len(op.body.graph.outputs)
    body, _ = batched_body(op.body.graph, mapped, over, every)
    tangents = [m for x, m in zip(inputs, mapped, strict=True) if _moves(x)]
    every = [True] * len(op.rule.graph.outputs)
    rule, _ = batched_body(op.rule.graph, [*mapped, *tangents], over, every)
    return g.append_node(op.replace(body=Body(body), rule=Body(rule)), inputs).outputs


@batched("custom_vjp")
def _custom_vjp(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values:
    """The cotangent of an operand that all elements share is the sum of theirs."""
    count = len(op.body.graph.outputs)
    body, _ = batched_body(op.body.graph, mapped, over, [True] * count)
    residuals = len(op.forward.graph.outputs) - count
    least = [*[True] * count, *[False] * residuals]
    forward, flags = batched_body(op.forward.graph, mapped, over, least)
    of_cts = [True] * sum(_moves(v) for v in op.body.graph.outputs)
    shared = [not m for x, m in zip(inputs, mapped, strict=True) if _moves(x)]
    backward, _ = batched_body(
        op.backward.graph, [*flags[count:], *of_cts], over, [True] * len(shared)
    )
    cts = zip(backward.outputs, shared, strict=True)
    backward.set_outputs([backward.sum(ct, axis=(0,)) if s else ct for ct, s in cts])
    made = op.replace(body=Body(body), forward=Body(forward), backward=Body(backward))
    return g.append_node(made, inputs).outputs


@batched("custom")
def _custom_op(op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Values | None:
    """By the function that was given with the op; else one element after the other."""
    batching = definition(op.op).batching
    if batching is None:
        return None
    made: Any = batching(g, inputs, mapped, over.size, **dict(op.options))
    return list(made) if isinstance(made, (list, tuple)) else [made]
