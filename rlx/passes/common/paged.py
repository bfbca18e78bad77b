"""Attention over pages: keys and values of each token's sequence gathered, then plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.passes.common.registry import common


@common("paged_attention")
def paged_attention(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    q, k, v, table, rows, positions, *sinks = inputs
    tokens, most = q.shape.dims[1], table.shape.dims[1] * op.page
    group = op.num_heads // op.num_kv_heads
    places = g.iota(shape=(op.page,), dtype=table.shape.dtype)
    pages = g.reshape(g.gather(table, rows, axis=0), shape=(tokens, table.shape.dims[1], 1))
    slots = g.reshape(g.add(g.mul(pages, op.page), places), shape=(tokens * most,))
    keys, values = (
        g.reshape(
            g.gather(wide(g, x), slots, axis=2),
            shape=(op.num_kv_heads, tokens, most, op.head_dim),
        )
        for x in (k, v)
    )
    heads = g.reshape(wide(g, q), shape=(tokens, op.num_kv_heads, group, op.head_dim))
    heads = g.transpose(heads, axes=(1, 0, 2, 3))
    scores = g.mul(g.matmul(heads, g.transpose(keys, axes=(0, 1, 3, 2))), op.score_scale)
    if op.softcap:
        scores = g.mul(g.tanh(g.div(scores, op.softcap)), op.softcap)
    at = g.reshape(positions, shape=(tokens, 1, 1))
    place = g.iota(shape=(most,), dtype=positions.shape.dtype)
    keep = g.le(place, at)
    if op.window:
        keep = g.logical_and(keep, g.gt(place, g.sub(at, op.window)))
    scores = g.where(keep, scores, float("-inf"))
    if sinks:
        more = g.reshape(wide(g, sinks[0]), shape=(op.num_kv_heads, 1, group, 1))
        more = g.expand(more, shape=(op.num_kv_heads, tokens, group, 1))
        joined = g.softmax(g.concat(scores, more, axis=3), axis=-1)
        weights = g.narrow(joined, axis=3, start=0, length=most)
    else:
        weights = g.softmax(scores, axis=-1)
    mixed = g.transpose(g.matmul(weights, values), axes=(1, 0, 2, 3))
    return cast(g, g.reshape(mixed, shape=q.shape.dims), q.shape.dtype)
