"""Sources (input, param, state, constant), the state update, and contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, same
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.shape import Shape, normalize_axis


class _Source(Op):
    is_source = True


@op("input")
class Input(_Source):
    """A tensor given with every run."""

    shape: Shape

    def infer(self) -> Shape:
        return self.shape


@op("param")
class Param(_Source):
    """A weight: given once, shared by all variants of a model."""

    shape: Shape

    def infer(self) -> Shape:
        return self.shape


@op("state")
class State(_Source):
    """A named buffer that survives runs."""

    shape: Shape

    def infer(self) -> Shape:
        return self.shape


@op("constant")
class Constant(_Source):
    """A tensor known when the graph is built."""

    data: Data

    def infer(self) -> Shape:
        return self.data.shape

    def reference(self) -> Array:
        return self.data.array


@op("state_update", has_effect=True)
class StateUpdate(Op):
    """The state with `update` written in place at `start` along `axis`.

    With `slots` [n], slice i of the update goes to slots[i] instead; of equal ones the last wins.
    The result is the new version of the state. An older version must not be read after the update
    (the verifier checks the order).
    """

    axis: int = 0
    start: Dim = 0

    def infer(self, state: Shape, update: Shape, slots: Shape | None = None) -> Shape:
        axis = normalize_axis(self.axis, state.rank)
        if update.dtype is not state.dtype:
            raise DTypeError("update of another type", got=update.dtype, expected=state.dtype)
        others = [i for i in range(state.rank) if i != axis]
        if update.rank != state.rank or not all(
            same(update.dims[i], state.dims[i]) for i in others
        ):
            raise ShapeError("update does not fit the state", got=update, expected=state)
        if slots is not None:
            self._check_slots(slots, update.dims[axis])
        return state

    def _check_slots(self, slots: Shape, count: Dim) -> None:
        if not slots.dtype.is_integer or slots.rank != 1 or not same(slots.dims[0], count):
            raise ShapeError("slots do not fit the update", got=slots, expected=f"i32[{count}]")
        if self.start != 0:
            raise ShapeError("slots or a start, not both", got=f"start={self.start}")

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Reads and writes the update only, not the rest of the state."""
        return Cost(0, 2 * inputs[1].size_bytes)

    def reference(self, state: Array, update: Array, slots: Array | None = None) -> Array:
        axis = self.axis % state.ndim
        if slots is not None:
            return self._scattered(state, update, slots, axis)
        start: Any = self.start
        stop = start + update.shape[axis]
        if start < 0 or stop > state.shape[axis]:
            raise ShapeError(
                "write past the end of a state", where=self.name,
                got=f"{start} … {stop}", expected=f"at most {state.shape[axis]}",
                hint="the context is longer than the capacity the state was declared with",
            )  # fmt: skip
        result = np.array(state)
        result[(slice(None),) * axis + (slice(start, stop),)] = update
        return result

    def _scattered(self, state: Array, update: Array, slots: Array, axis: int) -> Array:
        wrong = [int(s) for s in slots if not 0 <= s < state.shape[axis]]
        if wrong:
            raise ShapeError(
                "no such slot of a state", where=self.name, got=wrong[0],
                expected=f"0 … {state.shape[axis] - 1}",
            )  # fmt: skip
        result = np.array(state)
        result[(slice(None),) * axis + (slots,)] = update
        return result


@op("contiguous")
class Contiguous(Op):
    """A contiguous (row-major) copy of a view."""

    def infer(self, x: Shape) -> Shape:
        return x

    def reference(self, x: Array) -> Array:
        return np.array(x, order="C")
