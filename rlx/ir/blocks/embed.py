"""Tokens to vectors and back."""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.ir.blocks._parts import product, product_parts, weight
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import require_rank


@block("embedding")
class Embedding(Block):
    """Rows `ids` of the table [V, K], times `scale`: [...] -> [..., K]"""

    scale: float = 1.0

    def fusable(self, g: Graph, ids: Value, table: Value) -> Value:
        require_rank(table.shape, 2, "table")
        rows: Value = g.gather(table, ids, axis=0)
        return rows if self.scale == 1.0 else g.mul(rows, self.scale)


@block("lm_head")
class LmHead(Block):
    """Logits x·W (+ bias): W [K, V], or the embedding table [V, K] when transposed.

    With `last_only` those of the last token alone; with a softcap c, c·tanh(logits/c).
    """

    transposed: bool = False
    softcap: float = 0.0
    last_only: bool = False

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        w = weight(g, w, self.transposed)
        return self._capped(g, product_parts(g, self._tokens(g, x), w, bias, None))

    def direct(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        w = weight(g, w, self.transposed)
        return self._capped(g, product(g, self._tokens(g, x), w, bias, None))

    def _tokens(self, g: Graph, x: Value) -> Value:
        if not self.last_only:
            return x
        if x.shape.rank < 2:
            raise ShapeError("x has no axis of tokens", got=x.shape, expected="[..., seq, K]")
        axis = x.shape.rank - 2
        return g.narrow(x, axis=axis, start=x.shape.dims[axis] - 1, length=1)

    def _capped(self, g: Graph, logits: Value) -> Value:
        if not self.softcap:
            return logits
        return g.mul(g.tanh(g.div(logits, self.softcap)), self.softcap)
