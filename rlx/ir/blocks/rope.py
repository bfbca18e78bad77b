"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.blocks.norm import affine, rms_scaled
from rlx.ir.dim import Dim
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value


def split_heads(g: Graph, x: Value, head_dim: int) -> Value:
    """[B, S, H*D] as [B, S, H, D]; rank 4 as it is."""
    if x.shape.rank == 4:
        return x
    batch, seq, width = x.shape.dims
    return g.reshape(x, shape=(batch, seq, width // head_dim, head_dim))


class _Rotation(Block):
    head_dim: int
    n_rot: int
    interleaved: bool
    offset: Dim
    layout: str

    def rotate(self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None) -> Value:
        """The rotation of wide heads of rank 4."""
        turned = self.n_rot or self.head_dim
        cos, sin = (self._angles(g, x, t, positions) for t in (cos, sin))
        rotated = g.narrow(x, axis=3, start=0, length=turned)
        first, second = self._halves(g, rotated, turned // 2)
        parts = (
            g.sub(g.mul(first, cos), g.mul(second, sin)),
            g.add(g.mul(second, cos), g.mul(first, sin)),
        )
        y = self._joined(g, parts, rotated)
        if turned == self.head_dim:
            return y
        rest = g.narrow(x, axis=3, start=turned, length=self.head_dim - turned)
        return g.concat(y, rest, axis=3)

    def _angles(self, g: Graph, x: Value, table: Value, positions: Value | None) -> Value:
        """Rows of a table for the tokens of x, ready to meet its heads."""
        token_axis = 1 if self.layout == "bshd" else 2
        length = x.shape.dims[token_axis]
        table = wide(g, table)
        if positions is None:
            rows = g.narrow(table, axis=0, start=self.offset, length=length)
        else:
            rows = g.gather(table, positions, axis=0)
        batch = rows.shape.dims[0] if rows.shape.rank == 3 else 1
        dims: list[Dim] = [batch, 1, 1, rows.shape.dims[-1]]
        dims[token_axis] = length
        return g.reshape(rows, shape=tuple(dims))

    def _halves(self, g: Graph, x: Value, half: int) -> tuple[Value, Value]:
        """The two members of every pair."""
        if not self.interleaved:
            return (
                g.narrow(x, axis=3, start=0, length=half),
                g.narrow(x, axis=3, start=half, length=half),
            )
        outer = x.shape.dims[:3]
        pairs = g.reshape(x, shape=(*outer, half, 2))
        first, second = (g.narrow(pairs, axis=4, start=i, length=1) for i in (0, 1))
        dims = (*outer, half)
        return g.reshape(first, shape=dims), g.reshape(second, shape=dims)

    def _joined(self, g: Graph, parts: tuple[Value, Value], like: Value) -> Value:
        if not self.interleaved:
            return g.concat(*parts, axis=3)
        first, second = (g.reshape(p, shape=(*p.shape.dims, 1)) for p in parts)
        return g.reshape(g.concat(first, second, axis=4), shape=like.shape.dims)


@block("rope")
class Rope(_Rotation):
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
        heads = split_heads(g, wide(g, x), self.head_dim)
        y = self.rotate(g, heads, cos, sin, positions)
        return cast(g, g.reshape(y, shape=x.shape.dims), x.shape.dtype)


@block("qk_norm_rope")
class QkNormRope(_Rotation):
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
        heads = split_heads(g, wide(g, x), self.head_dim)
        normed = affine(g, rms_scaled(g, heads, self.eps), gamma, None)
        y = self.rotate(g, normed, cos, sin, positions)
        dtype = promote(x.shape.dtype, gamma.shape.dtype)
        return cast(g, g.reshape(y, shape=x.shape.dims), dtype)
