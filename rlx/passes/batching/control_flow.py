"""Loops and branches.

A carried value is mapped if the body makes it so, which is found by trying: the flags of the
carries grow until an iteration does not change them. A branch by a predicate per element becomes a
choice between the results of both branches; a loop with a condition per element runs as long as one
of them holds, and elements that are done keep their values.
"""

from __future__ import annotations

from typing import Any

from rlx.errors import UnsupportedError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import Op
from rlx.passes.batching.rules import (
    Flags,
    MappedAxis,
    Values,
    batched_flags,
    moved,
    spread,
    spread_all,
)
from rlx.passes.batching.vectorize import batched_body, run, with_mapped_results


def _require_no_effect(op: Op, *bodies: Body) -> None:
    for body in bodies:
        for node in body.graph.nodes:
            if node.op.has_effect:
                raise UnsupportedError(
                    "an effect under a condition per element of a batch", where=op.name,
                    got=str(node.op), origin=node.origin,
                    expected="branches and loops that compute values alone",
                )  # fmt: skip
            _require_no_effect(op, *[b for b in node.op.attributes().values()
                                     if isinstance(b, Body)])  # fmt: skip


# -- cond -------------------------------------------------------------------------------------


@batched_flags("cond")
def _cond(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    if mapped[0]:
        return _choice(op, g, inputs, mapped, over)
    then, first = batched_body(op.then.graph, mapped[1:], over)
    otherwise, second = batched_body(op.otherwise.graph, mapped[1:], over)
    then, flags = with_mapped_results(then, first, second, over)
    otherwise, _ = with_mapped_results(otherwise, second, first, over)
    made = op.replace(then=Body(then), otherwise=Body(otherwise))
    return g.append_node(made, inputs).outputs, flags


def _choice(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    """Both branches, and the results of one of them for each element."""
    _require_no_effect(op, op.then, op.otherwise)
    pred, *operands = inputs
    (yes, of_yes), (no, of_no) = (
        run(g, body.graph, operands, mapped[1:], over) for body in (op.then, op.otherwise)
    )
    made = [
        _where(g, pred, spread(g, a, m, over), spread(g, b, n, over))
        for a, m, b, n in zip(yes, of_yes, no, of_no, strict=True)
    ]
    return made, [True] * len(made)


def _where(g: Graph, flag: Value, a: Value, b: Value) -> Value:
    """The elements of the batch from `a` where their flag is set, else from `b`."""
    made: Value = g.where(_behind(g, flag, a.shape.rank - 1), a, b)
    return made


def _behind(g: Graph, flag: Value, rank: int) -> Value:
    return g.reshape(flag, shape=(flag.shape.dims[0], *[1] * rank))


# -- scan -------------------------------------------------------------------------------------


@batched_flags("scan")
def _scan(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    count = op.n_carry
    carried = list(mapped[:count])
    while True:
        least = [*carried, *[False] * (len(op.body.graph.outputs) - count)]
        body, flags = batched_body(op.body.graph, [*carried, *mapped[count:]], over, least)
        if flags[:count] == carried:
            break
        carried = flags[:count]
    state, xs, fixed = op.split(inputs)
    state = [spread(g, x, m or not c, over)
             for x, m, c in zip(state, mapped[:count], carried, strict=True)]  # fmt: skip
    rows = [moved(g, x, 0, 1) if m else x
            for x, m in zip(xs, op.split(mapped)[1], strict=True)]  # fmt: skip
    made = g.append_node(op.replace(body=Body(body)), [*state, *rows, *fixed]).outputs
    stacked = [moved(g, y, 1, 0) if m else y
               for y, m in zip(made[count:], flags[count:], strict=True)]  # fmt: skip
    return [*made[:count], *stacked], flags


# -- while_loop -------------------------------------------------------------------------------


@batched_flags("while_loop")
def _while(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    count = op.n_carry
    carried, fixed = list(mapped[:count]), mapped[count:]
    while True:
        body, flags = batched_body(op.body.graph, [*carried, *fixed], over, carried)
        if flags == carried:
            break
        carried = flags
    test, (differs,) = batched_body(op.condition.graph, [*carried, *fixed], over)
    if differs:
        return _frozen_loop(op, g, inputs, mapped, over)
    state = [spread(g, x, m or not c, over)
             for x, m, c in zip(inputs[:count], mapped[:count], carried, strict=True)]  # fmt: skip
    made = op.replace(condition=Body(test), body=Body(body))
    return g.append_node(made, [*state, *inputs[count:]]).outputs, carried


def _frozen_loop(
    op: Any, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> tuple[Values, Flags]:
    """A loop that carries which elements go on; the others keep their values."""
    _require_no_effect(op, op.condition, op.body)
    count = op.n_carry
    state = spread_all(g, inputs[:count], mapped[:count], over)
    fixed, of_fixed = inputs[count:], mapped[count:]
    flags = [*[True] * count, *of_fixed]
    (going,), (differs,) = run(g, op.condition.graph, [*state, *fixed], flags, over)
    going = spread(g, going, differs, over)
    shapes = [v.shape for v in (going, *state, *fixed)]

    test = Graph("while_loop any")
    operands = [test.input(f"x{i}", s) for i, s in enumerate(shapes)]
    test.set_outputs(test.any(operands[0]))

    body = Graph(op.body.graph.name)
    active, *values = [body.input(f"x{i}", s) for i, s in enumerate(shapes)]
    new, of_new = run(body, op.body.graph, values, flags, over)
    new = spread_all(body, new, of_new, over)
    new = [_where(body, active, a, b) for a, b in zip(new, values[:count], strict=True)]
    (next_,), (still,) = run(body, op.condition.graph, [*new, *values[count:]], flags, over)
    body.set_outputs(body.logical_and(active, spread(body, next_, still, over)), *new)
    made = op.replace(condition=Body(test), body=Body(body), n_carry=count + 1)
    return g.append_node(made, [going, *state, *fixed]).outputs[1:], [True] * count
