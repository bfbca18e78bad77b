"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops.fused import FusedQkNormRope
from rlx.ir.ops.rope import Rope as RopeOp


@block("rope")
class Rope(Block):
    """Rotates pairs (i, i + n_rot/2) of each head by the angle of the token's position.

    x is [B, S, H*D], [B, S, H, D] or, with layout "bhsd", [B, H, S, D]; cos and sin are tables
    [positions, n_rot/2]. Token s takes row offset + s, or row positions[s]; pairs are (2i, 2i+1)
    when interleaved; dimensions from n_rot (0 means head_dim) on pass through.
    """

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    layout: str = "bshd"

    def direct(
        self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None = None
    ) -> Value:
        return g.rope(x, cos, sin, positions, **self.attributes())

    def fusable(
        self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None = None
    ) -> Value:
        op = RopeOp(**self.attributes())
        return op.decompose(g, x, cos, sin, positions)


@block("qk_norm_rope")
class QkNormRope(Block):
    """rope(rms_norm of each head · gamma [head_dim]); tensors and attributes as for rope."""

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    eps: float = 1e-6
    layout: str = "bshd"

    def direct(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Value:  # fmt: skip
        return g.fused_qk_norm_rope(x, gamma, cos, sin, positions, **self.attributes())

    def fusable(
        self, g: Graph, x: Value, gamma: Value, cos: Value, sin: Value,
        positions: Value | None = None,
    ) -> Value:  # fmt: skip
        op = FusedQkNormRope(**self.attributes())
        return op.decompose(g, x, gamma, cos, sin, positions)
