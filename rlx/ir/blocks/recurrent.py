"""Recurrent layers: the gated delta rule."""

from __future__ import annotations

import math

from rlx.ir.blocks._parts import cast, wide
from rlx.ir.dtype import f32, promote
from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block
from rlx.ir.lowering import is_state
from rlx.ir.node import Value
from rlx.ir.origin import UNKNOWN


@block("gated_delta_net")
class GatedDeltaNet(Block):
    """Per step: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS, from S = 0.

    q, k, v are [B, S, H, N], g and beta [B, S, H]; gives o. `state_size` states N.
    """

    state_size: int = 0

    def direct(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return graph.gated_delta_net(q, k, v, g, beta, state_size=self.state_size)[0]

    def fusable(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return scanned(graph, (q, k, v, g, beta), None)[0]


@block("gated_delta_net_carry", has_effect=True)
class GatedDeltaNetCarry(Block):
    """The gated delta rule from a given state [B, H, N, N]; gives (o, the last state).

    Where the state is one declared with `state`, it is updated in place.
    """

    state_size: int = 0

    def direct(
        self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value
    ) -> tuple[Value, Value]:
        o, last = graph.gated_delta_net(q, k, v, g, beta, state, state_size=self.state_size)
        return o, _written(graph, state, last)

    def fusable(
        self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value
    ) -> tuple[Value, Value]:
        o, last = scanned(graph, (q, k, v, g, beta), state)
        return o, _written(graph, state, last)


def _written(graph: Graph, state: Value, last: Value) -> Value:
    return graph.state_update(state, last) if is_state(state) else last


def scanned(graph: Graph, sequences: tuple[Value, ...], state: Value | None) -> tuple[Value, Value]:
    """The recurrence as a loop over tokens; (o, the last state)."""
    q, k, v = sequences[:3]
    out = promote(*[x.shape.dtype for x in (q, k, v)])
    given = [wide(graph, x) for x in (*sequences, *(() if state is None else (state,)))]
    inner = promote(*[x.shape.dtype for x in given])
    given = [cast(graph, x, inner) for x in given]
    batch, _, heads, n = q.shape.dims
    if state is None:
        start = graph.expand(graph.constant(0.0, inner), shape=(batch, heads, n, n))
    else:
        start = given[5]
    xs = [graph.transpose(x, axes=(1, 0, *range(2, x.shape.rank))) for x in given[:5]]
    last, o = graph.scan(start, *xs, body=_step(start, xs), n_carry=1, n_xs=5)
    kept = promote(out, f32) if state is None else state.shape.dtype
    o = graph.transpose(o, axes=(1, 0, 2, 3))
    return cast(graph, o, out), cast(graph, last, kept)


def _step(start: Value, xs: list[Value]) -> Graph:
    """One token: (state, q, k, v, g, beta) -> (state, o)."""
    body = Graph("gated_delta_step")
    with body.origin(UNKNOWN):
        state = body.input("state", start.shape)
        q, k, v, g, beta = (
            body.input(name, x.shape.with_dims(x.shape.dims[1:]))
            for name, x in zip(("q", "k", "v", "g", "beta"), xs, strict=True)
        )
        batch, heads, n = q.shape.dims
        row, column = (batch, heads, 1, n), (batch, heads, n, 1)
        single = (batch, heads, 1, 1)
        state = body.mul(state, body.reshape(body.exp(g), shape=single))
        seen = body.matmul(body.reshape(k, shape=row), state)
        change = body.sub(body.reshape(v, shape=row), seen)
        change = body.mul(change, body.reshape(beta, shape=single))
        state = body.add(state, body.mul(body.reshape(k, shape=column), change))
        scaled = body.mul(q, 1.0 / math.sqrt(n))  # type: ignore[arg-type]  # N is an int
        o = body.matmul(body.reshape(scaled, shape=row), state)
        body.set_outputs(state, body.reshape(o, shape=(batch, heads, n)))
    return body
