"""Reverse mode: a graph appended to another, with the pullback of cotangents.

    outputs, pullback = linearize(g, graph, operands, wanted)
    cotangents_of_operands = pullback(cotangents_of_outputs)

Both append nodes to `g`; what the backward part needs of the forward part are its values
(residuals). What nothing uses in the end is dead code and goes away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlx.errors import UnsupportedError, VerifyError
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Origin, Value
from rlx.ir.op import Op
from rlx.passes.grad.rules import (
    JVP,
    LINEARIZE,
    VJP,
    Grads,
    Pullback,
    add_any,
    is_differentiable,
    load_rules,
    no_derivative,
)


class Variable:
    """A value of the differentiated graph: where it is in `g`, and whether a gradient passes."""

    __slots__ = ("is_active", "value")

    def __init__(self, value: Value, is_active: bool) -> None:
        self.value, self.is_active = value, is_active


class _Step(NamedTuple):
    op: Op
    origin: Origin
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]
    backward: Pullback


def linearize(
    g: Graph, graph: Graph, operands: Sequence[Value], wanted: Sequence[bool],
    known: Mapping[Value, Value] | None = None,
) -> tuple[list[Value], Pullback]:  # fmt: skip
    """`graph` appended to `g`, its inputs being `operands`, and its pullback.

    `wanted` says for each operand whether its cotangent is asked for; the others get None. `known`
    has results of ops of `graph` that are in `g` already and need not be computed again.
    """
    tape = _Tape(g, known or {})
    given = [
        Variable(v, w and is_differentiable(v.shape.dtype))
        for v, w in zip(operands, wanted, strict=True)
    ]
    outputs = tape.run(graph, given)

    def pullback(cotangents: Grads) -> Grads:
        return tape.backward(outputs, cotangents, given)

    return [v.value for v in outputs], pullback


class _Tape:
    def __init__(self, g: Graph, known: Mapping[Value, Value]) -> None:
        self.g, self.known = g, known
        self.steps: list[_Step] = []

    # -- forward ------------------------------------------------------------------------------

    def run(self, graph: Graph, operands: Sequence[Variable]) -> list[Variable]:
        found: dict[Value, Variable] = {}
        given = iter(operands)
        for node in graph.nodes:
            if node.op.name == "input":
                found[node.output] = next(given)
                continue
            with self.g.origin(node.origin):
                made = self.apply(node, [found[v] for v in node.inputs])
            found.update(zip(node.outputs, made, strict=True))
        return [found[v] for v in graph.outputs]

    def apply(self, node: Node, inputs: Sequence[Variable]) -> Sequence[Variable]:
        op, g = self.g.current_op(node.op), self.g
        types = [v.shape.dtype for v in node.outputs]
        is_active = any(v.is_active for v in inputs) and any(map(is_differentiable, types))
        if not is_active or op.has_zero_derivative:
            made = g.append_node(op, [v.value for v in inputs], node.name if op.is_source else "")
            return [Variable(v, False) for v in made.outputs]
        load_rules()
        try:
            found = self._by_rule(node, inputs) or self._by_decomposition(op, inputs)
        except UnsupportedError as error:
            raise error.located(op.name, str(node.origin)) from None
        if found is None:
            raise no_derivative(op, node.origin)
        return found

    def _by_rule(self, node: Node, inputs: Sequence[Variable]) -> Sequence[Variable] | None:
        op, values = self.g.current_op(node.op), [v.value for v in inputs]
        results: Sequence[Value]
        linear, rule = LINEARIZE.get(op.name), VJP.get(op.name)
        if rule is None and op.name in JVP:
            rule = _transposed
        if linear is not None:
            flags = [v.is_active for v in inputs]
            results, backward = linear(op, self.g, values, flags)
        elif rule is not None:
            known = [self.known[v] for v in node.outputs if v in self.known]
            results = known or self.g.append_node(op, values).outputs
            backward = _applied(rule, op, self.g, values, results)
        else:
            return None
        outputs = [Variable(v, is_differentiable(v.shape.dtype)) for v in results]
        self.steps.append(_Step(op, node.origin, inputs, outputs, backward))
        return outputs

    def _by_decomposition(self, op: Op, inputs: Sequence[Variable]) -> Sequence[Variable] | None:
        body = decomposed(op, [v.value for v in inputs])
        return None if body is None else self.run(body, inputs)

    # -- backward -----------------------------------------------------------------------------

    def backward(
        self, outputs: Sequence[Variable], cotangents: Grads, wanted: Sequence[Variable]
    ) -> Grads:
        grads: dict[Variable, Value | None] = {}
        for variable, ct in zip(outputs, cotangents, strict=True):
            self._add(grads, variable, ct)
        for step in reversed(self.steps):
            given = [grads.pop(v, None) for v in step.outputs]
            if all(ct is None for ct in given):
                continue
            with self.g.origin(step.origin.touched("grad")):
                found = step.backward(given)
                for variable, ct in zip(step.inputs, found, strict=True):
                    _require_fit(step.op, variable, ct)
                    self._add(grads, variable, ct)
        return [grads.get(v) for v in wanted]

    def _add(
        self, grads: dict[Variable, Value | None], variable: Variable, ct: Value | None
    ) -> None:
        if ct is not None and variable.is_active:
            grads[variable] = add_any(self.g, grads.get(variable), ct)


def _applied(
    rule: Any, op: Op, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value]
) -> Callable[[Grads], Grads]:
    return lambda grads: rule(op, g, inputs, outputs, grads)


def _transposed(
    op: Op, g: Graph, inputs: Sequence[Value], outputs: Sequence[Value], grads: Grads
) -> Grads:
    """The cotangents of the operands by transposing the jvp rule, which is linear in the tangents:
    the pullback of the push-forward."""
    body = Graph(f"{op.name} jvp")
    values = [*inputs, *outputs]
    given = [body.input(f"x{i}", v.shape) for i, v in enumerate(values)]
    moving = [i for i, v in enumerate(inputs) if is_differentiable(v.shape.dtype)]
    tangents: list[Value | None] = [None] * len(inputs)
    for i in moving:
        tangents[i] = body.input(f"t{i}", inputs[i].shape)
    count = len(inputs)
    moved = JVP[op.name](op, body, given[:count], given[count:], tangents)
    pairs = [(t, ct) for t, ct in zip(moved, grads, strict=True) if t is not None]
    pairs = [(t, ct) for t, ct in pairs if ct is not None]
    body.set_outputs([t for t, _ in pairs])
    # the tangents' own values do not matter: the rule is linear in them
    operands = [*values, *(inputs[i] for i in moving)]
    wanted = [False] * len(values) + [True] * len(moving)
    _, pullback = linearize(g, body, operands, wanted)
    found = pullback([ct for _, ct in pairs])[len(values) :]
    results: list[Value | None] = [None] * count
    for i, ct in zip(moving, found, strict=True):
        results[i] = ct
    return results


def _require_fit(op: Op, variable: Variable, ct: Value | None) -> None:
    """Raise for a rule that gives a cotangent of another shape than its value."""
    if ct is None or not variable.is_active:
        return
    have, need = ct.shape, variable.value.shape
    if have.dtype is not need.dtype or not have.same_dims(need):
        raise VerifyError(
            "a derivative rule gives a cotangent of another shape", where=op.name, got=have,
            expected=need, origin=variable.value.node.origin,
        )  # fmt: skip


def decomposed(op: Op, operands: Sequence[Value]) -> Graph | None:
    """The decomposition of an op on operands of these shapes, as a graph."""
    if not op.has_decomposition():
        return None
    graph = Graph(op.name)
    inputs = [graph.input(f"x{i}", v.shape) for i, v in enumerate(operands)]
    result = op.decompose(graph, *inputs)
    if result is None:
        return None
    return graph.set_outputs(*(result if isinstance(result, tuple) else (result,)))
