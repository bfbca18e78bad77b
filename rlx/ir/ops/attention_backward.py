"""Backward of attention without the table of scores: it keeps one number a row, the log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.attrs import MaskKind
from rlx.ir.dtype import DType, f32, f64
from rlx.ir.op import Array, Cost, op
from rlx.ir.ops._common import cast, quiet, require_float, traffic, upcast, wide
from rlx.ir.ops.attention import (
    Attention,
    attention_scores,
    head_sizes,
    log_sum_exp,
    masked_scores,
    transposed_heads,
)
from rlx.ir.ops.composite import Composite
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def lse_shape(op: Any, q: Shape, *others: Shape) -> Shape:
    """[B, H, Sq], in the type that scores are computed in."""
    batch, rows, _ = head_sizes(q, op.head_dim, op.q_layout, "q")
    double = any(x.dtype is f64 for x in (q, *others))
    return Shape((batch, op.num_heads, rows), f64 if double else f32)


@op("attention_with_lse", is_anchor=True)
class AttentionWithLse(Attention):
    """(attention, ln Σ exp(scores) of each row [B, H, Sq]): what backward needs. Masked keys do not
    count, a sink does; −inf for a query without any key."""

    def infer(  # type: ignore[override]
        self, q: Shape, k: Shape, v: Shape, mask: Shape | None = None, sinks: Shape | None = None
    ) -> tuple[Shape, Shape]:
        return super().infer(q, k, v, mask, sinks), lse_shape(self, q, k, v)

    def reference(
        self, q: Array, k: Array, v: Array, mask: Array | None = None, sinks: Array | None = None
    ) -> Any:
        out = super().reference(q, k, v, mask, sinks)
        mask, sinks = self.extras(mask, sinks)
        with quiet():
            scores = self.reference_scores(*self.unpacked(q, k), mask)
            if sinks is not None:
                more = upcast(sinks)[0].astype(scores.dtype)[None, :, None, None]
                more = np.broadcast_to(more, (*scores.shape[:3], 1))
                scores = np.concatenate([scores, more], axis=-1)
            top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            top = np.where(np.isneginf(top), 0, top).astype(scores.dtype)
            lse = np.log(np.exp(scores - top).sum(axis=-1)) + top[..., 0]
        return out, lse.astype(lse_shape(self, *map(_shape_of, (q, k, v))).dtype.numpy)

    def decompose(
        self, g: Graph, q: Value, k: Value, v: Value, mask: Value | None = None,
        sinks: Value | None = None,
    ) -> Any:  # fmt: skip
        lse = log_sum_exp(g, self, q, k, mask, sinks)
        lse = cast(g, lse, lse_shape(self, q.shape, k.shape, v.shape).dtype)
        return super().decompose(g, q, k, v, mask, sinks), lse


def _shape_of(x: Array) -> Shape:
    return Shape(x.shape, DType.of(x.dtype))


@op("attention_backward", is_anchor=True)
class AttentionBackward(Composite):
    """(dq, dk, dv) from out and lse of `attention_with_lse` and the cotangent of out.

    Operands and attributes are as in attention; a mask is the last operand. With `wants_bias` a
    fourth result is the cotangent of a BIAS mask. Sinks need no operand: lse has them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_kind: MaskKind = MaskKind.NONE
    scale: float | None = None
    softcap: float = 0.0
    q_layout: str = "bshd"
    kv_layout: str = "bshd"
    wants_bias: bool = False

    @property
    def forward(self) -> Attention:
        """The op that this is the backward of."""
        given = self.attributes()
        del given["wants_bias"]
        return Attention(**given)

    def check(self) -> None:
        self.forward  # noqa: B018  checks the attributes

    def check_operands(
        self, q: Shape, k: Shape, v: Shape, out: Shape, lse: Shape, dout: Shape,
        mask: Shape | None = None,
    ) -> None:  # fmt: skip
        self.forward.infer(q, k, v, mask)
        for shape, what in ((out, "out"), (dout, "dout")):
            require_float(shape, what)
            if not shape.same_dims(q):
                raise ShapeError(f"{what} does not fit q", got=shape, expected=q)
        expected = lse_shape(self, q, k, v)
        if not lse.same_dims(expected):
            raise ShapeError("lse does not fit q", got=lse, expected=expected)
        if self.wants_bias and self.mask_kind != MaskKind.BIAS:
            raise ShapeError("no bias to derive", got=self.mask_kind, expected=MaskKind.BIAS)

    def decompose(
        self, g: Graph, q: Value, k: Value, v: Value, out: Value, lse: Value, dout: Value,
        mask: Value | None = None,
    ) -> Any:  # fmt: skip
        """With weights p = exp(s − lse) and w = rowsum(dout · out): ds = p·(dout·vᵀ − w)."""
        forward = self.forward
        rows, keys, raw = attention_scores(g, forward, q, k)
        values = forward.shared(g, transposed_heads(g, v, self.head_dim, self.kv_layout))
        result, cotangent = (
            transposed_heads(g, x, self.head_dim, self.q_layout) for x in (out, dout)
        )
        low = g.reshape(wide(g, lse), (*lse.shape.dims, 1))
        scores = masked_scores(g, forward.capped(g, raw), mask, self.mask_kind)
        p = g.exp(g.sub(scores, g.where(g.is_finite(low), low, 0.0)))
        weight = g.sum(g.mul(cotangent, result), axis=(-1,), keepdims=True)
        ds = g.mul(p, g.sub(g.matmul(cotangent, _flipped(g, values)), weight))
        dbias = [] if not self.wants_bias or mask is None else [_summed_like(g, ds, mask)]
        if self.softcap:  # d c·tanh(s / c) = 1 − tanh²
            ds = g.mul(ds, g.sub(1.0, g.square(g.tanh(g.div(raw, self.softcap)))))
        ds = g.mul(ds, forward.score_scale)
        dq = g.matmul(ds, keys)
        dk, dv = (
            self._of_group(g, g.matmul(_flipped(g, a), b)) for a, b in ((ds, rows), (p, cotangent))
        )
        found = [(dq, q, self.q_layout), (dk, k, self.kv_layout), (dv, v, self.kv_layout)]
        return (*(_like(g, *x) for x in found), *dbias)

    def _of_group(self, g: Graph, x: Value) -> Any:
        """Sums over the query heads of each key head."""
        group = self.num_heads // self.num_kv_heads
        if group == 1:
            return x
        batch, _, length, width = x.shape.dims
        return g.sum(g.reshape(x, (batch, self.num_kv_heads, group, length, width)), axis=(2,))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Five products where attention has two."""
        plain = self.forward.cost(inputs[:3], outputs[:1])
        return Cost(plain.flops // 2 * 5, traffic(inputs, outputs))


def _flipped(g: Graph, x: Value) -> Any:
    return g.transpose(x, axes=(0, 1, 3, 2))


def _like(g: Graph, x: Value, like: Value, layout: str) -> Any:
    """[B, H, S, D] back in the form of an operand."""
    if layout == "bshd":
        x = g.reshape(g.transpose(x, axes=(0, 2, 1, 3)), shape=like.shape.dims)
    return cast(g, x, like.shape.dtype)


def _summed_like(g: Graph, x: Value, like: Value) -> Any:
    """The cotangent of what was broadcast to x: sums over the axes that it does not have."""
    dims = (*[1] * (x.shape.rank - like.shape.rank), *like.shape.dims)
    pairs = enumerate(zip(dims, x.shape.dims, strict=True))
    axes = tuple([i for i, (own, full) in pairs if own == 1 and full != 1])
    total = g.sum(x, axis=axes, keepdims=True) if axes else x
    return cast(g, g.reshape(total, like.shape.dims), like.shape.dtype)
