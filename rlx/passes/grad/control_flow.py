"""Loops and branches.

The backward part of a scan is a scan the other way. It computes the body again from the carry with
which each iteration began; the forward scan saves those carries, one more result each. A branch is
computed again in the branch of the backward `cond`. A `while_loop` has no bound on what it would
have to save: it is differentiated forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Value
from rlx.ir.op import lookup
from rlx.ir.shape import Shape
from rlx.passes.grad.forward import push_forward
from rlx.passes.grad.reverse import linearize
from rlx.passes.grad.rules import (
    Grads,
    Pullback,
    add_any,
    instantiated,
    is_differentiable,
    jvp,
    linearized,
    no_derivative,
    zeros,
)

Values = Sequence[Value]


def _inputs(g: Graph, shapes: Sequence[Shape], name: str) -> list[Value]:
    return [g.input(f"{name}{i}", shape) for i, shape in enumerate(shapes)]


def _floats(values: Sequence[Value]) -> list[int]:
    return [i for i, v in enumerate(values) if is_differentiable(v.shape.dtype)]


# -- cond -----------------------------------------------------------------------------------------


@linearized("cond")
def _cond(op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]) -> tuple[Values, Pullback]:
    outputs = g.append_node(op, inputs).outputs
    operands = inputs[1:]
    active = [i for i, w in enumerate(wanted[1:]) if w]
    moving = _floats(outputs)

    def branch(body: Body) -> Body:
        made = Graph("cond backward")
        values = _inputs(made, [v.shape for v in operands], "x")
        cts: list[Value | None] = [None] * len(outputs)
        for i in moving:
            cts[i] = made.input(f"ct{i}", outputs[i].shape)
        flags = [i in active for i in range(len(values))]
        _, pullback = linearize(made, body.graph, values, flags)
        found = instantiated(made, pullback(cts), values)
        return Body(made.set_outputs([found[i] for i in active]))

    def backward(grads: Grads) -> Grads:
        given = instantiated(g, grads, outputs)
        back = lookup("cond")(then=branch(op.then), otherwise=branch(op.otherwise))
        made = g.append_node(back, [*inputs, *[given[i] for i in moving]]).outputs
        found: list[Value | None] = [None] * len(inputs)
        for i, ct in zip(active, made, strict=True):
            found[1 + i] = ct
        return found

    return outputs, backward


@jvp("cond")
def _cond_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    moved = [i for i, t in enumerate(tangents) if t is not None]
    moving = _floats(outputs)

    def branch(body: Body) -> Body:
        made = Graph("cond jvp")
        values = _inputs(made, [v.shape for v in inputs[1:]], "x")
        given: list[Value | None] = [None] * len(values)
        for i in moved:
            given[i - 1] = made.input(f"t{i}", inputs[i].shape)
        found, changes = push_forward(made, body.graph, values, given)
        filled = instantiated(made, changes, found)
        return Body(made.set_outputs([filled[i] for i in moving]))

    pushed = lookup("cond")(then=branch(op.then), otherwise=branch(op.otherwise))
    operands = [*inputs, *[t for t in tangents if t is not None]]
    results: list[Value | None] = [None] * len(outputs)
    for i, t in zip(moving, g.append_node(pushed, operands).outputs, strict=True):
        results[i] = t
    return results


# -- scan -----------------------------------------------------------------------------------------


@linearized("scan")
def _scan(op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]) -> tuple[Values, Pullback]:
    saving = op.replace(body=_saving_carries(op))
    made = g.append_node(saving, inputs).outputs
    count = len(made) - op.n_carry
    outputs, saved = made[:count], made[count:]
    state, xs, fixed = op.split(inputs)
    active = [i for i in _floats(fixed) if wanted[op.n_carry + op.n_xs + i]]
    carries, slices, rows = _floats(state), _floats(xs), _floats(outputs[op.n_carry :])

    def backward(grads: Grads) -> Grads:
        given = instantiated(g, grads, outputs)
        start = [given[i] for i in carries] + [zeros(g, fixed[i].shape) for i in active]
        ct_rows = [given[op.n_carry + i] for i in rows]
        body = _backward_body(op, inputs, (carries, slices, rows, active), outputs)
        back = lookup("scan")(
            body=body, n_carry=len(start), n_xs=len(xs) + len(saved) + len(rows),
            reverse=not op.reverse, length=op.length,
        )  # fmt: skip
        found = g.append_node(back, [*start, *xs, *saved, *ct_rows, *fixed]).outputs
        results: list[Value | None] = [None] * len(inputs)
        places = [
            *carries, *(op.n_carry + op.n_xs + i for i in active),
            *(op.n_carry + i for i in slices),
        ]  # fmt: skip
        for at, ct in zip(places, found, strict=True):
            results[at] = ct
        return results

    return outputs, backward


def _saving_carries(op: Any) -> Body:
    """The body with the carries it began with as further results of each iteration."""
    graph = op.body.graph.copy()
    names = [n.output for n in graph.sources("input")][: op.n_carry]
    kept = [graph.contiguous(v) for v in names]  # a result that is an input would be a view of it
    return Body(graph.set_outputs([*graph.outputs, *kept]))


def _backward_body(op: Any, inputs: Values, which: tuple[list[int], ...], outputs: Values) -> Body:
    """(cotangents of carries, sums of those of fixed operands; slices, saved carries, cotangents of
    the iteration's results; fixed operands) to those cotangents before the iteration."""
    carries, slices, rows, active = which
    state, xs, fixed = op.split(inputs)
    g = Graph("scan backward")
    ct_state = _inputs(g, [state[i].shape for i in carries], "ct")
    sums = _inputs(g, [fixed[i].shape for i in active], "sum")
    parts = _inputs(g, [_slice(x.shape) for x in xs], "x")
    before = _inputs(g, [v.shape for v in state], "carry")
    row_shapes = [outputs[op.n_carry + i].shape for i in rows]
    ct_rows = _inputs(g, [_slice(s) for s in row_shapes], "ct_y")
    same = _inputs(g, [v.shape for v in fixed], "fixed")
    flags = [
        *(i in carries for i in range(len(before))), *(i in slices for i in range(len(parts))),
        *(i in active for i in range(len(same))),
    ]  # fmt: skip
    operands = [*before, *parts, *same]
    found, pullback = linearize(g, op.body.graph, operands, flags)
    cts: list[Value | None] = [None] * len(found)
    for i, ct in zip(carries, ct_state, strict=True):
        cts[i] = ct
    for i, ct in zip(rows, ct_rows, strict=True):
        cts[op.n_carry + i] = ct
    back = pullback(cts)
    first, last = op.n_carry, op.n_carry + op.n_xs
    filled = instantiated(g, back, operands)
    totals = [add_any(g, sums[n], back[last + i]) for n, i in enumerate(active)]
    results = [
        *(filled[i] for i in carries), *totals, *(filled[first + i] for i in slices),
    ]  # fmt: skip
    return Body(g.set_outputs([g.contiguous(v) if v.node.op.is_source else v for v in results]))


def _slice(shape: Shape) -> Shape:
    return shape.with_dims(shape.dims[1:])


@jvp("scan")
def _scan_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """A scan that carries tangents beside the values."""
    state, xs, fixed = op.split(inputs)
    carries, slices = _floats(state), _floats(xs)
    last = op.n_carry + op.n_xs
    active = [i for i in range(len(fixed)) if tangents[last + i] is not None]
    body = Graph("scan jvp")
    values = _inputs(body, [v.shape for v in state], "carry")
    t_state = _inputs(body, [state[i].shape for i in carries], "t_carry")
    parts = _inputs(body, [_slice(x.shape) for x in xs], "x")
    t_parts = _inputs(body, [_slice(xs[i].shape) for i in slices], "t_x")
    same = _inputs(body, [v.shape for v in fixed], "fixed")
    t_same = _inputs(body, [fixed[i].shape for i in active], "t_fixed")
    given: list[Value | None] = [None] * len(inputs)
    for i, t in zip(carries, t_state, strict=True):
        given[i] = t
    for i, t in zip(slices, t_parts, strict=True):
        given[op.n_carry + i] = t
    for i, t in zip(active, t_same, strict=True):
        given[last + i] = t
    found, moved = push_forward(body, op.body.graph, [*values, *parts, *same], given)
    filled = instantiated(body, moved, found)
    rows = _floats(found[op.n_carry :])
    body.set_outputs([
        *found[: op.n_carry], *(filled[i] for i in carries), *found[op.n_carry :],
        *(filled[op.n_carry + i] for i in rows),
    ])  # fmt: skip
    pushed = lookup("scan")(
        body=Body(body), n_carry=op.n_carry + len(carries), n_xs=op.n_xs + len(slices),
        reverse=op.reverse, length=op.length,
    )  # fmt: skip
    filled = instantiated(g, tangents, inputs)
    made = g.append_node(pushed, [
        *state, *(filled[i] for i in carries), *xs, *(filled[op.n_carry + i] for i in slices),
        *fixed, *(filled[last + i] for i in active),
    ]).outputs  # fmt: skip
    results: list[Value | None] = [None] * len(outputs)
    for n, i in enumerate(carries):
        results[i] = made[op.n_carry + n]
    behind = len(outputs) + len(carries)
    for n, i in enumerate(rows):
        results[op.n_carry + i] = made[behind + n]
    return results


# -- while_loop -----------------------------------------------------------------------------------


@linearized("while_loop")
def _while(op: Any, g: Graph, inputs: Values, wanted: Sequence[bool]) -> tuple[Values, Pullback]:
    raise no_derivative(
        op, UNKNOWN, "a while_loop has no reverse-mode derivative",
        "use scan or fori_loop, whose length is known, or forward mode (jvp, jacfwd)",
    )  # fmt: skip


@jvp("while_loop")
def _while_jvp(op: Any, g: Graph, inputs: Values, outputs: Values, tangents: Grads) -> Grads:
    """A loop that carries tangents beside the values; the condition does not see them."""
    state, fixed = inputs[: op.n_carry], inputs[op.n_carry :]
    carries = _floats(state)
    active = [i for i in range(len(fixed)) if tangents[op.n_carry + i] is not None]

    def operands(body: Graph) -> tuple[list[Value], list[Value], list[Value], list[Value]]:
        return (
            _inputs(body, [v.shape for v in state], "carry"),
            _inputs(body, [state[i].shape for i in carries], "t_carry"),
            _inputs(body, [v.shape for v in fixed], "fixed"),
            _inputs(body, [fixed[i].shape for i in active], "t_fixed"),
        )

    test = Graph("while_loop jvp condition")
    values, _, same, _ = operands(test)
    flags, _ = push_forward(
        test, op.condition.graph, [*values, *same], [None] * (len(values) + len(same))
    )
    test.set_outputs(flags)
    body = Graph("while_loop jvp")
    values, t_state, same, t_same = operands(body)
    given: list[Value | None] = [None] * len(inputs)
    for i, t in zip(carries, t_state, strict=True):
        given[i] = t
    for i, t in zip(active, t_same, strict=True):
        given[op.n_carry + i] = t
    found, moved = push_forward(body, op.body.graph, [*values, *same], given)
    filled = instantiated(body, moved, found)
    body.set_outputs([*found, *(filled[i] for i in carries)])
    pushed = lookup("while_loop")(
        condition=Body(test), body=Body(body), n_carry=op.n_carry + len(carries),
        max_iterations=op.max_iterations, must_end=op.must_end,
    )  # fmt: skip
    filled = instantiated(g, tangents, inputs)
    made = g.append_node(pushed, [
        *state, *(filled[i] for i in carries), *fixed, *(filled[op.n_carry + i] for i in active),
    ]).outputs  # fmt: skip
    results: list[Value | None] = [None] * len(outputs)
    for n, i in enumerate(carries):
        results[i] = made[op.n_carry + n]
    return results
