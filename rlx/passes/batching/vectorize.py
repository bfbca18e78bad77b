"""The walk: a graph appended to another, its operands and results with a batch in front.

Values that depend on no mapped operand are computed once, not once per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

from rlx.errors import UnsupportedError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.node import UNKNOWN, Node, Value
from rlx.ir.op import Op, lookup
from rlx.ir.ops.composite import decomposed
from rlx.passes.batching.rules import (
    RULES,
    Flags,
    MappedAxis,
    Values,
    element,
    load_rules,
    moved,
    spread_all,
    widened,
)

Found: TypeAlias = tuple[Values, Flags]


def batch(
    g: Graph, graph: Graph, operands: Values, axes: Sequence[int | None], size: Dim,
    axis_name: str | None = None,
) -> tuple[list[Value], list[bool]]:  # fmt: skip
    """`graph` appended to `g` for a batch of `size`: its outputs, and which of them are mapped.

    `axes` says which axis of each operand is the batch; None: the operand is the same for all.
    Mapped results have the batch as axis 0. `axis_name` is what collectives call it.
    """
    load_rules()
    inputs = [v if axis is None else moved(g, v, axis, 0)
              for v, axis in zip(operands, axes, strict=True)]  # fmt: skip
    mapped = [axis is not None for axis in axes]
    return run(g, graph, inputs, mapped, MappedAxis(size, axis_name))


def run(
    g: Graph, graph: Graph, operands: Values, mapped: Flags, over: MappedAxis
) -> tuple[list[Value], list[bool]]:
    """`batch` of operands whose batch is in front already."""
    found: dict[Value, tuple[Value, bool]] = {}
    given = iter(zip(operands, mapped, strict=True))
    for node in graph.nodes:
        if node.op.name == "input":
            found[node.output] = next(given)
            continue
        pairs = [found[v] for v in node.inputs]
        known = node.origin is not UNKNOWN  # nodes of a decomposition keep that of their op
        with g.origin(node.origin.touched("vmap")) if known else nullcontext():
            made, flags = _apply(g, node, [v for v, _ in pairs], [m for _, m in pairs], over)
        found.update(zip(node.outputs, zip(made, flags, strict=True), strict=True))
    outputs = [found[v] for v in graph.outputs]
    return [v for v, _ in outputs], [m for _, m in outputs]


def _apply(g: Graph, node: Node, inputs: Values, mapped: Flags, over: MappedAxis) -> Found:
    op = node.op
    if not any(mapped) and not names_axis(op, over.name):
        made = g.append_node(op, inputs, node.name if op.is_source else "").outputs
        return made, [False] * len(made)
    if op.has_effect:
        raise UnsupportedError(
            "a write to a state in a batch", where=op.name, got=str(op), origin=node.origin,
            expected="an update that is the same for all elements",
            hint="make the state an argument and a result of the function",
        )  # fmt: skip
    found = (
        _by_rule(op, g, inputs, mapped, over)
        or _by_decomposition(op, g, inputs, mapped, over)
        or _by_loop(op, g, inputs, mapped, over)
    )
    _require_fit(node, found, over)
    return found


def _by_rule(op: Op, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Found | None:
    trait = "elementwise" if op.is_elementwise else "reduction" if op.is_reduction else ""
    rule = RULES.get(op.name) or RULES.get(trait)
    return None if rule is None else rule(op, g, inputs, mapped, over)


def _by_decomposition(
    op: Op, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis
) -> Found | None:
    if not op.has_decomposition():
        return None
    shapes = [element(x, m) for x, m in zip(inputs, mapped, strict=True)]
    body = decomposed(op, tuple(shapes))
    return None if body is None else run(g, body, inputs, mapped, over)


def _by_loop(op: Op, g: Graph, inputs: Values, mapped: Flags, over: MappedAxis) -> Found:
    """A scan over the batch: right for every op, one element after the other."""
    body = Graph(f"{op.name} of one")
    order = sorted(range(len(inputs)), key=lambda i: not mapped[i])  # scanned operands come first
    placed = {i: body.input(f"x{i}", element(inputs[i], mapped[i])) for i in order}
    outputs = body.append_node(op, [placed[i] for i in range(len(inputs))]).outputs
    loop = lookup("scan")(
        body=Body(body.set_outputs(list(outputs))), n_carry=0, n_xs=sum(mapped), length=over.size
    )
    made = g.append_node(loop, [inputs[i] for i in order]).outputs
    return made, [True] * len(made)


def _require_fit(node: Node, found: Found, over: MappedAxis) -> None:
    """Raise for a rule that gives another shape than the op has, with the batch in front."""
    made, flags = found
    for had, value, is_mapped in zip(node.outputs, made, flags, strict=True):
        need = widened(had.shape, is_mapped, over)
        if value.shape.dtype is not need.dtype or not value.shape.same_dims(need):
            raise VerifyError(
                "a batching rule gives another shape", where=node.op.name, got=value.shape,
                expected=need, origin=node.origin,
            )  # fmt: skip


def names_axis(op: Op, name: str | None) -> bool:
    """Whether a collective over the axis `name` is in the op, which is mapped then even if no
    operand is."""
    if name is None:
        return False
    if getattr(op, "axis_name", None) == name:
        return True
    bodies = [v for v in op.attributes().values() if isinstance(v, Body)]
    return any(names_axis(node.op, name) for body in bodies for node in body.graph.nodes)


# -- bodies -----------------------------------------------------------------------------------


def batched_body(
    graph: Graph, mapped: Flags, over: MappedAxis, least: Flags = ()
) -> tuple[Graph, list[bool]]:
    """The body of control flow for a batch, and which of its results are mapped: at least those
    that `least` says."""
    made = Graph(graph.name)
    sources = graph.sources("input")
    operands = [
        made.input(n.name, widened(n.output.shape, m, over))
        for n, m in zip(sources, mapped, strict=True)
    ]
    outputs, flags = run(made, graph, operands, mapped, over)
    return with_mapped_results(made.set_outputs(outputs), flags, least or flags, over)


def with_mapped_results(
    body: Graph, flags: Flags, least: Flags, over: MappedAxis
) -> tuple[Graph, list[bool]]:
    """`body` with those results mapped too that `least` says."""
    joined = [a or b for a, b in zip(flags, least, strict=True)]
    same_as_before = [not b or a for a, b in zip(flags, joined, strict=True)]
    outputs = spread_all(body, body.outputs, same_as_before, over)
    # a result that is an input would be a view of it
    outputs = [body.contiguous(v) if v.node.op.is_source else v for v in outputs]
    return body.set_outputs(outputs), joined
