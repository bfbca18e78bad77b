"""Nodes, values and origins: an op applied to operands, its results, and where it came from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from rlx.errors import ShapeError
from rlx.ir.dtype import DType
from rlx.ir.op import Op
from rlx.ir.operators import Operators
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Origin(NamedTuple):
    block: str = ""
    file: str = ""
    line: int = 0
    passes: tuple[str, ...] = ()

    def touched(self, pass_name: str) -> Origin:
        """The same origin, with one more pass in its history."""
        if self.passes and self.passes[-1] == pass_name:
            return self
        return self._replace(passes=(*self.passes, pass_name))

    def inside(self, block: str) -> Origin:
        """The same origin, `block` around it."""
        return self._replace(block=f"{block}.{self.block}" if self.block else block)

    def __str__(self) -> str:
        parts = []
        if self.block:
            parts.append(f"block {self.block}")
        if self.file:
            parts.append(f"{os.path.basename(self.file)}:{self.line}")
        if self.passes:
            parts.append(f"via {' > '.join(self.passes)}")
        return ", ".join(parts)


UNKNOWN = Origin()


_origins: dict[tuple[str, str, int], Origin] = {}


def caller(block: str, depth: int = 3) -> Origin:
    """The source line of the user that built a node: the nearest frame outside the package.

    The innermost `depth` frames are known to be inside.
    """
    frame = sys._getframe(depth)
    while frame.f_code.co_filename.startswith(_PACKAGE):
        outer = frame.f_back
        if outer is None:
            break
        frame = outer
    key = (block, frame.f_code.co_filename, frame.f_lineno)
    found = _origins.get(key)
    if found is None:
        found = _origins[key] = Origin(*key)
    return found


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
        """The name of the op."""
        return self.op.name

    def __repr__(self) -> str:
        args = ", ".join(map(str, self.inputs))
        return f"%{self.id} = {self.op}({args})"


def infer(op: Op, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Result shapes of `op` on operands of `shapes`, cached per op: layers repeat."""
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


def symbols_of_node(node: Node) -> frozenset[str]:
    """Every symbol in the shapes, attributes and nested graphs of a node."""
    op = node.op
    found = op.symbols if op.fields and op.has_symbols else frozenset[str]()
    for v in node.outputs:
        found = found | v.shape.symbols if found else v.shape.symbols
    return found


def symbols_of(nodes: Sequence[Node]) -> frozenset[str]:
    """Every symbol in the shapes, attributes and nested graphs of some nodes."""
    found: set[str] = set()
    for shape in {v.shape for node in nodes for v in node.outputs}:
        if not shape.is_static:
            found |= shape.symbols
    for op in {id(node.op): node.op for node in nodes}.values():
        if op.fields and op.has_symbols:
            found |= op.symbols
    return frozenset(found)
