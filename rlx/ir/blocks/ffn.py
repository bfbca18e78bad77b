"""Feed-forward networks of a transformer layer."""

from __future__ import annotations

from rlx.ir.blocks._parts import product, product_parts
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._decompose import activate
from rlx.ir.ops.activation import require_activation


class _GatedFfn(Block):
    activation: str

    def check(self) -> None:
        require_activation(self.activation, self.label)

    def fusable(self, g: Graph, x: Value, up_w: Value, gate_w: Value, down_w: Value) -> Value:
        gate = activate(g, g.matmul(x, gate_w), self.activation)
        return g.matmul(g.mul(gate, g.matmul(x, up_w)), down_w)

    def direct(self, g: Graph, x: Value, up_w: Value, gate_w: Value, down_w: Value) -> Value:
        return g.matmul(g.fused_swiglu(x, gate_w, up_w, activation=self.activation), down_w)


@block("swiglu_ffn")
class SwigluFfn(_GatedFfn):
    """(silu(x·gate) * (x·up))·down"""

    activation: str = "silu"


@block("geglu_ffn")
class GegluFfn(_GatedFfn):
    """(gelu(x·gate) * (x·up))·down"""

    activation: str = "gelu"


@block("gelu_ffn")
class GeluFfn(Block):
    """gelu(x·up + up_bias)·down + down_bias"""

    activation: str = "gelu"
    has_up_bias: bool = False
    has_down_bias: bool = False

    def check(self) -> None:
        require_activation(self.activation, self.label)

    def fusable(
        self,
        g: Graph,
        x: Value,
        up_w: Value,
        down_w: Value,
        up_bias: Value | None = None,
        down_bias: Value | None = None,
    ) -> Value:
        hidden = product_parts(g, x, up_w, up_bias, self.activation)
        return product_parts(g, hidden, down_w, down_bias, None)

    def direct(
        self,
        g: Graph,
        x: Value,
        up_w: Value,
        down_w: Value,
        up_bias: Value | None = None,
        down_bias: Value | None = None,
    ) -> Value:
        hidden = product(g, x, up_w, up_bias, self.activation)
        return product(g, hidden, down_w, down_bias, None)
