"""Ops that say how a function is differentiated: checkpoints, custom rules, custom ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Node, Value
from rlx.ir.ops.custom import definition
from rlx.ir.ops.derivatives import OptimizationBarrier, inline
from rlx.passes.grad.reverse import linearize
from rlx.passes.grad.rules import (
    VJP,
    Grads,
    Pullback,
    instantiated,
    is_differentiable,
    jvp,
    linearized,
    load_rules,
    no_derivative,
)

Values = Sequence[Value]


# -- checkpoint -----------------------------------------------------------------------------------


@linearized("checkpoint")
def _checkpoint(
    op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    """The body runs again behind a barrier that waits for the cotangents: without it the copy would
    be merged with the first run, and its values kept after all."""
    graph = op.body.graph
    kept = _kept_values(graph) if op.policy == "matmuls" else []
    saving = graph.copy()
    saving.set_outputs([*saving.outputs, *[_same(saving, v) for v in kept]])
    results = inline(g, saving, inputs)
    count = len(graph.outputs)
    outputs, saved = results[:count], results[count:]

    def backward(grads: Grads) -> Grads:
        given = [ct for ct in grads if ct is not None]
        late = g.append_node(OptimizationBarrier(), [*inputs, *saved, *given]).outputs
        behind = late[: len(inputs)]
        known = dict(zip(kept, late[len(inputs) : len(inputs) + len(saved)], strict=True))
        cts = iter(late[len(inputs) + len(saved) :])
        _, pullback = linearize(g, graph, behind, wanted, known)
        return pullback([None if ct is None else next(cts) for ct in grads])

    return outputs, backward


def _kept_values(graph: Graph) -> list[Value]:
    """Results of the ops that carry the work. Instead of the terms of a sum, such as a product and
    that of its adapter, the sum is kept where nothing else uses them."""
    load_rules()
    users: dict[Value, list[Node | None]] = {v: [None] for v in graph.outputs}
    for node in graph.nodes:
        for v in node.inputs:
            users.setdefault(v, []).append(node)
    kept: dict[Value, None] = {}
    for node in graph.nodes:
        if node.op.is_anchor and node.op.name in VJP:
            value = node.output
            while (total := _sum_with(value, users)) is not None:
                value = total
            kept[value] = None
    return list(kept)


def _sum_with(value: Value, users: Mapping[Value, Sequence[Node | None]]) -> Value | None:
    """The sum, of the same shape, that is the only use of a value."""
    user, *others = users.get(value, [None])
    if others or user is None or user.op.name != "add":
        return None
    return user.output if user.output.shape == value.shape else None


def _same(copy: Graph, value: Value) -> Value:
    return copy.nodes[value.node.id].outputs[value.index]


# -- custom rules ---------------------------------------------------------------------------------


@linearized("custom_vjp")
def _custom_vjp(
    op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    made = inline(g, op.forward.graph, inputs)
    count = len(op.body.graph.outputs)
    outputs, residuals = made[:count], made[count:]
    moving = [i for i, v in enumerate(outputs) if is_differentiable(v.shape.dtype)]

    def backward(grads: Grads) -> Grads:
        filled = instantiated(g, grads, outputs)
        found = iter(inline(g, op.backward.graph, [*residuals, *[filled[i] for i in moving]]))
        return [next(found) if is_differentiable(v.shape.dtype) else None for v in inputs]

    return outputs, backward


@jvp("custom_vjp")
def _no_forward(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    raise no_derivative(
        op, UNKNOWN, "a function with a custom_vjp has no forward-mode derivative",
        "differentiate it in reverse mode (grad, vjp), or give it a custom_jvp instead",
    )  # fmt: skip


@jvp("custom_jvp")
def _custom_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    filled = instantiated(g, tangents, inputs)
    given = [t for t in filled if is_differentiable(t.shape.dtype)]
    found = iter(inline(g, op.rule.graph, [*inputs, *given]))
    return [next(found) if is_differentiable(v.shape.dtype) else None for v in outputs]


@linearized("custom_jvp")
def _transposed_jvp(
    op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    """The rule is linear in the tangents: its transpose is the pullback."""
    outputs = inline(g, op.body.graph, inputs)
    moving = [v for v in inputs if is_differentiable(v.shape.dtype)]

    def backward(grads: Grads) -> Grads:
        flags = [False] * len(inputs) + [True] * len(moving)
        # where the rule is transposed does not matter: the tangents' own values are not used
        _, pullback = linearize(g, op.rule.graph, [*inputs, *moving], flags)
        cts = [ct for ct, v in zip(grads, outputs, strict=True) if is_differentiable(v.shape.dtype)]
        found = iter(pullback(cts)[len(inputs) :])
        return [next(found) if is_differentiable(v.shape.dtype) else None for v in inputs]

    return outputs, backward


@linearized("custom")
def _custom_op(
    op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]
) -> tuple[Values, Pullback]:
    """An op of `rlx.custom_op`, by the gradient that was given with it."""
    found = definition(op.op)
    if found.gradient is None:
        raise no_derivative(
            op, UNKNOWN, f"the custom op {op.op} has no gradient",
            "give custom_op(…, gradient=), or keep the op out with stop_gradient",
        )  # fmt: skip
    gradient, outputs = found.gradient, g.append_node(op, inputs).outputs

    def backward(grads: Grads) -> Grads:
        made: Any = gradient(g, inputs, outputs, grads, **dict(op.options))
        return list(made) if isinstance(made, (list, tuple)) else [made]

    return outputs, backward
