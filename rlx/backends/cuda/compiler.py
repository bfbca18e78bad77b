"""The compiler of the device: its table of lowerings, its rewrites, programs of plans.

Artifacts load without it: importing all families of kernels takes longer than loading one.
"""

from __future__ import annotations

from rlx.backends.cuda import lower_loops, lower_scatter  # noqa: F401  (the table)
from rlx.backends.cuda.batch_invariance import asking
from rlx.backends.cuda.fuse_rows import fuse_rows
from rlx.backends.cuda.kernels.attention import lower_paged  # noqa: F401
from rlx.backends.cuda.kernels.attention.lower_attention import expand_attention
from rlx.backends.cuda.kernels.control import lower_control  # noqa: F401
from rlx.backends.cuda.kernels.conv import lower_conv  # noqa: F401
from rlx.backends.cuda.kernels.conv.conv_act import fuse_activations
from rlx.backends.cuda.kernels.experts import lower_experts  # noqa: F401
from rlx.backends.cuda.kernels.gemm import row_norm  # noqa: F401
from rlx.backends.cuda.kernels.gemm.lower_gemm import lay_out_weights
from rlx.backends.cuda.kernels.gemm.plan import HOPPER
from rlx.backends.cuda.kernels.linalg import lower_solve  # noqa: F401
from rlx.backends.cuda.kernels.qgemm import dequant_rows  # noqa: F401
from rlx.backends.cuda.kernels.qgemm.lower_qgemm import lay_out_packed
from rlx.backends.cuda.kernels.recurrent import conv_step, lower_recurrent  # noqa: F401
from rlx.backends.cuda.kernels.recurrent.lower_cells import blocks_at_once
from rlx.backends.cuda.kernels.rotary import lower_rotary, pack_rows  # noqa: F401
from rlx.backends.cuda.kernels.sampling import lower_sampling  # noqa: F401
from rlx.backends.cuda.kernels.sorting import lower_search, lower_top_k, running_sums  # noqa: F401
from rlx.backends.cuda.lower_program import LoweredProgram
from rlx.backends.cuda.lowering import TABLE, Layouts, runs_on_host
from rlx.backends.cuda.round_rows import round_rows
from rlx.ir.graph import Graph
from rlx.ir.lir import Lir
from rlx.ir.node import Node
from rlx.passes.plan import require_scratch
from rlx.passes.views import insert_contiguous


class Compiler:
    """For GPUs of one name, such as sm_90a, with so many multiprocessors."""

    def __init__(self, cpu: str, multiprocessors: int, batch_invariant: bool = False) -> None:
        self.cpu, self.multiprocessors = cpu, multiprocessors
        self.batch_invariant = batch_invariant

    def has_native(self, node: Node) -> bool:
        if blocks_at_once(node) > self.multiprocessors:
            return False
        return node.op.is_view or TABLE.find(node) is not None or runs_on_host(node)

    def runs_on_host(self, node: Node) -> bool:
        return runs_on_host(node)

    def rewrite_template(self, graph: Graph) -> Graph:
        return fuse_activations(lay_out_weights(lay_out_packed(graph)))

    def rewrite_variant(self, graph: Graph) -> Graph:
        with asking(self.batch_invariant):
            graph = fuse_rows(graph)
            if self.cpu == HOPPER:
                graph = expand_attention(graph)
                graph = round_rows(graph)
            layouts = Layouts.of(graph)
            return insert_contiguous(graph, lambda node: TABLE.reads_strided(node, layouts))

    def scratch(self, node: Node) -> int:
        with asking(self.batch_invariant):
            return TABLE.scratch(node)

    def program(self, lir: Lir) -> LoweredProgram:
        require_scratch(lir, self.scratch)
        with asking(self.batch_invariant):
            return LoweredProgram(lir, self.cpu, self.multiprocessors)
