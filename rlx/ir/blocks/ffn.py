"""Feed-forward networks of a transformer layer: gated, plain, and mixture of experts."""

from __future__ import annotations

from rlx.errors import AttributeValueError
from rlx.ir.blocks.linear import dense, dense_primitives, num_rows
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import activate, cast, require_rank, wide
from rlx.ir.ops.elementwise import require_activation


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
        hidden = dense_primitives(g, x, up_w, up_bias, self.activation)
        return dense_primitives(g, hidden, down_w, down_bias, None)

    def direct(
        self,
        g: Graph,
        x: Value,
        up_w: Value,
        down_w: Value,
        up_bias: Value | None = None,
        down_bias: Value | None = None,
    ) -> Value:
        hidden = dense(g, x, up_w, up_bias, self.activation)
        return dense(g, hidden, down_w, down_bias, None)


@block("moe_ffn")
class MoeFfn(Block):
    """Each token through the `top_k` experts its router prefers, weighted by their scores.

    x [..., K], router_w [K, E], up_w and gate_w [E, K, F], down_w [E, F, K]. An expert is
    (activation(x·gate) * (x·up))·down. Scores are softmax (or, with `scoring="sigmoid"`, sigmoid)
    of x·router; `normalize` makes those of the chosen experts sum to 1; `scale` multiplies them.
    """

    top_k: int
    normalize: bool = True
    activation: str = "silu"
    scoring: str = "softmax"
    scale: float = 1.0

    def check(self) -> None:
        require_activation(self.activation, self.label)
        if self.scoring not in ("softmax", "sigmoid"):
            raise AttributeValueError(
                "unknown scoring", where=f"{self.label}.scoring", got=repr(self.scoring),
                expected="softmax or sigmoid",
            )  # fmt: skip

    def fusable(
        self, g: Graph, x: Value, router_w: Value, up_w: Value, gate_w: Value, down_w: Value
    ) -> Value:
        require_rank(router_w.shape, 2, "router_w")
        tokens, width = num_rows(x), x.shape.dims[-1]
        flat = g.reshape(x, shape=(tokens, width))
        scores, chosen = self._routes(g, flat, router_w)
        slots = tokens * self.top_k
        rows = g.expand(
            g.reshape(flat, shape=(tokens, 1, width)), shape=(tokens, self.top_k, width)
        )
        rows = g.reshape(rows, shape=(slots, width))
        expert = g.reshape(chosen, shape=(slots,))
        gate = activate(g, g.grouped_matmul(rows, gate_w, expert), self.activation)
        hidden = g.mul(gate, g.grouped_matmul(rows, up_w, expert))
        y = g.grouped_matmul(hidden, down_w, expert)
        y = g.reshape(wide(g, y), shape=(tokens, self.top_k, y.shape.dims[1]))
        y = g.sum(g.mul(y, g.reshape(scores, shape=(tokens, self.top_k, 1))), axis=(1,))
        dtype = promote(*[v.shape.dtype for v in (x, up_w, gate_w, down_w)])
        return cast(g, g.reshape(y, shape=(*x.shape.dims[:-1], y.shape.dims[1])), dtype)

    def _routes(self, g: Graph, flat: Value, router_w: Value) -> tuple[Value, Value]:
        """(scores, expert numbers), both [tokens, top_k]."""
        logits = wide(g, g.matmul(flat, router_w))
        every = g.softmax(logits, axis=-1) if self.scoring == "softmax" else g.sigmoid(logits)
        scores, chosen = g.top_k(every, k=self.top_k, axis=-1)
        if self.normalize:
            scores = g.div(scores, g.sum(scores, axis=(-1,), keepdims=True))
        if self.scale != 1.0:
            scores = g.mul(scores, self.scale)
        return scores, chosen
