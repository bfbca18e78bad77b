"""Prepacking: param-only work is split off into a prepare graph that runs once.

The main graph takes the outputs of the prepare graph as params named `prepared.<op>.<digest>`. The
digest is that of the subexpression, so that all variants of a model share the same tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from rlx.ir.attrs import Body, Data
from rlx.ir.graph import Graph
from rlx.ir.node import Node, Value
from rlx.ir.op import Op
from rlx.passes.rewrite import Editor, param_only_nodes, size_of
from rlx.passes.simplify import dce

PREFIX = "prepared."

# A prepared tensor may be larger than its params, but not by much: memory is scarce.
MOST_GROWTH = 4
ALWAYS_SMALL = 1 << 20
# Tables without params (positions, transforms) would be computed in every run, and are few.
MOST_TABLE = 1 << 26


def split_prepare(
    graph: Graph, has_native: Callable[[Node], bool] | None = None
) -> tuple[Graph, Graph]:
    """Split `graph` into the main graph and the graph of its param-only work; where `has_native` is
    given, work that the device has kernels for stays in the main graph."""
    param_only = param_only_nodes(graph.nodes)
    wanted = _boundary(graph, param_only)
    if has_native is not None:
        wanted = [v for v in wanted if not all(map(has_native, _work(v)))]
    prepared = Graph(f"{graph.name}.prepare")
    if not wanted:
        return graph, prepared
    names = _Names()
    copies = _copy_cone(prepared, wanted)
    used = {v.node for v in copies}
    editor = Editor(graph, "prepare")
    results: dict[str, Value] = {}
    params: dict[str, Value] = {}
    for value in wanted:
        name = names.of(value)
        if name not in params:
            results[name] = copies[value]
            with editor.building(value.node):
                params[name] = graph.param(name, value.shape)
        editor.replace(value, params[name])
    prepared.set_outputs(results)
    main = dce(editor.finish())
    _drop_moved_params(main, used)
    return main, prepared


def _boundary(graph: Graph, param_only: set[Node]) -> list[Value]:
    """Param-only values that the rest of the graph reads and that are worth storing."""
    asked: dict[Value, None] = {}
    for node in graph.nodes:
        if node not in param_only:
            asked.update(dict.fromkeys(v for v in node.inputs if v.node in param_only))
    asked.update(dict.fromkeys(v for v in graph.outputs if v.node in param_only))
    found: dict[Value, None] = {}
    todo = list(asked)
    seen: set[Value] = set(todo)
    while todo:
        value = todo.pop(0)
        if value.node.op.is_source:
            continue
        if not value.node.op.is_view and _is_worth(value):
            found[value] = None
            continue
        # views are free in the main graph, and ops that enlarge their operands stay there too;
        # their operands may still be prepared
        for v in value.node.inputs:
            if v not in seen:
                seen.add(v)
                todo.append(v)
    return list(found)


def _is_worth(value: Value) -> bool:
    if value.node.op.runs_in_prepare:
        return True  # kernels read nothing else, whatever its size
    sources = _sources(value.node)
    if not any(v.node.op.name == "param" for v in sources):
        return size_of(value) <= MOST_TABLE
    given = sum(map(size_of, sources))
    return size_of(value) <= max(MOST_GROWTH * given, ALWAYS_SMALL)


def _sources(node: Node) -> list[Value]:
    seen, todo, found = {node}, [node], []
    while todo:
        for v in todo.pop().inputs:
            if v.node not in seen:
                seen.add(v.node)
                todo.append(v.node)
                if v.node.op.is_source:
                    found.append(v)
    return found


def _cone(wanted: Iterable[Value]) -> set[Node]:
    """The nodes of these values and everything they depend on."""
    needed: set[Node] = set()
    todo = [v.node for v in wanted]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(v.node for v in node.inputs)
    return needed


def _work(value: Value) -> list[Node]:
    return [n for n in _cone([value]) if not n.op.is_source]


def _copy_cone(target: Graph, wanted: Iterable[Value]) -> dict[Value, Value]:
    """Copy `wanted` and everything they depend on into `target`."""
    copies: dict[Value, Value] = {}
    for node in sorted(_cone(wanted), key=lambda n: n.id):
        with target.origin(node.origin.touched("prepare")):
            new = target.append_node(node.op, [copies[v] for v in node.inputs], node.name)
        copies.update(zip(node.outputs, new.outputs, strict=True))
    return copies


def _drop_moved_params(main: Graph, moved: set[Node]) -> None:
    """Remove params from the main graph that only the prepare graph reads."""
    read = {v.node for n in main.nodes for v in n.inputs}
    read.update(v.node for v in main.outputs)
    gone = {n for n in moved if n.op.name == "param" and n not in read}
    if gone:
        main.nodes = [n for n in main.nodes if n not in gone]
        for node in gone:
            del main._sources[node.name]
        for i, node in enumerate(main.nodes):
            node.id = i


def merge_prepared(graphs: Iterable[Graph]) -> Graph | None:
    """One prepare graph for all of these; equal outputs have equal names."""
    merged: Graph | None = None
    results: dict[str, Value] = {}
    for graph in graphs:
        merged = merged or Graph(graph.name)
        values: dict[Value, Value] = {}
        for node in graph.nodes:
            known = merged._sources.get(node.name) if node.op.is_source and node.name else None
            if known is None:
                with merged.origin(node.origin):
                    known = merged.append_node(node.op, [values[v] for v in node.inputs], node.name)
            values.update(zip(node.outputs, known.outputs, strict=True))
        named = zip(graph.output_names, graph.outputs, strict=True)
        results.update({name: values[v] for name, v in named})
    if merged is not None:
        merged.set_outputs(results)
    return merged


# -- names ------------------------------------------------------------------------------------


class _Names:
    """Content-addressed names of prepared tensors: the same in every process and variant."""

    def __init__(self) -> None:
        self.digests: dict[Node, str] = {}

    def of(self, value: Value) -> str:
        return f"{PREFIX}{value.node.op.name}.{self._value(value)[:16]}"

    def _value(self, value: Value) -> str:
        return _digest("value", self._node(value.node), str(value.index))

    def _node(self, node: Node) -> str:
        todo = [node]
        while todo:
            top = todo[-1]
            missing = [v.node for v in top.inputs if v.node not in self.digests]
            if missing:
                todo.extend(missing)
                continue
            if top not in self.digests:
                self.digests[top] = self._digest(top)
            todo.pop()
        return self.digests[node]

    def _digest(self, node: Node) -> str:
        name = node.name if node.op.name == "param" else ""
        operands = [f"{self.digests[v.node]}:{v.index}" for v in node.inputs]
        return _digest("node", canonical(node.op), name, *operands)


def _digest(*parts: str) -> str:
    encoded = "".join(f"{len(p)}:{p}" for p in parts)
    return hashlib.sha256(encoded.encode()).hexdigest()


def canonical(value: object) -> str:
    """Canonical text of an attribute: equal text means equal attributes."""
    if isinstance(value, Op):
        fields = [f"{f}={canonical(getattr(value, f))}" for f in value.fields]
        return f"{value.name}({','.join(fields)})"
    if isinstance(value, Data):
        return f"{value.shape}{hashlib.sha256(value.array.tobytes()).hexdigest()}"
    if isinstance(value, Body):
        return _canonical_graph(value.graph)
    if isinstance(value, tuple):
        return f"[{','.join(map(canonical, value))}]"
    return f"{type(value).__name__}:{value!s}" if not isinstance(value, float) else repr(value)


def _canonical_graph(graph: Graph) -> str:
    rows = [f"{canonical(n.op)}{[(v.node.id, v.index) for v in n.inputs]}" for n in graph.nodes]
    return f"{{{';'.join(rows)}}}{[(v.node.id, v.index) for v in graph.outputs]}"
