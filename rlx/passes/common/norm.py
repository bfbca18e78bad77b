"""Norms, attention and rotary embedding: the primitives their HIR blocks lower to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks import attention, norm, rope
from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block
from rlx.ir.node import Value
from rlx.passes.common.registry import COMMON, Body, common


def from_block(block: type[Block]) -> Body:
    """A body that is the FUSABLE lowering of the block with the same attributes."""

    def body(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
        return block(**op.attributes()).fusable(g, *inputs)

    return body


COMMON["rms_norm"] = from_block(norm.RmsNorm)
COMMON["layer_norm"] = from_block(norm.LayerNorm)
COMMON["fused_residual_rms_norm"] = from_block(norm.ResidualRmsNorm)
COMMON["fused_residual_layer_norm"] = from_block(norm.ResidualLayerNorm)
COMMON["attention"] = from_block(attention.Attention)
COMMON["rope"] = from_block(rope.Rope)
COMMON["fused_qk_norm_rope"] = from_block(rope.QkNormRope)


@common("group_norm")
def group_norm(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x, gamma, beta = inputs
    batch, channels, *places = x.shape.dims
    grouped = g.reshape(wide(g, x), shape=(batch, op.groups, channels // op.groups, *places))
    axes = tuple(range(2, grouped.shape.rank))
    centred = g.sub(grouped, g.mean(grouped, axis=axes, keepdims=True))
    variance = g.mean(g.square(centred), axis=axes, keepdims=True)
    y = g.reshape(g.mul(centred, g.rsqrt(g.add(variance, op.eps))), shape=x.shape.dims)
    gain, shift = (
        g.reshape(wide(g, v), shape=(channels, *[1] * len(places))) for v in (gamma, beta)
    )
    result = promote(*[v.shape.dtype for v in inputs])
    return cast(g, g.add(g.mul(y, gain), shift), result)


@common("l2_norm")
def l2_norm(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    x = wide(g, inputs[0])
    total = g.sum(g.square(x), axis=(op.axis,), keepdims=True)
    return cast(g, g.mul(x, g.rsqrt(g.add(total, op.eps))), inputs[0].shape.dtype)
