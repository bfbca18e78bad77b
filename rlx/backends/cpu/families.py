"""The kernel families: importing them fills the table of lowerings."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu import (  # noqa: F401
    attention,
    block_copies,
    control,
    conv,
    indexing,
    linalg,
    matmul,
    matmul_steps,
    pack,
    paged,
    pooling,
    qmatmul,
    qmatmul_rewrite,
    recurrent,
    region,
    rope,
    select,
)
from rlx.codegen.target import Target
from rlx.ir.graph import Graph

# Rewrites of a template for this device, in order: packed weights and the like.
REWRITES: list[Callable[[Graph, Target], Graph]] = [
    conv.pack_conv,
    pack.pack_weights,
    qmatmul_rewrite.pack_quantised,
]
