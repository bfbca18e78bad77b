"""How HIR becomes MIR: each block is replaced by the ops its lowering builds.

A block of given attributes is lowered once per operand shapes, on a scratch graph: its template.
Every layer that repeats it is stamped from that template, node by node, without inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.errors import OptionError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value, infer
from rlx.ir.op import Op
from rlx.ir.origin import UNKNOWN, Origin
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.hir import Block


class FusionPolicy(Enum):
    """What blocks become: fused ops at once, or primitives for the passes to fuse."""

    DIRECT = "direct"
    FUSABLE = "fusable"

    @staticmethod
    def of(value: object) -> FusionPolicy:
        """The policy itself, or the one of that name."""
        try:
            return value if isinstance(value, FusionPolicy) else FusionPolicy(str(value).lower())
        except ValueError:
            known = ", ".join(p.value for p in FusionPolicy)
            raise OptionError("unknown fusion policy", got=repr(value), expected=known) from None

    def __str__(self) -> str:
        return self.value


class Template(NamedTuple):
    """A lowered block: the graph, and the stand-ins of its operands."""

    graph: Graph
    operands: tuple[Value, ...]

    @property
    def nodes(self) -> Sequence[Node]:
        return self.graph.nodes[len(self.operands) :]

    @property
    def outputs(self) -> list[Value]:
        return self.graph.outputs


_templates: dict[tuple[Any, ...], Template] = {}
_MOST_TEMPLATES = 10_000


def template(
    block: Block, shapes: tuple[Shape, ...], policy: FusionPolicy, states: tuple[bool, ...] = ()
) -> Template:
    """The lowering of `block`; `states` tells which operands are states and written in place."""
    key = (block, shapes, policy, states if any(states) else ())
    found = _templates.get(key)
    if found is None:
        if len(_templates) >= _MOST_TEMPLATES:
            _templates.clear()
        found = _templates[key] = _lowered(block, shapes, policy, states)
    return found


def _lowered(
    block: Block, shapes: tuple[Shape, ...], policy: FusionPolicy, states: tuple[bool, ...]
) -> Template:
    g = Graph(block.label)
    names = block.operand_names(len(shapes))
    with g.origin(UNKNOWN):
        operands = []
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            source = g.state if any(states[i : i + 1]) else g.input
            operands.append(source(name, shape))
        method = block.direct if policy is FusionPolicy.DIRECT else block.fusable
        results = method(g, *block.spread(operands))
    g.set_outputs(*(results if isinstance(results, tuple) else (results,)))
    if policy is FusionPolicy.DIRECT:
        _require_agreement(block, g, template(block, shapes, FusionPolicy.FUSABLE, states).graph)
    return Template(g, tuple(operands))


def _require_agreement(block: Block, direct: Graph, fusable: Graph) -> None:
    got, expected = ([v.shape for v in g.outputs] for g in (direct, fusable))
    agree = len(got) == len(expected) and all(
        a.same_dims(b) and a.dtype is b.dtype for a, b in zip(got, expected, strict=True)
    )
    if not agree:
        raise VerifyError(
            "the two lowerings of a block differ in their results", where=block.label,
            got=f"direct {got}", expected=f"fusable {expected}",
        )  # fmt: skip


def is_state(value: Value) -> bool:
    """Whether a value is the memory of a state: declared, or just written."""
    return value.node.op.name in ("state", "state_update")


def lower(graph: Graph, policy: FusionPolicy = FusionPolicy.DIRECT) -> Graph:
    """The MIR of an HIR graph, nested graphs included; names, order and outputs are kept."""
    return _Lowering(graph, policy).run()


class _Lowering:
    def __init__(self, graph: Graph, policy: FusionPolicy) -> None:
        self.graph, self.policy = graph, policy
        self.new = Graph(graph.name)
        self.values: dict[Value, Value] = {}
        self.constants: dict[Op, Value] = {}  # made by blocks; one of each is enough
        self.bodies: dict[Body, Body] = {}

    def run(self) -> Graph:
        new = self.new
        for node in self.graph.nodes:
            if node.op.is_block:
                results: Sequence[Value] = self._stamp(node)
            else:
                results = self._copy(node)
            for old, value in zip(node.outputs, results, strict=True):
                self.values[old] = value
        new.outputs = [self.values[v] for v in self.graph.outputs]
        new.output_names = list(self.graph.output_names)
        new.live = dict(self.graph.live)
        return new

    def _copy(self, node: Node) -> Sequence[Value]:
        """A node that is no block, on the lowered operands."""
        inputs = tuple([self.values[v] for v in node.inputs])
        op = self._with_lowered_bodies(node.op)
        # equal sizes may be written differently after lowering, `rows` for `batch * seq`
        results = self._add(
            op, inputs, infer(op, tuple([v.shape for v in inputs])), node.name, node.origin
        )
        if op.is_source and node.name:
            self.new._sources[node.name] = results[0].node
        return results

    def _add(
        self, op: Op, inputs: tuple[Value, ...], shapes: Sequence[Shape], name: str, origin: Origin
    ) -> tuple[Value, ...]:
        node = Node(self.new, len(self.new.nodes), op, inputs, name, origin)
        node.outputs = tuple([Value(node, i, s) for i, s in enumerate(shapes)])
        self.new.nodes.append(node)
        return node.outputs

    def _stamp(self, block_node: Node) -> list[Value]:
        """The nodes of the block's template, on the operands of the block."""
        block: Any = block_node.op
        operands = [self.values[v] for v in block_node.inputs]
        shapes = tuple([v.shape for v in operands])
        made = template(block, shapes, self.policy, tuple(map(is_state, operands)))
        origin = _inside(block_node.origin, block.label)
        values = dict(zip(made.operands, operands, strict=True))
        first = made.outputs[0]
        for node in made.nodes:
            if node.op.name == "constant":
                results: tuple[Value, ...] = (self._constant(node, origin),)
            else:
                name = block_node.name if first.node is node and first.index == 0 else ""
                inputs = tuple([values[v] for v in node.inputs])
                results = self._add(node.op, inputs, [v.shape for v in node.outputs], name, origin)
            for old, value in zip(node.outputs, results, strict=True):
                values[old] = value
        return [values[v] for v in made.outputs]

    def _constant(self, node: Node, origin: Origin) -> Value:
        found = self.constants.get(node.op)
        if found is None:
            (found,) = self._add(node.op, (), [node.output.shape], "", origin)
            self.constants[node.op] = found
        return found

    def _with_lowered_bodies(self, op: Op) -> Op:
        changes = {}
        for field in op.fields:
            body = getattr(op, field)
            if isinstance(body, Body) and self._lowered_body(body) is not body:
                changes[field] = self._lowered_body(body)
        return op.replace(**changes) if changes else op

    def _lowered_body(self, body: Body) -> Body:
        found = self.bodies.get(body)
        if found is None:
            has_blocks = any(n.op.is_block or _nests(n.op) for n in body.graph.nodes)
            found = Body(lower(body.graph, self.policy)) if has_blocks else body
            self.bodies[body] = found
        return found


def _nests(op: Op) -> bool:
    return any(isinstance(getattr(op, f), Body) for f in op.fields)


def _inside(origin: Origin, block: str) -> Origin:
    """The origin of what a block became: one level below the block's own."""
    path = f"{origin.block}.{block}" if origin.block else block
    return origin._replace(block=path).touched("lower_hir")
