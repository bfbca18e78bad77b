"""Whole graphs: the gradient, the vjp and the jvp of a graph as a graph.

Sources (inputs, params) keep their names. `d_NAME` is the cotangent or the tangent of NAME, and
`d_d_NAME` where a derivative has that name already.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import DTypeError, InputError, ShapeError
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.passes.grad.forward import push_forward
from rlx.passes.grad.reverse import linearize
from rlx.passes.grad.rules import filled, is_differentiable, zeros
from rlx.passes.simplify import dce

_NAMED = ("input", "param")


def gradient_graph(graph: Graph, wrt: Sequence[str] = (), of: str | None = None) -> Graph:
    """The outputs of `graph` and the gradient of one of them, a scalar (the first unless `of`
    names another), by the sources `wrt` (all float params, or inputs where there are none)."""
    body, sources = _as_body(graph)
    names = _chosen(graph, wrt)
    at = _output(graph, of)
    scalar = graph.outputs[at].shape
    if not scalar.dtype.is_float:
        raise DTypeError(
            "the gradient of a number that is not real", where=graph.name,
            got=f"{graph.output_names[at]} {scalar}", expected="a float",
            hint="of=NAME differentiates another output",
        )  # fmt: skip
    if scalar.rank:
        raise ShapeError(
            "the gradient of an array", where=graph.name, got=f"{graph.output_names[at]} {scalar}",
            expected="a scalar", hint="sum it, or use vjp_graph",
        )  # fmt: skip
    made, given = _sources(graph, sources)
    outputs, pullback = linearize(made, body, given, [n.name in names for n in sources])
    cts: list[Value | None] = [None] * len(outputs)
    cts[at] = filled(made, 1, outputs[at].shape)
    return _finished(made, graph, outputs, sources, names, pullback(cts))


def vjp_graph(graph: Graph, wrt: Sequence[str] = ()) -> Graph:
    """The outputs of `graph` and the cotangents of the sources `wrt`, with one more input for the
    cotangent of each float output."""
    body, sources = _as_body(graph)
    names = _chosen(graph, wrt)
    made, given = _sources(graph, sources)
    outputs, pullback = linearize(made, body, given, [n.name in names for n in sources])
    taken = {n.name for n in sources}
    cts = [
        made.input(_free(f"d_{name}", taken), v.shape) if is_differentiable(v.shape.dtype) else None
        for name, v in zip(graph.output_names, outputs, strict=True)
    ]
    return _finished(made, graph, outputs, sources, names, pullback(cts))


def jvp_graph(graph: Graph, wrt: Sequence[str] = ()) -> Graph:
    """The outputs of `graph` and their tangents, with one more input for the tangent of each of the
    sources `wrt`."""
    body, sources = _as_body(graph)
    names = _chosen(graph, wrt)
    made, given = _sources(graph, sources)
    taken = {n.name for n in sources}
    tangents = [
        made.input(_free(f"d_{n.name}", taken), n.output.shape) if n.name in names else None
        for n in sources
    ]
    outputs, moved = push_forward(made, body, given, tangents)
    extra, found = list[str](), list[Value]()
    taken = set(graph.output_names)
    for name, v, t in zip(graph.output_names, outputs, moved, strict=True):
        if is_differentiable(v.shape.dtype):
            extra.append(_free(f"d_{name}", taken))
            found.append(zeros(made, v.shape) if t is None else t)
    return dce(made.set_outputs([*outputs, *found], names=[*graph.output_names, *extra]))


def _free(name: str, taken: set[str]) -> str:
    """`name`, with more of `d_` in front until it is not taken: derivatives of derivatives."""
    while name in taken:
        name = f"d_{name}"
    taken.add(name)
    return name


def _as_body(graph: Graph) -> tuple[Graph, list[Node]]:
    """The graph with inputs in place of params, and its sources."""
    for node in graph.nodes:
        if node.op.name == "state":
            raise InputError(
                "a graph with a state has no gradient", where=graph.name, got=node.name,
                expected="inputs and params", hint="make the state an input and an output",
            )  # fmt: skip
    body = Graph(graph.name)
    values: dict[Value, Value] = {}
    sources = [n for n in graph.nodes if n.op.name in _NAMED]
    for node in graph.nodes:
        if node.op.name in _NAMED:
            values[node.output] = body.input(node.name, node.output.shape)
        else:
            with body.origin(node.origin):
                made = body.append_node(node.op, [values[v] for v in node.inputs], node.name)
            values.update(zip(node.outputs, made.outputs, strict=True))
    return body.set_outputs([values[v] for v in graph.outputs], names=graph.output_names), sources


def _sources(graph: Graph, sources: Sequence[Node]) -> tuple[Graph, list[Value]]:
    made = Graph(graph.name)
    made.dynamic = dict(graph.dynamic)
    return made, [made.append_node(n.op, (), n.name).output for n in sources]


def _chosen(graph: Graph, wrt: Sequence[str]) -> tuple[str, ...]:
    """The names of the sources to differentiate by, checked."""
    if isinstance(wrt, str):
        wrt = (wrt,)
    named = {n.name: n for n in graph.nodes if n.op.name in _NAMED}
    if not wrt:
        for kind in ("param", "input"):
            wrt = [
                n.name for n in graph.sources(kind) if is_differentiable(n.output.shape.dtype)
            ]  # fmt: skip
            if wrt:
                break
        else:
            raise DTypeError(
                "no derivative by integers", where=graph.name,
                got=", ".join(f"{n.name} {n.output.shape}" for n in named.values()) or "no sources",
                expected="a param or an input of floats",
            )  # fmt: skip
    for name in wrt:
        if name not in named:
            raise InputError(
                "no such source", where=graph.name, got=name, expected=", ".join(named)
            )
        shape = named[name].output.shape
        if not is_differentiable(shape.dtype):
            raise DTypeError(
                "no derivative by integers", where=name, got=shape, expected="a float type"
            )
    return tuple(wrt)


def _output(graph: Graph, of: str | None) -> int:
    if of is None:
        return 0
    if of not in graph.output_names:
        expected = ", ".join(graph.output_names)
        raise InputError("no such output", where=graph.name, got=of, expected=expected)
    return graph.output_names.index(of)


def _finished(
    made: Graph, graph: Graph, outputs: Sequence[Value], sources: Sequence[Node],
    names: Sequence[str], grads: Sequence[Value | None],
) -> Graph:  # fmt: skip
    by_name = {n.name: ct for n, ct in zip(sources, grads, strict=True)}
    found = []
    for name in names:
        ct = by_name[name]
        found.append(zeros(made, made.find(name).shape) if ct is None else ct)
    taken = set(graph.output_names)
    names_out = [*graph.output_names, *(_free(f"d_{name}", taken) for name in names)]
    return dce(made.set_outputs([*outputs, *found], names=names_out))
