"""Forward mode: a graph appended to another together with the tangents of its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlx.errors import UnsupportedError
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.passes.grad.reverse import decomposed, linearize
from rlx.passes.grad.rules import (
    DECOMPOSED_FORWARD,
    JVP,
    LINEAR,
    MULTILINEAR,
    VJP,
    Grads,
    add_any,
    in_type,
    instantiated,
    is_differentiable,
    load_rules,
    no_derivative,
)


class Dual(NamedTuple):
    """A value and its tangent; None is zero."""

    value: Value
    tangent: Value | None


def push_forward(
    g: Graph, graph: Graph, operands: Sequence[Value], tangents: Grads
) -> tuple[list[Value], list[Value | None]]:
    """`graph` appended to `g`: its outputs and their tangents (None: zero)."""
    found: dict[Value, Dual] = {}
    given = iter([Dual(v, t) for v, t in zip(operands, tangents, strict=True)])
    for node in graph.nodes:
        if node.op.name == "input":
            found[node.output] = next(given)
            continue
        with g.origin(node.origin.touched("jvp")):
            try:
                made = _apply(g, node, [found[v] for v in node.inputs])
            except UnsupportedError as error:
                raise error.located(node.op.name, str(node.origin)) from None
        found.update(zip(node.outputs, made, strict=True))
    outputs = [found[v] for v in graph.outputs]
    return [d.value for d in outputs], [d.tangent for d in outputs]


def _apply(g: Graph, node: Node, inputs: Sequence[Dual]) -> Sequence[Dual]:
    op, values = g.current_op(node.op), [d.value for d in inputs]
    types = [v.shape.dtype for v in node.outputs]
    moves = any(d.tangent is not None for d in inputs) and any(map(is_differentiable, types))
    if not moves or op.has_zero_derivative:
        made = g.append_node(op, values, node.name if op.is_source else "").outputs
        return [Dual(v, None) for v in made]
    load_rules()
    tangents = [d.tangent for d in inputs]
    if op.name in JVP:
        results = g.append_node(op, values).outputs
        moved = JVP[op.name](op, g, values, results, tangents)
        return [Dual(v, t) for v, t in zip(results, moved, strict=True)]
    for table, rule in ((LINEAR, _linear), (MULTILINEAR, _multilinear)):
        if op.name in table:
            results = g.append_node(op, values).outputs
            moved = rule(op, g, values, tangents)
            return [Dual(v, t) for v, t in zip(results, moved, strict=True)]
    is_ruled = op.name in VJP and op.name not in DECOMPOSED_FORWARD
    body = None if is_ruled else decomposed(op, values)
    if body is not None:
        found = push_forward(g, body, values, tangents)
        return [Dual(v, t) for v, t in zip(*found, strict=True)]
    if op.name not in VJP:
        raise no_derivative(op, node.origin)
    results = g.append_node(op, values).outputs
    moved = _transposed(op, g, values, results, tangents)
    return [Dual(v, t) for v, t in zip(results, moved, strict=True)]


def _linear(op: Op, g: Graph, inputs: Sequence[Value], tangents: Grads) -> Grads:
    """f(x + t) = f(x) + f(t), in all operands that are not integers."""
    given = [
        v if t is None and not is_differentiable(v.shape.dtype) else t
        for v, t in zip(inputs, tangents, strict=True)
    ]
    made = g.append_node(op, _filled(g, given, inputs)).outputs
    return list(made)


def _filled(g: Graph, given: Grads, inputs: Sequence[Value]) -> list[Value]:
    return instantiated(g, given, inputs)


def _multilinear(op: Op, g: Graph, inputs: Sequence[Value], tangents: Grads) -> Grads:
    """d f(a, b) = f(da, b) + f(a, db)"""
    total: Value | None = None
    for i, t in enumerate(tangents):
        if t is not None:
            given = [t if i == j else v for j, v in enumerate(inputs)]
            total = add_any(g, total, g.append_node(op, given).output)
    return [total]


def _transposed(
    op: Op, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], tangents: Grads
) -> Grads:
    """The tangents of the results by transposing the vjp rule, which is linear in the cotangents:
    the pullback of the pullback."""
    body = Graph(f"{op.name} pullback")
    values = [*inputs, *outputs]
    given = [body.input(f"x{i}", v.shape) for i, v in enumerate(values)]
    moving = [i for i, v in enumerate(outputs) if is_differentiable(v.shape.dtype)]
    cts: list[Value | None] = [None] * len(outputs)
    for i in moving:
        cts[i] = body.input(f"ct{i}", outputs[i].shape)
    count = len(inputs)
    found = VJP[op.name](op, body, given[:count], given[count:], cts)
    pairs = [(ct, t) for ct, t in zip(found, tangents, strict=True) if ct is not None]
    pairs = [(ct, t) for ct, t in pairs if t is not None]
    body.set_outputs([ct for ct, _ in pairs])
    # the cotangents' own values do not matter: the rule is linear in them
    operands = [*values, *(outputs[i] for i in moving)]
    wanted = [False] * len(values) + [True] * len(moving)
    _, pullback = linearize(g, body, operands, wanted)
    moved = pullback([t for _, t in pairs])[len(values) :]
    results: list[Value | None] = [None] * len(outputs)
    for i, t in zip(moving, moved, strict=True):
        results[i] = None if t is None else in_type(g, t, outputs[i].shape.dtype)
    return results
