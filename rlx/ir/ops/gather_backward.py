"""Backward of gather: cotangents added up where their slices came from, as of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from rlx.errors import ShapeError
from rlx.ir.dim import Dim
from rlx.ir.op import Cost, op
from rlx.ir.ops._common import NUMERIC, require_dtype, require_integer, require_same, traffic
from rlx.ir.ops.composite import Composite
from rlx.ir.shape import Shape

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


@op("gather_backward")
class GatherBackward(Composite):
    """dx of y = gather(x, indices, axis), whose axis has `size`: zeros, and the slices of dy added
    at their indices, in order."""

    size: Dim
    axis: int = 0

    def check_operands(self, dy: Shape, indices: Shape) -> None:
        require_dtype(dy, NUMERIC, "dy")
        require_integer(indices, "indices")
        first = self._axis(dy, indices)
        for found, wanted in zip(dy.dims[first:], indices.dims, strict=False):
            require_same(found, wanted, "dy")

    def _axis(self, dy: Shape, indices: Shape) -> int:
        """The axis, counted from the first."""
        rank = dy.rank - indices.rank + 1
        if not -rank <= self.axis < rank:
            raise ShapeError(
                "dy is no slices of a tensor that has the axis", where="gather_backward",
                got=f"{dy} for indices {indices}", expected=f"a tensor with axis {self.axis}",
            )  # fmt: skip
        return self.axis % rank

    def around_axis(self, dy: Shape, indices: Shape) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        """The dims before the axis and after it."""
        first = self._axis(dy, indices)
        return dy.dims[:first], dy.dims[first + indices.rank :]

    def decompose(self, g: Graph, dy: Value, indices: Value) -> Any:
        before, after = self.around_axis(dy.shape, indices.shape)
        count = indices.shape.num_elements
        zeros = g.expand(g.constant(0, dy.shape.dtype), (*before, self.size, *after))
        slices = g.reshape(dy, (*before, count, *after))
        return g.scatter_add(zeros, g.reshape(indices, (count,)), slices, axis=len(before))

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(prod(inputs[0].dims, start=1), traffic(inputs, outputs))
