"""Values that are only cast, viewed and written to a state: a kernel may write there at once."""

from __future__ import annotations

from typing import Any

from rlx.ir.dim import Dim
from rlx.ir.lir import Lir, View, contiguous_strides
from rlx.ir.node import Node, Value
from rlx.ir.shape import normalize_axis
from rlx.passes.views import plain_view
from rlx.support.records import dataclass


@dataclass(frozen=True)
class Append:
    """What becomes of a value: it is written to `state`, `offset` elements from its start. `dims`
    are the axes of the written part that are not 1, each with its stride in the state and in the
    value as it would lie row-major. With `slots`, `axis` is written at these indices."""

    node: Node  # the update
    state: Value
    offset: Dim
    dims: tuple[tuple[Dim, Dim, Dim], ...]
    absorbed: tuple[Node, ...]
    slots: Value | None = None
    axis: tuple[Dim, Dim, Dim] = (1, 0, 0)  # as in `dims`
    limit: Dim = 0  # slots of the state

    def has_tokens(self, size: Dim, stride: Dim) -> bool:
        """Whether slots, if there are any, are those of this axis of the value."""
        return self.slots is None or (
            size == self.axis[0] and (size == 1 or stride == self.axis[2])
        )

    def stride(self, size: Dim, stride: Dim) -> Dim | None:
        """The stride in the state of an axis of the value; None where there is no such axis."""
        if size == 1:
            return 0
        found = [s for d, s, own in self.dims if d == size and own == stride]
        return found[0] if found else None


class Appends:
    """The values of a plan that are only appended to states."""

    def __init__(self, lir: Lir) -> None:
        self._lir = lir
        self._users, self._outputs = lir.graph.users(), set(lir.outputs)
        self._place = {node: i for i, node in enumerate(lir.graph.nodes)}

    def of(self, node: Node) -> Append | None:
        """The update that alone reads the node's result, through a cast and views."""
        value, passed = node.output, list[Node]()
        cast: Value = value
        while True:
            users = self._users.get(value, [])
            if len(users) != 1 or value in self._outputs:
                return None
            user = users[0]
            if user.op.name == "state_update":
                break
            is_cast = user.op.name == "cast" and value is cast and node.op.name != "cast"
            if not (user.op.is_view or is_cast):
                return None
            passed.append(user)
            value = user.output
            if is_cast:
                cast = value
        return self._append(node, user, value, cast, passed)

    def _append(
        self, node: Node, user: Node, update: Value, cast: Value, passed: list[Node]
    ) -> Append | None:
        op: Any = user.op
        state = user.inputs[0]
        slots = user.inputs[2] if len(user.inputs) > 2 else None
        if update is not user.inputs[1] or update is state:
            return None
        if slots is not None and (not slots.node.op.is_source or slots.dtype.name != "i32"):
            return None
        root, view = self._lir.home(update)[0], self._view(update)
        if root is not cast or view.offset != 0 or self._is_read_between(node, user):
            return None
        if self._lir.phases.get(node) is not self._lir.phases.get(user):
            return None
        strides = self._view(state).strides
        axis = normalize_axis(op.axis, state.shape.rank)
        axes = list(zip(update.shape.dims, strides, view.strides, strict=True))
        dims = tuple([(d, s, own) for d, s, own in axes if d != 1])
        if slots is not None:
            limit = state.shape.dims[axis]
            return Append(user, state, 0, dims, (*passed, user), slots, axes[axis], limit)
        return Append(user, state, op.start * strides[axis], dims, (*passed, user))

    def _view(self, value: Value) -> View:
        return self._lir.slots[value].view or plain_view(value.shape)

    def _is_read_between(self, node: Node, user: Node) -> bool:
        """Whether the state is used between the two: it must not be written sooner then."""
        home = self._lir.home(user.inputs[0])[0]
        between = self._lir.graph.nodes[self._place[node] : self._place[user]]
        return any(
            self._lir.home(v)[0] is home for n in between if not n.op.is_source for v in n.inputs
        )


def source_strides(append: Append, value: Value, strides: tuple[Dim, ...]) -> list[Dim] | None:
    """For each axis of the written part, its stride in `value`, whose own strides are `strides`."""
    plain = contiguous_strides(value.shape)
    found: list[Dim] = []
    for _, _, own in append.dims:
        for base, actual in zip(plain, strides, strict=True):
            if own == base:
                found.append(actual)
                break
            if isinstance(own, int) and isinstance(base, int) and own > base and own % base == 0:
                found.append(actual * (own // base))
                break
        else:
            return None
    return found
