"""The CPU as a device: native kernels in one program, run by workers in lock step."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.base import Backend
from rlx.backends.cpu import families
from rlx.backends.cpu.assemble import assemble
from rlx.backends.cpu.copies import insert_copies
from rlx.backends.cpu.cores import usable_cores, worker_count
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.lowering import TABLE, scratch_of
from rlx.backends.cpu.pool import get_pool
from rlx.backends.cpu.prepare import prepare_params
from rlx.codegen.target import Target
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.ir.op import Array
from rlx.specialize.options import CompileOptions


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self, target: Target | None = None) -> None:
        self.target = target or Target.host()

    def has_native(self, node: Node) -> bool:
        if node.op.is_view:
            return True
        entry = TABLE.get(node.op.name)
        return entry is not None and (entry.when is None or entry.when(node))

    def lower(self, graph: Graph) -> Graph:
        for rewrite in families.REWRITES:
            graph = rewrite(graph, self.target)
        return graph

    def lower_bound(self, graph: Graph) -> Graph:
        return insert_copies(graph)

    def scratch(self, node: Node) -> int:
        # for as many workers as a compilation can ask for; what is not touched costs nothing
        return scratch_of(node, self.target, usable_cores())

    def prepare(self, graph: Graph, params: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(graph.output_names, prepare_params(graph, params), strict=True))

    def compile(self, lir: Lir, options: CompileOptions) -> CpuExecutable:
        threads = worker_count(options.threads)
        return CpuExecutable(assemble(lir, self.target, threads), get_pool(threads))


def make_backend() -> Backend:
    return CpuBackend()
