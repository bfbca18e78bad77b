"""Where tensors come from, and the one op that writes to a state."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.attrs import Data
from rlx.ir.dim import Dim, same
from rlx.ir.op import Array, Op, op
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
    """The state with `update` written at `start` along `axis`; the buffer itself changes.

    The result is the state after the write: read it, not the older value. An older value must not
    be read after the write (the verifier checks the order).
    """

    axis: int = 0
    start: Dim = 0

    def infer(self, state: Shape, update: Shape) -> Shape:
        axis = normalize_axis(self.axis, state.rank)
        if update.dtype is not state.dtype:
            raise DTypeError("update of another type", got=update.dtype, expected=state.dtype)
        others = [i for i in range(state.rank) if i != axis]
        if update.rank != state.rank or not all(
            same(update.dims[i], state.dims[i]) for i in others
        ):
            raise ShapeError("update does not fit the state", got=update, expected=state)
        return state

    def reference(self, state: Array, update: Array) -> Array:
        axis = self.axis % state.ndim
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
