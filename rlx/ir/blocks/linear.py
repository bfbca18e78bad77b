"""Products of activations with weights.

Tokens to vectors and back.
"""

from __future__ import annotations

from rlx.errors import ShapeError
from rlx.ir.blocks._parts import product, product_parts, weight
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import activate, require_rank
from rlx.ir.ops.activation import require_activation
from rlx.ir.quant.scheme import QuantScheme


@block("linear")
class Linear(Block):
    """activation(x·W + bias), W [K, N], or [N, K] when transposed.

    `strassen`: with fewer multiplications, where rows are alike in scale.
    """

    activation: str | None = None
    transposed: bool = False
    strassen: bool = False

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        return product_parts(g, x, weight(g, w, self.transposed), bias, self.activation)

    def direct(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        w = weight(g, w, self.transposed)
        return product(g, x, w, bias, self.activation, self.strassen)


@block("linear_fused")
class LinearFused(Block):
    """activation(x·W + bias) as one fused node, whatever the policy."""

    activation: str | None = None

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value) -> Value:
        return product(g, x, w, bias, self.activation)


@block("shared_linear_pair")
class SharedLinearPair(Block):
    """(x·W1, x·W2) in one pass over x."""

    def fusable(self, g: Graph, x: Value, w1: Value, w2: Value) -> tuple[Value, Value]:
        return g.matmul(x, w1), g.matmul(x, w2)

    def direct(self, g: Graph, x: Value, w1: Value, w2: Value) -> tuple[Value, Value]:
        if w1.shape.dtype is not w2.shape.dtype or w1.shape.rank != 2 or w2.shape.rank != 2:
            return self.fusable(g, x, w1, w2)
        # joined weights depend on parameters only, so `prepare` joins them once
        y = g.matmul(x, g.concat(w1, w2, axis=1))
        first, second = w1.shape.dims[1], w2.shape.dims[1]
        axis = y.shape.rank - 1
        return (
            g.narrow(y, axis=axis, start=0, length=first),
            g.narrow(y, axis=axis, start=first, length=second),
        )


@block("lora_linear")
class LoraLinear(Block):
    """activation(x·W + scale · (x·A)·B + bias): a weight [K, N] with an adapter beside it."""

    scale: float = 1.0
    activation: str | None = None

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def fusable(
        self, g: Graph, x: Value, w: Value, a: Value, b: Value, bias: Value | None = None
    ) -> Value:
        adapter = g.mul(g.matmul(g.matmul(x, a), b), self.scale)
        return self._finish(g, g.add(g.matmul(x, w), adapter), bias)

    def direct(
        self, g: Graph, x: Value, w: Value, a: Value, b: Value, bias: Value | None = None
    ) -> Value:
        return self._finish(g, g.lora_matmul(x, w, a, b, scale=self.scale), bias)

    def _finish(self, g: Graph, y: Value, bias: Value | None) -> Value:
        return activate(g, y if bias is None else g.add(y, bias), self.activation)


@block("dequant_matmul")
class DequantMatmul(Block):
    """x · dequant(W), W packed [N, row bytes] and never unpacked as a whole."""

    scheme: QuantScheme

    def fusable(
        self, g: Graph, x: Value, w: Value, scale: Value | None = None, zp: Value | None = None
    ) -> Value:
        return g.dequant_matmul(x, w, scale, zp, scheme=self.scheme)


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
