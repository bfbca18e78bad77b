"""HIR to MIR, the first pass: every block becomes the ops of its lowering."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.lowering import FusionPolicy, lower


def lower_hir(graph: Graph, policy: FusionPolicy | str = FusionPolicy.DIRECT) -> Graph:
    """`graph` without blocks: fused ops under DIRECT, primitives for `fuse` under FUSABLE."""
    return lower(graph, FusionPolicy.of(policy))
