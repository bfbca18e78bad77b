"""Nodes and values: an op applied to operands, and its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from rlx.errors import ShapeError
from rlx.ir.dtype import DType
from rlx.ir.op import Op
from rlx.ir.operators import Operators
from rlx.ir.origin import Origin
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph

Operand: TypeAlias = Any  # a Value, or a number or array that becomes a constant


class Value(Operators):
    """One result of a node: what builders return and nodes take.

    Every op and block is a method with the value as its first tensor, `x.softmax(axis=-1)`;
    operators, `==` among them, build elementwise ops. Compare values with `is`.
    """

    __slots__ = ("index", "node", "shape")

    def __init__(self, node: Node, index: int, shape: Shape) -> None:
        self.node, self.index, self.shape = node, index, shape

    @property
    def graph(self) -> Graph:
        return self.node.graph

    @property
    def dtype(self) -> DType:
        return self.shape.dtype

    @property
    def name(self) -> str:
        """The user's name for it, or one made of the node's id."""
        return self.node.name if self.index == 0 and self.node.name else f"{self}"

    def __str__(self) -> str:
        return (
            f"%{self.node.id}" if len(self.node.outputs) == 1 else f"%{self.node.id}.{self.index}"
        )

    def __repr__(self) -> str:
        return f"{self}: {self.shape}"


class Node:
    """An op applied to values."""

    __slots__ = ("graph", "id", "inputs", "name", "op", "origin", "outputs")

    outputs: tuple[Value, ...]

    def __init__(
        self, graph: Graph, id: int, op: Op, inputs: tuple[Value, ...], name: str, origin: Origin
    ) -> None:
        self.graph, self.id, self.op, self.inputs = graph, id, op, inputs
        self.name, self.origin = name, origin

    @property
    def output(self) -> Value:
        return self.outputs[0]

    @property
    def kind(self) -> str:
        return self.op.name

    def __repr__(self) -> str:
        args = ", ".join(map(str, self.inputs))
        return f"%{self.id} = {self.op}({args})"


def infer(op: Op, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Result shapes of `op` on operands of `shapes`; each record remembers, for layers repeat."""
    memo = op.__dict__.get("_inferred")
    if memo is None:
        memo = op.__dict__["_inferred"] = {}
    found: tuple[Shape, ...] | None = memo.get(shapes)
    if found is None:
        most = len(shapes) if op.variadic else op.num_required + op.num_optional
        if not op.num_required <= len(shapes) <= most:
            raise ShapeError("wrong number of operands", got=len(shapes), expected=_arity(op))
        result = op.infer(*shapes)
        found = memo[shapes] = result if isinstance(result, tuple) else (result,)
    return found


def _arity(op: Op) -> str:
    if op.variadic:
        return f"at least {op.num_required}"
    if op.num_optional:
        return f"{op.num_required} to {op.num_required + op.num_optional}"
    return str(op.num_required)
