"""The part of the CPU device that makes code; a program from disk runs without importing it."""

from __future__ import annotations

from rlx.backends.cpu import families
from rlx.backends.cpu.assemble import Listed, list_program
from rlx.backends.cpu.copies import insert_copies
from rlx.backends.cpu.lowering import TABLE, scratch_of
from rlx.codegen.target import Target
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node


class Compiler:
    """Lowers and lists programs for one target."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def has_native(self, node: Node) -> bool:
        if node.op.is_view:
            return True
        entry = TABLE.get(node.op.name)
        return entry is not None and (entry.when is None or entry.when(node))

    def rewrite_template(self, graph: Graph) -> Graph:
        for rewrite in families.REWRITES:
            graph = rewrite(graph, self.target)
        return graph

    def rewrite_variant(self, graph: Graph) -> Graph:
        return insert_copies(graph)

    def scratch(self, node: Node, workers: int) -> int:
        return scratch_of(node, self.target, workers)

    def list_program(self, lir: Lir, workers: int) -> Listed:
        return list_program(lir, self.target, workers)
