"""Recurrent layers: the gated delta rule."""

from __future__ import annotations

from rlx.ir.graph import Graph
from rlx.ir.hir import Block, block, is_state
from rlx.ir.node import Value
from rlx.ir.ops.scan import GatedDeltaNet as GatedDeltaNetOp


@block("gated_delta_net")
class GatedDeltaNet(Block):
    """Per token: S ← exp(g)·S; d = (v − kᵀS)·beta; S ← S + k dᵀ; o = (q/√N)ᵀS, from S = 0.

    q, k, v are [B, S, H, N], g and beta [B, S, H]; returns o. `state_size` states N.
    """

    state_size: int = 0

    def direct(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return graph.gated_delta_net(q, k, v, g, beta, state_size=self.state_size)[0]

    def fusable(self, graph: Graph, q: Value, k: Value, v: Value, g: Value, beta: Value) -> Value:
        return GatedDeltaNetOp().decompose(graph, q, k, v, g, beta)[0]


@block("gated_delta_net_carry", has_effect=True)
class GatedDeltaNetCarry(Block):
    """The gated delta rule from a given state [B, H, N, N]; returns (o, the last state).

    A state declared with `state` is updated in place.
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
        o, last = GatedDeltaNetOp().decompose(graph, q, k, v, g, beta, state)
        return o, _written(graph, state, last)


def _written(graph: Graph, state: Value, last: Value) -> Value:
    return graph.state_update(state, last) if is_state(state) else last
