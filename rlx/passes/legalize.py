"""Legalisation: an op without a native kernel on the backend becomes its decomposition."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from rlx.errors import UnsupportedError
from rlx.ir.attrs import Body
from rlx.ir.graph import Graph
from rlx.ir.node import Node
from rlx.ir.op import Op
from rlx.passes.report import DispatchReport
from rlx.passes.rewrite import GONE, Editor

HasNative = Callable[[Node], bool]
# op, has_native, has_common -> native, common or unsupported
Choose = Callable[[str, bool, bool], str]
NO_WAY = "no native kernel and no decomposition"


def prefer_native(op: str, has_native: bool, has_common: bool) -> str:
    return "native" if has_native else "common" if has_common else "unsupported"


def legalize(
    graph: Graph,
    supported: HasNative | Container[str],
    choose: Choose = prefer_native,
    report: DispatchReport | None = None,
) -> Graph:
    """Rewrite `graph`, subgraphs included, to ops that the backend runs.

    `supported` is a set of op names or a predicate on nodes. Raises UnsupportedError, with the
    report, when an op has neither a kernel nor a decomposition.
    """
    native = supported if callable(supported) else _in_set(supported)
    report = DispatchReport() if report is None else report
    legal = _Legalizer(native, choose, report).run(graph)
    if report.unsupported:
        raise _unsupported(report)
    report.count_native(legal)
    return legal


def _in_set(ops: Container[str]) -> HasNative:
    return lambda node: node.op.name in ops


def _unsupported(report: DispatchReport) -> UnsupportedError:
    ops = ", ".join(dict.fromkeys(r.op for r in report.unsupported))
    hint = "allow decompositions (RLX_KERNEL_DISPATCH, force_native_kinds), or change device"
    if any(r.why == NO_WAY for r in report.unsupported):
        hint = "give the op a decomposition (docs/adding-an-op.md), or change device"
    error = UnsupportedError(
        "ops that the device cannot run", where="legalize", got=ops,
        origin=report.origins[report.unsupported[0].op], excerpt=str(report), hint=hint,
    )  # fmt: skip
    error.report = report  # type: ignore[attr-defined]
    return error


def inline_calls(graph: Graph) -> Graph:
    """Replace ops that stand for a part of the graph, such as `checkpoint`, by that part."""
    if not any(node.op.is_inlined for node in graph.nodes):
        return graph
    editor = Editor(graph, "inline")
    todo = list(reversed(graph.nodes))
    while todo:
        node = todo.pop()
        if node.op.is_inlined and node.id != GONE:
            todo.extend(reversed(_expand(editor, node) or []))
    return editor.finish()


class _Legalizer:
    def __init__(self, native: HasNative, choose: Choose, report: DispatchReport) -> None:
        self.native, self.choose, self.report = native, choose, report
        self.bodies: dict[Body, Body] = {}

    def run(self, graph: Graph) -> Graph:
        editor = Editor(graph, "legalize")
        todo = list(reversed(graph.nodes))
        while todo:
            node = todo.pop()
            if node.op.is_source or node.id == GONE:
                continue
            new = self._visit(editor, node)
            todo.extend(reversed(new))
        return editor.finish()

    def _visit(self, editor: Editor, node: Node) -> list[Node]:
        """Legalise one node; returns the nodes of its decomposition, to be legalised in turn."""
        name, origin = node.op.name, node.origin
        has_native = node.op.runs_in_prepare or self.native(node)
        has_common = node.op.has_decomposition()
        choice = self.choose(name, has_native, has_common)
        if choice == "common":
            new = _expand(editor, node)
            if new is not None:
                why = "chosen by the dispatch policy" if has_native else "no native kernel"
                self.report.add(name, "common" if has_native else "rewritten", why, origin)
                return new
            has_common = False
            choice = self.choose(name, has_native, False)
        if choice == "native" and has_native:
            if name != "elementwise_region":
                node.op = self._with_legal_bodies(node.op)
        else:
            why = _why_not(choice, has_native, has_common)
            self.report.add(name, "unsupported", why, origin)
        return []

    def _with_legal_bodies(self, op: Op) -> Op:
        changes: dict[str, Any] = {}
        for field in op.fields:
            body = getattr(op, field)
            if isinstance(body, Body):
                if body not in self.bodies:
                    legal = self.run(body.graph.copy())
                    self.bodies[body] = body if legal.same_as(body.graph) else Body(legal)
                changes[field] = self.bodies[body]
        return op.replace(**changes) if changes else op


def _expand(editor: Editor, node: Node) -> list[Node] | None:
    """Replace a node by its decomposition; None where its attributes have none."""
    with editor.building(node) as new:
        result = node.op.decompose(editor.graph, *node.inputs)
    if result is None:
        editor.drop(new)
        return None
    values = result if isinstance(result, tuple) else (result,)
    for old, by in zip(node.outputs, values, strict=True):
        editor.replace(old, by)
    editor.remove_dead(node)
    return new


def _why_not(choice: str, has_native: bool, has_common: bool) -> str:
    if not has_native and not has_common:
        return NO_WAY
    missing = "native kernel" if not has_native else "decomposition"
    return f"the dispatch policy asks for a {missing}, which does not exist"
