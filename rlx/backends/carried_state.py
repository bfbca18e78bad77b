"""Loop-carried states: a recurrence writes its last result into the state that it becomes.

Where nothing reads the old state in between, the state update that follows has nothing to copy: the
lowering of both depends on their neighbours.
"""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import same
from rlx.ir.node import Node, Value
from rlx.passes.views import PlanContext

# Ops whose second result may lie where their state does: each part of it is read before it is
# written, by the same worker.
_CARRIERS = frozenset(["gated_delta_net", "selective_scan"])


def carried_state(result: Value, ctx: PlanContext) -> Value:
    """Where a recurrence writes `result`: into the state that it becomes, or a place of its own."""
    update = _update_of(result, ctx)
    return result if update is None else update.inputs[0]


def is_written(update: Node, ctx: PlanContext) -> bool:
    """Whether a `state_update` has nothing left to do: the recurrence wrote the state."""
    value = update.inputs[1]
    carries = value.node.op.name in _CARRIERS and value.index == 1
    return carries and _update_of(value, ctx) is update


def _update_of(result: Value, ctx: PlanContext) -> Node | None:
    """The one reader of `result`, if that makes it a state which nobody else reads any more."""
    graph, producer = ctx.lir.graph, result.node
    later = graph.nodes[producer.id + 1 :]
    readers = [n for n in later if any(v is result for v in n.inputs)]
    if len(readers) != 1 or readers[0].op.name != "state_update":
        return None
    if any(v is result for v in graph.outputs):
        return None
    update = readers[0]
    if len(update.inputs) != 2:  # rows go to slots
        return None
    op: Any = update.op
    state = update.inputs[0]
    whole = op.start == 0 and all(map(same, state.shape.dims, result.shape.dims))
    if not whole or state.shape.dtype is not result.shape.dtype or not ctx.is_plain(state):
        return None
    root = ctx.lir.home(state)[0]
    between = graph.nodes[producer.id + 1 : update.id]
    late = any(ctx.lir.home(v)[0] is root for n in between for v in n.inputs)
    if late or any(ctx.lir.home(v)[0] is root for v in producer.inputs[:-1]):
        return None
    return update
