"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim, same
from rlx.ir.dtype import DType
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import (
    cast,
    compute,
    quiet,
    require_float,
    require_indices,
    require_integer,
    require_rank,
    require_same,
    rounded,
    upcast,
    wide,
)
from rlx.ir.ops.attention import (
    Heads,
    by_head,
    head_sizes,
    join_heads,
    require_layout,
    split_heads,
)
from rlx.ir.ops.norm import elementwise_cost
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def check_rotation(head_dim: int, n_rot: int, offset: Dim, layout: str, where: str) -> None:
    """Check the attributes that all rotary ops share."""
    if head_dim < 1:
        raise AttributeValueError("must be positive", where=f"{where}.head_dim", got=head_dim)
    if n_rot < 0 or n_rot > head_dim or (n_rot or head_dim) % 2:
        raise AttributeValueError(
            "not a number of dimensions to rotate", where=f"{where}.n_rot", got=n_rot or head_dim,
            expected=f"an even number up to head_dim={head_dim}, or 0 for all of it",
        )  # fmt: skip
    if isinstance(offset, int) and offset < 0:
        raise AttributeValueError("negative position", where=f"{where}.offset", got=offset)
    require_layout(layout, f"{where}.layout")


@op("rope", group="attention")
class Rope(Op):
    """Rotates pairs of each head by the angle of the token's position.

    x is [B, S, H*D], [B, S, H, D] ("bshd") or [B, H, S, D] ("bhsd"); cos and sin are tables
    [positions, n_rot/2]. Token s takes row offset + s, or row positions[s] of a tensor [S] or
    [B, S]. Pairs are (i, i + n_rot/2), or (2i, 2i+1) when interleaved; dimensions from n_rot
    (0 means head_dim) on pass through. The result is like x.
    """

    head_dim: int
    n_rot: int = 0
    interleaved: bool = False
    offset: Dim = 0
    layout: str = "bshd"

    def check(self) -> None:
        check_rotation(self.head_dim, self.n_rot, self.offset, self.layout, self.name)

    @property
    def rotated(self) -> int:
        """How many dims of a head are rotated."""
        return self.n_rot or self.head_dim

    def infer(self, x: Shape, cos: Shape, sin: Shape, positions: Shape | None = None) -> Shape:
        require_float(x, "x")
        sizes = head_sizes(x, self.head_dim, self.layout, "x")
        for table, what in ((cos, "cos"), (sin, "sin")):
            require_float(table, what)
            require_rank(table, 2, what)
            require_same(table.dims[1], self.rotated // 2, f"columns of {what} against n_rot/2")
        require_same(sin.dims[0], cos.dims[0], "rows of sin against cos")
        if positions is not None:
            self._check_positions(positions, sizes)
        else:
            self._check_rows(cos.dims[0], sizes.length)
        return x

    def _check_positions(self, positions: Shape, sizes: Heads) -> None:
        require_integer(positions, "positions")
        if not same(self.offset, 0):
            raise ShapeError(
                "positions and an offset exclude each other", got=f"offset={self.offset}",
                expected="offset=0", hint="add the offset to the positions",
            )  # fmt: skip
        wanted = (sizes.batch, sizes.length)[2 - positions.rank :] if positions.rank else ()
        if positions.rank not in (1, 2) or not all(map(same, positions.dims, wanted)):
            raise ShapeError(
                "positions do not fit x", got=positions,
                expected=f"[{sizes.length}] or [{sizes.batch}, {sizes.length}]",
            )  # fmt: skip

    def _check_rows(self, rows: Dim, length: Dim) -> None:
        needed = length + self.offset
        if isinstance(needed, int) and isinstance(rows, int) and needed > rows:
            raise ShapeError(
                "the tables end before the last position", got=f"{rows} rows",
                expected=f"at least {needed}", hint="make longer cos and sin tables",
            )  # fmt: skip

    def reference(self, x: Array, cos: Array, sin: Array, positions: Array | None = None) -> Array:
        heads = split_heads(compute(x), self.head_dim, self.layout)
        if positions is None:
            self._check_rows(cos.shape[0], heads.shape[2])
            start: Any = self.offset
            positions = np.arange(start, start + heads.shape[2])
        require_indices(positions, cos.shape[0], "positions")
        # [S, n] or [B, S, n], to broadcast against heads [B, H, S, n]
        angles = [t[positions][..., None, :, :] for t in upcast(cos, sin)]
        with quiet():
            out = self._rotate(heads, *angles)
        return rounded(join_heads(out, x, self.layout), DType.of(x.dtype))

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        half, n = self.rotated // 2, self.rotated
        if self.interleaved:
            first, second = slice(0, n, 2), slice(1, n, 2)
        else:
            first, second = slice(0, half), slice(half, n)
        out = np.array(x)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def decompose(
        self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None = None
    ) -> Any:
        y = self.rotate(g, by_head(g, wide(g, x), self.head_dim), cos, sin, positions)
        return cast(g, g.reshape(y, shape=x.shape.dims), x.shape.dtype)

    def rotate(self, g: Graph, x: Value, cos: Value, sin: Value, positions: Value | None) -> Any:
        """The rotation of wide heads of rank 4."""
        n_rot = self.rotated
        cos = self._angles(g, x, cos, positions)
        sin = self._angles(g, x, sin, positions)
        rotated = g.narrow(x, axis=3, start=0, length=n_rot)
        first, second = self._pairs(g, rotated, n_rot // 2)
        parts = (
            g.sub(g.mul(first, cos), g.mul(second, sin)),
            g.add(g.mul(second, cos), g.mul(first, sin)),
        )
        y = self._joined(g, parts, rotated)
        if n_rot == self.head_dim:
            return y
        rest = g.narrow(x, axis=3, start=n_rot, length=self.head_dim - n_rot)
        return g.concat(y, rest, axis=3)

    def _angles(self, g: Graph, x: Value, table: Value, positions: Value | None) -> Value:
        """Rows of a table for the tokens of x, broadcastable to its heads."""
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

    def _pairs(self, g: Graph, x: Value, half: int) -> tuple[Value, Value]:
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

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Of the tables only the rows of the tokens are read."""
        x, cos, sin, *positions = inputs
        length = head_sizes(x, self.head_dim, self.layout, "x").length
        rows = [t.with_dims((length, t.dims[1])) for t in (cos, sin)]
        return elementwise_cost([x, *rows, *positions], outputs, 3)
