"""Recurrences as loops over the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.blocks.recurrent import scanned
from rlx.ir.dtype import f32, promote
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.ops.control import make_body
from rlx.passes.common.registry import common


@common("gated_delta_net")
def gated_delta_net(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    state = inputs[5] if len(inputs) > 5 else None
    return scanned(g, tuple(inputs[:5]), state)


@common("selective_scan")
def selective_scan(g: Graph, op: Any, inputs: Sequence[Value]) -> Any:
    u, _, a = inputs[:3]
    rest = list(inputs[5:])
    d = rest.pop(0) if op.has_d else None
    state = rest.pop(0) if op.has_state else None
    kept = state.shape.dtype if state is not None else promote(u.shape.dtype, a.shape.dtype, f32)
    parts = [wide(g, v) for v in (*inputs[:5], *([] if state is None else [state]))]
    inner = promote(*[v.shape.dtype for v in parts])
    parts = [cast(g, v, inner) for v in parts]
    batch, _, width = u.shape.dims
    start_dims = (batch, width, a.shape.dims[1])
    start = parts[5] if state is not None else g.expand(g.constant(0, inner), shape=start_dims)
    xs = [g.transpose(parts[i], axes=(1, 0, 2)) for i in (0, 1, 3, 4)]
    slices = [x.shape.with_dims(x.shape.dims[1:]) for x in xs]
    body = make_body(_step, start.shape, *slices, parts[2].shape, name="selective_scan_step")
    last, y = g.scan(start, *xs, parts[2], body=body, n_carry=1, n_xs=4)
    y = g.transpose(y, axes=(1, 0, 2))
    if d is not None:
        y = g.add(y, g.mul(parts[0], wide(g, d)))
    return cast(g, y, u.shape.dtype), cast(g, last, kept)


def _step(g: Graph, h: Value, u: Value, delta: Value, b: Value, c: Value, a: Value) -> list[Value]:
    """One token: h ← exp(delta·a)·h + delta·b·u; y = Σ c·h"""
    batch, width = u.shape.dims
    n = b.shape.dims[1]
    step, x = (g.reshape(v, shape=(batch, width, 1)) for v in (delta, u))
    b, c = (g.reshape(v, shape=(batch, 1, n)) for v in (b, c))
    h = g.add(g.mul(g.exp(g.mul(step, a)), h), g.mul(g.mul(step, b), x))
    return [h, g.sum(g.mul(h, c), axis=(2,))]
