"""Registers all kernels: importing every module of this package fills the table of lowerings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import walk_packages

import rlx.backends.cpu.kernels as families
from rlx.backends.cpu.kernels.conv.choose_int8 import INT8_OPS, decompose_unsuited
from rlx.backends.cpu.kernels.conv.choose_layout import choose_layout
from rlx.backends.cpu.kernels.conv.lower_conv import CONVOLUTIONS, pack_conv
from rlx.backends.cpu.kernels.gemm.pack_weights import MATMULS, pack_weights
from rlx.backends.cpu.kernels.loops.byte_lookup import tabulate
from rlx.backends.cpu.kernels.qgemm.pack_quantised import QUANTISED, pack_quantised
from rlx.backends.cpu.kernels.recurrent.lower_cells import CELLS, block_weights
from rlx.ir.graph import Graph
from rlx.llvm.target import Target

for _module in walk_packages(families.__path__, f"{families.__name__}."):
    import_module(_module.name)

Rewrite = tuple[frozenset[str], Callable[[Graph, Target], Graph]]

# Layouts of values are chosen before elementwise regions are made. Each rewrite is for graphs that
# have one of these ops.
LAYOUTS: list[Rewrite] = [
    (INT8_OPS, decompose_unsuited),
    (INT8_OPS | {"conv"}, choose_layout),
    (frozenset(["round"]), tabulate),
]

# Rewrites of a template for this device, in order: weights are prepacked.
REWRITES: list[Rewrite] = [
    (CONVOLUTIONS, pack_conv),
    (MATMULS, pack_weights),
    (QUANTISED, pack_quantised),
    (CELLS, block_weights),
]
