"""Products of activations with weights."""

from __future__ import annotations

from rlx.ir.blocks._parts import product, product_parts, weight
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._decompose import activate
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
