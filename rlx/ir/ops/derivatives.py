"""Ops that say how a function is differentiated; when they run they are the function itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.errors import AttributeValueError
from rlx.ir.attrs import Body
from rlx.ir.op import Array, Op, op
from rlx.ir.ops.control import body_program, body_results
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


@op("stop_gradient", has_zero_derivative=True, is_inlined=True)
class StopGradient(Op):
    """x, with a derivative of zero."""

    def infer(self, x: Shape) -> Shape:
        return x

    def reference(self, x: Array) -> Array:
        return x

    def decompose(self, g: Graph, x: Value) -> Any:
        return x


@op("optimization_barrier")
class OptimizationBarrier(Op):
    """The operands. None of the results is ready before all operands are, and passes see neither
    through it nor equal values on its two sides."""

    def infer(self, *xs: Shape) -> tuple[Shape, ...]:
        return xs

    def reference(self, *xs: Array) -> tuple[Array, ...]:
        return xs

    def decompose(self, g: Graph, *xs: Value) -> Any:
        return xs


class _Call(Op):
    """The results of a subgraph on the operands; inlined before other passes see the graph."""

    is_inlined = True
    body: Body

    def infer(self, *operands: Shape) -> tuple[Shape, ...]:
        return body_results(self.body, operands, "body")

    def reference(self, *operands: Array) -> Any:
        return tuple(body_program(self.body).call(*operands))

    def decompose(self, g: Graph, *operands: Value) -> Any:
        return tuple(inline(g, self.body.graph, operands))


@op("checkpoint")
class Checkpoint(_Call):
    """The body, computed again in the backward part instead of keeping its values.

    `policy` says which values are kept all the same: "nothing", or "matmuls" (results of ops that
    carry the work, such as matmul, conv and attention).
    """

    body: Body
    policy: str = "nothing"

    def check(self) -> None:
        if self.policy not in ("nothing", "matmuls"):
            raise AttributeValueError(
                "unknown policy", where="checkpoint.policy", got=self.policy,
                expected="nothing, matmuls",
            )  # fmt: skip


@op("custom_jvp")
class CustomJvp(_Call):
    """The body, with `rule(operands…, tangents…)` giving the tangents of the results."""

    body: Body
    rule: Body


@op("custom_vjp")
class CustomVjp(_Call):
    """The body, with a rule of its own for the backward part.

    `forward(operands…)` gives the results and residuals; `backward(residuals…, cotangents…)` gives
    the cotangents of the operands that are floats, in order.
    """

    body: Body
    forward: Body
    backward: Body


def inline(g: Graph, graph: Graph, operands: Any) -> list[Value]:
    """The nodes of `graph` appended to `g`, its inputs being `operands`; returns its outputs."""
    values: dict[Value, Value] = {}
    given = iter(operands)
    for node in graph.nodes:
        if node.op.name == "input":
            values[node.output] = next(given)
            continue
        made = g.append_node(node.op, [values[v] for v in node.inputs])
        values.update(zip(node.outputs, made.outputs, strict=True))
    return [values[v] for v in graph.outputs]
