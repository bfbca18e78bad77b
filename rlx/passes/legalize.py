"""Rewrites a graph for a backend: an op without a kernel becomes its decomposition."""

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
Choose = Callable[[str, bool, bool], str]  # kind, has_native, has_common -> native | common | …
NO_WAY = "no native kernel and no decomposition"


def prefer_native(kind: str, has_native: bool, has_common: bool) -> str:
    return "native" if has_native else "common" if has_common else "unsupported"


def legalize(
    graph: Graph,
    supported: HasNative | Container[str],
    choose: Choose = prefer_native,
    report: DispatchReport | None = None,
) -> Graph:
    """`graph` in ops the backend runs; UnsupportedError, with the report, when that cannot be.

    `supported` is a set of op kinds, or a function of the node. Nested graphs are rewritten too.
    """
    native = supported if callable(supported) else _in_set(supported)
    report = DispatchReport() if report is None else report
    legal = _Legalizer(native, choose, report).run(graph)
    if report.unsupported:
        raise _unsupported(report)
    report.count_native(legal)
    return legal


def _in_set(kinds: Container[str]) -> HasNative:
    return lambda node: node.op.name in kinds


def _unsupported(report: DispatchReport) -> UnsupportedError:
    kinds = ", ".join(dict.fromkeys(r.kind for r in report.unsupported))
    hint = "allow decompositions (RLX_KERNEL_DISPATCH, force_native_kinds), or change device"
    if any(r.why == NO_WAY for r in report.unsupported):
        hint = "give the op a decomposition (docs/adding-an-op.md), or change device"
    error = UnsupportedError(
        "ops that the device cannot run", where="legalize", got=kinds,
        origin=report.places[report.unsupported[0].kind], excerpt=str(report),
        hint=hint,
    )  # fmt: skip
    error.report = report  # type: ignore[attr-defined]
    return error


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
        """Legalise one node; gives the nodes of its decomposition, which are still to be done."""
        kind, origin = node.op.name, node.origin
        has_native, has_common = self.native(node), node.op.has_decomposition()
        choice = self.choose(kind, has_native, has_common)
        if choice == "common":
            new = _expand(editor, node)
            if new is not None:
                why = "chosen by the dispatch policy" if has_native else "no native kernel"
                self.report.add(kind, "common" if has_native else "rewritten", why, origin)
                return new
            has_common = False
            choice = self.choose(kind, has_native, False)
        if choice == "native" and has_native:
            if kind != "elementwise_region":
                node.op = self._with_legal_bodies(node.op)
        else:
            why = _why_not(choice, has_native, has_common)
            self.report.add(kind, "unsupported", why, origin)
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
    """Put the decomposition in the place of a node; None where its attributes have none."""
    result, new = editor.build(node, lambda: node.op.decompose(editor.graph, *node.inputs))
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
    return f"the dispatch policy asks for a {missing}, which there is not"
