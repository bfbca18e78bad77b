"""Linear layers, and the feed-forward networks of a transformer layer: gated, plain, and mixture of
experts."""

from __future__ import annotations

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.node import Value
from rlx.ir.ops._common import activate, cast, require_rank, wide
from rlx.ir.ops.activation import require_activation
from rlx.ir.quant.scheme import QuantScheme


def as_kn(g: Graph, w: Value, transposed: bool) -> Value:
    """A weight as [K, N], whichever way it was given."""
    return g.transpose(w, axes=(1, 0)) if transposed else w


def dense(
    g: Graph,
    x: Value,
    w: Value,
    bias: Value | None,
    activation: str | None,
    strassen: bool = False,
) -> Value:
    """activation(x·w + bias): one fused op, or a plain matmul where there is nothing to fuse."""
    act = activation or "none"
    if bias is None and act == "none" and not strassen:
        return g.matmul(x, w)
    operands = (x, w) if bias is None else (x, w, bias)
    return g.fused_matmul_bias_act(
        *operands, activation=act, has_bias=bias is not None, strassen=strassen
    )


def dense_primitives(
    g: Graph, x: Value, w: Value, bias: Value | None, activation: str | None
) -> Value:
    """activation(x·w + bias), built of primitives."""
    y = g.matmul(x, w)
    return activate(g, y if bias is None else g.add(y, bias), activation)


def num_rows(x: Value) -> Dim:
    """The rows of `x`: all axes but the last, flattened."""
    return x.shape.with_dims(x.shape.dims[:-1]).num_elements


@block("linear")
class Linear(Block):
    """activation(x·W + bias), W [K, N], or [N, K] when transposed.

    `strassen` allows Strassen's algorithm; use it when rows are of similar scale.
    """

    activation: str | None = None
    transposed: bool = False
    strassen: bool = False

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        return dense_primitives(g, x, as_kn(g, w, self.transposed), bias, self.activation)

    def direct(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        w = as_kn(g, w, self.transposed)
        return dense(g, x, w, bias, self.activation, self.strassen)


@block("linear_fused")
class LinearFused(Block):
    """activation(x·W + bias) as one fused node, whatever the policy."""

    activation: str | None = None

    def check(self) -> None:
        require_activation(self.activation or "none", self.label)

    def fusable(self, g: Graph, x: Value, w: Value, bias: Value) -> Value:
        return dense(g, x, w, bias, self.activation)


@block("shared_linear_pair")
class SharedLinearPair(Block):
    """(x·W1, x·W2) as one matmul."""

    def fusable(self, g: Graph, x: Value, w1: Value, w2: Value) -> tuple[Value, Value]:
        return g.matmul(x, w1), g.matmul(x, w2)

    def direct(self, g: Graph, x: Value, w1: Value, w2: Value) -> tuple[Value, Value]:
        if w1.shape.dtype is not w2.shape.dtype or w1.shape.rank != 2 or w2.shape.rank != 2:
            return self.fusable(g, x, w1, w2)
        # the concatenated weight is param-only, so `prepare` makes it once
        y = g.matmul(x, g.concat(w1, w2, axis=1))
        first, second = w1.shape.dims[1], w2.shape.dims[1]
        axis = y.shape.rank - 1
        return (
            g.narrow(y, axis=axis, start=0, length=first),
            g.narrow(y, axis=axis, start=first, length=second),
        )


@block("lora_linear")
class LoraLinear(Block):
    """activation(x·W + scale · (x·A)·B + bias): a weight [K, N] with a LoRA adapter."""

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
        w = as_kn(g, w, self.transposed)
        return self._capped(g, dense_primitives(g, self._tokens(g, x), w, bias, None))

    def direct(self, g: Graph, x: Value, w: Value, bias: Value | None = None) -> Value:
        w = as_kn(g, w, self.transposed)
        return self._capped(g, dense(g, self._tokens(g, x), w, bias, None))

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
