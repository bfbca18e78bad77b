"""The verifier: invariants of graphs, checked after every pass that changed one.

- ids are positions; operands are results of earlier nodes of the same graph
- result shapes are those that inference gives
- inputs, params and states have names, outputs too, each name once
- updates of a state form one chain; an older version, or a view of it, is not read after the next
  update in node order
- subgraphs obey the same rules and have no params or states

Valid graphs take one tight loop; the exact fault is determined only after one is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from rlx.errors import InputError, RlxError, VerifyError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value, infer
from rlx.ir.op import Op
from rlx.ir.shape import Shape
from rlx.ir.text.printer import bodies, node_line, write_origin

_NAMED = ("input", "param", "state")
_BODILESS = frozenset({*_NAMED, "state_update"})  # special ops without a subgraph
_MAX_DEPTH = 40
_verified: dict[int, Body] = {}  # by id; bodies are kept alive so that ids stay unique


def verify(graph: Graph, *, after: str = "") -> None:
    """Raise VerifyError, naming the pass `after`, when the graph violates an invariant."""
    _Check(graph, after, ()).run()


def require_results(graph: Graph) -> None:
    """Raise unless a run of the graph has a result: an output, or the update of a state."""
    if not graph.outputs and not any(n.op.has_effect for n in graph.nodes):
        raise InputError(
            "no outputs: nothing would be computed", where=graph.name,
            expected="an output or a state update", hint="call set_outputs(…)",
        )  # fmt: skip


class _Check:
    def __init__(self, graph: Graph, after: str, outer: tuple[str, ...]) -> None:
        self.graph, self.after, self.outer = graph, after, outer

    def run(self) -> None:
        special = self._walk()
        self._check_results()
        self._check_dynamic()
        if special:
            self._check_names(special)
            self._check_bodies(special)
            if any(n.op.name == "state_update" for n in special):
                self._check_states()

    def _walk(self) -> list[Node]:
        """Check structure and shapes of every node; returns those with more to check."""
        graph = self.graph
        defined: set[Value] = set()
        define, special = defined.add, list[Node]()
        for position, node in enumerate(graph.nodes):
            op = node.op
            shapes = []
            for v in node.inputs:
                if v not in defined:
                    self._explain_operand(node, v)
                shapes.append(v.shape)
            try:
                found = op._inferred[tuple(shapes)]  # type: ignore[attr-defined]
            except (AttributeError, KeyError):
                found = self._infer(node, tuple(shapes))
            outputs = node.outputs
            if len(outputs) == 1 == len(found):
                v = outputs[0]
                define(v)
                if v.shape is not found[0] or v.node is not node or v.index:
                    self._check_outputs(node, found)
            else:
                defined.update(outputs)
                self._check_outputs(node, found)
            if node.id != position or node.graph is not graph:
                self._explain_position(node, position)
            if _SPECIAL[type(op)]:
                special.append(node)
        self.defined = defined
        return special

    def _infer(self, node: Node, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        try:
            return infer(node.op, shapes)
        except RlxError as e:
            self.fail(e.what, node, got=e.got, expected=e.expected, cause=e)

    def _check_outputs(self, node: Node, found: tuple[Shape, ...]) -> None:
        """Compare result shapes with inferred ones, up to provably equal dims."""
        outputs = node.outputs
        if len(outputs) != len(found):
            self.fail("wrong number of results", node, got=len(outputs), expected=len(found))
        for i, (v, shape) in enumerate(zip(outputs, found, strict=True)):
            if v.node is not node or v.index != i:
                self.fail("a result that is not its node's own", node, got=f"result {i}: {v!r}")
            if v.shape.dtype is not shape.dtype or not v.shape.same_dims(shape):
                what = "the shape of a result is not the inferred one"
                self.fail(what, node, got=v.shape, expected=shape)

    def _explain_operand(self, node: Node, value: Value) -> NoReturn:
        source, nodes = value.node, self.graph.nodes
        if source.graph is not self.graph:
            other = f"{value} of graph {source.graph.name}"
            self.fail("an operand of another graph", node, got=other)
        if not any(n is source for n in nodes):
            self.fail("an operand whose node is not in the graph", node, got=repr(source))
        if not any(v is value for v in source.outputs):
            self.fail("an operand that is no result of its node", node, got=repr(source))
        self.fail("an operand used before it is defined", node, got=repr(source))

    def _explain_position(self, node: Node, position: int) -> NoReturn:
        if node.graph is not self.graph:
            self.fail("a node of another graph", node, got=node.graph.name)
        self.fail("an id that is not the position", node, got=node.id, expected=position)

    # -- names, results, bounds ---------------------------------------------------------------

    def _check_results(self) -> None:
        graph = self.graph
        names = graph.output_names
        if len(names) != len(graph.outputs):
            what = "output names and outputs differ in number"
            self.fail(what, None, got=len(names), expected=len(graph.outputs))
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            self.fail("two outputs of one name", None, got=", ".join(twice))
        for v, name in zip(graph.outputs, names, strict=True):
            if v not in self.defined:
                self.fail(f"output {name!r} is not a value of the graph", None, got=repr(v.node))

    def _check_dynamic(self) -> None:
        for symbol, bound in self.graph.dynamic.items():
            if type(bound) is not int or bound < 1:
                self.fail(f"dynamic symbol {symbol}", None, got=bound, expected="a positive bound")

    def _check_names(self, special: list[Node]) -> None:
        seen: dict[str, Node] = {}
        for node in special:
            name = node.op.name
            if name not in _NAMED:
                continue
            if not node.name:
                self.fail(f"a nameless {name}", node)
            if node.name in seen:
                first = seen[node.name]
                got = f"{node.name!r}, also of %{first.id} {first.op.name}"
                self.fail("a source name used twice", node, got=got)
            seen[node.name] = node
            if self.outer and name != "input":
                self.fail(f"a {name} in a nested graph", node, expected="inputs only")

    def _check_bodies(self, special: list[Node]) -> None:
        for node in special:
            if node.op.name in _BODILESS:
                continue
            for body in bodies(node.op):
                if _verified.get(id(body)) is body:
                    continue
                if len(self.outer) >= _MAX_DEPTH:
                    self.fail("graphs nested too deep", node, expected=f"at most {_MAX_DEPTH}")
                where = f"%{node.id} {node.op.name} of {self.graph.name}"
                _Check(body.graph, self.after, (*self.outer, where)).run()
                if len(_verified) >= 4096:
                    _verified.clear()
                _verified[id(body)] = body

    # -- states -------------------------------------------------------------------------------

    def _check_states(self) -> None:
        """Follow each version of a state, and views of it, until the next update."""
        version: dict[Value, Value] = {}  # a state's value or a view of it → the version it reads
        updated: dict[Value, Node] = {}  # version → the node that overwrote it
        for node in self.graph.nodes:
            if node.op.name == "state":
                version[node.output] = node.output
            elif not version.keys().isdisjoint(node.inputs):
                self._check_reads(node, version, updated)
                if node.op.name == "state_update":
                    self._check_update(node, version)
                    updated[node.inputs[0]] = node
                    version[node.output] = node.output
                elif node.op.is_view and node.inputs[0] in version:
                    version[node.output] = version[node.inputs[0]]
            elif node.op.name == "state_update":
                self._check_update(node, version)
        for v, name in zip(self.graph.outputs, self.graph.output_names, strict=True):
            later = updated.get(version.get(v, v))
            if later is not None:
                what = f"output {name!r} is an older version of a state"
                self.fail(what, later, got=str(v), expected="the version after the last update")

    def _check_reads(
        self, node: Node, version: dict[Value, Value], updated: dict[Value, Node]
    ) -> None:
        for v in node.inputs:
            later = updated.get(version.get(v, v))
            if later is None:
                continue
            if node.op.name == "state_update" and v is node.inputs[0]:
                what = "two updates of one version of a state"
            else:
                what = "an older version of a state is read after its update"
            hint = "read the result of the update, or read the state before it"
            self.fail(what, node, got=f"{v}, overwritten by %{later.id}", hint=hint)

    def _check_update(self, node: Node, version: dict[Value, Value]) -> None:
        target = node.inputs[0]
        if version.get(target) is not target:
            self.fail(
                "an update of something that is not a state",
                node,
                got=repr(target.node),
                expected="a state, or an update of one",
            )

    # -- messages -----------------------------------------------------------------------------

    def fail(
        self,
        what: str,
        node: Node | None,
        *,
        got: object = None,
        expected: object = None,
        hint: str = "",
        cause: Exception | None = None,
    ) -> NoReturn:
        where = f"verify after {self.after}" if self.after else "verify"
        subject = f"%{node.id} {node.op.name}" if node is not None else f"graph {self.graph.name}"
        error = VerifyError(
            f"{subject}: {what}",
            where=", in ".join([where, *reversed(self.outer)]),
            got=got,
            expected=expected,
            origin=str(node.origin) if node is not None else None,
            hint=hint,
            excerpt="" if node is None else "\n".join(self._around(node)),
        )
        error.after = self.after
        raise error from cause

    def _around(self, node: Node) -> Iterator[str]:
        """The lines of about five nodes, the faulty one marked."""
        nodes = self.graph.nodes
        at = next((i for i, n in enumerate(nodes) if n is node), len(nodes) - 1)
        for n in nodes[max(0, at - 2) : at + 3]:
            line = node_line(n).split("\n")[0]
            origin = write_origin(n.origin)
            line += f"  // {origin}" if origin else ""
            mark = ">" if n is node else " "
            yield f"  {mark} {line if len(line) <= 160 else line[:159] + '…'}"


class _Special(dict[type[Op], bool]):
    """Whether ops of a class have a name, a nested graph or a state to check."""

    def __missing__(self, cls: type[Op]) -> bool:
        types = cls.annotations.values()
        holds_body = any("Body" in type_ or "object" in type_ for type_ in types)
        found = self[cls] = holds_body or cls.name in _BODILESS
        return found


_SPECIAL = _Special()
