"""A GPU as a device: kernels of loop nests, launched in order on one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.base import Backend
from rlx.backends.cuda import lower_loops, lower_scatter, lower_top_k  # noqa: F401  (the table)
from rlx.backends.cuda.driver import Gpu, version_text
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.fuse_rows import fuse_rows
from rlx.backends.cuda.kernel import KernelLoader
from rlx.backends.cuda.kernels.attention import lower_attention, lower_paged  # noqa: F401
from rlx.backends.cuda.kernels.gemm import row_norm  # noqa: F401
from rlx.backends.cuda.kernels.gemm.lower_gemm import lay_out_weights
from rlx.backends.cuda.kernels.gemm.plan import HOPPER
from rlx.backends.cuda.kernels.qgemm.lower_qgemm import lay_out_packed
from rlx.backends.cuda.kernels.rotary import lower_rotary, pack_rows  # noqa: F401
from rlx.backends.cuda.kernels.sampling import lower_sampling  # noqa: F401
from rlx.backends.cuda.lowering import TABLE, Layouts, runs_on_host
from rlx.backends.cuda.memory import CudaAllocator
from rlx.backends.cuda.round_rows import round_rows
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.passes.plan import require_scratch
from rlx.passes.views import insert_contiguous
from rlx.specialize.options import CompileOptions

if TYPE_CHECKING:
    from rlx.backends.cuda.inspection import CudaInspection


class CudaBackend(Backend):
    name = "cuda"

    def __init__(self, gpu: Gpu, kernels: KernelLoader | None = None) -> None:
        self.gpu, self.memory = gpu, CudaAllocator(gpu)
        self.kernels = kernels or KernelLoader(gpu)

    @property
    def allocator(self) -> CudaAllocator:
        return self.memory

    def has_native(self, node: Node) -> bool:
        return node.op.is_view or TABLE.find(node) is not None or runs_on_host(node)

    def runs_on_host(self, node: Node) -> bool:
        return runs_on_host(node)

    def rewrite_template(self, graph: Graph) -> Graph:
        return lay_out_weights(lay_out_packed(graph))

    def rewrite_variant(self, graph: Graph) -> Graph:
        graph = fuse_rows(graph)
        if self.kernels.target.cpu == HOPPER:
            graph = round_rows(graph)
        layouts = Layouts.of(graph)
        return insert_contiguous(graph, lambda node: TABLE.reads_strided(node, layouts))

    def scratch(self, node: Node) -> int:
        return TABLE.scratch(node)

    def compile(self, lir: Lir, options: CompileOptions) -> CudaExecutable:
        require_scratch(lir, self.scratch)
        return CudaExecutable(lir, self.memory, self.kernels)

    @property
    def target_key(self) -> str:
        return f"{self.kernels.target.key};{version_text()}"

    @property
    def compile_count(self) -> int:
        return self.kernels.compilations

    def inspection(self) -> CudaInspection:
        from rlx.backends.cuda.inspection import CudaInspection

        return CudaInspection(self)
