"""Sorting and searching. NaN counts as greater than every number, and −0 equals 0."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError
from rlx.ir.dtype import i64
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import REAL, compute, require_dtype, require_rank, rounded
from rlx.ir.shape import Shape, normalize_axis

_SORTED = (*REAL, "bool")


def sort_cost(elements: Any, n: Any, traffic: Any) -> Cost:
    """n log₂ n comparisons; a symbolic n counts as 4096."""
    steps = max(1, round(log2(n))) if isinstance(n, int) and n else 12
    return Cost(elements * steps, traffic)


def stable_order(x: Array, axis: int, descending: bool) -> Array:
    """Indices in order along an axis; of equal elements the first comes first, either way."""
    keys = compute(x)
    if not descending:
        return np.argsort(keys, axis=axis, kind="stable")
    mirrored = np.argsort(np.flip(keys, axis), axis=axis, kind="stable")
    return np.flip(keys.shape[axis] - 1 - mirrored, axis)


class _Sorting(Op):
    axis: int = -1
    descending: bool = False

    def infer(self, x: Shape) -> Shape:
        require_dtype(x, _SORTED, "operand")
        normalize_axis(self.axis, x.rank)
        return x

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        x = inputs[0]
        n = x.dims[normalize_axis(self.axis, x.rank)]
        return sort_cost(x.num_elements, n, x.size_bytes + outputs[0].size_bytes)


@op("sort")
class Sort(_Sorting):
    """The elements in order along an axis; equal ones keep theirs."""

    axis: int = -1
    descending: bool = False

    def reference(self, x: Array) -> Array:
        return np.take_along_axis(x, stable_order(x, self.axis, self.descending), self.axis)


@op("argsort")
class ArgSort(_Sorting):
    """The indices (i64) that sort an axis; those of equal elements ascend."""

    axis: int = -1
    descending: bool = False

    def infer(self, x: Shape) -> Shape:
        return super().infer(x).with_dtype(i64)

    def reference(self, x: Array) -> Array:
        return rounded(stable_order(x, self.axis, self.descending), i64)


@op("searchsorted")
class SearchSorted(Op):
    """Where each element of x would be inserted to keep the ascending `table` [n] sorted, in i64:
    on the left, before equal ones, or on the right, after them."""

    side: str = "left"

    def check(self) -> None:
        if self.side not in ("left", "right"):
            raise AttributeValueError(
                "unknown side", where="searchsorted.side", got=repr(self.side),
                expected="left or right",
            )  # fmt: skip

    def infer(self, table: Shape, x: Shape) -> Shape:
        require_rank(table, 1, "the table")
        require_dtype(table, _SORTED, "the table")
        if x.dtype is not table.dtype:
            raise DTypeError("x is of another type than the table", got=x, expected=table.dtype)
        return x.with_dtype(i64)

    def reference(self, table: Array, x: Array) -> Array:
        side: Any = self.side
        return rounded(np.searchsorted(compute(table), compute(x), side), i64)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        table, x = inputs
        return sort_cost(
            x.num_elements, table.dims[0],
            table.size_bytes + x.size_bytes + outputs[0].size_bytes,
        )  # fmt: skip
