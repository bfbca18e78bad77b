"""Conversion between element types."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.dtype import DType, bool_
from rlx.ir.op import Array, op
from rlx.ir.ops._common import ANY, compute, rounded
from rlx.ir.ops.elementwise import Unary
from rlx.ir.shape import Shape


@op("cast", group="elementwise")
class Cast(Unary):
    """x in another element type.

    To a float type: the nearest value. From float to integer: rounds towards 0, saturates, and maps
    NaN to 0. Between integers: wraps. To bool: whether not 0.
    """

    takes = ANY
    dtype: DType

    def result(self, element: DType) -> DType:
        return self.dtype

    def infer(self, x: Shape) -> Shape:
        if x.dtype.is_complex and self.dtype.kind not in ("complex", "bool"):
            raise DTypeError(
                "a complex number has no real value", got=f"{x} to {self.dtype}",
                hint="take real, imag or abs of it",
            )  # fmt: skip
        return super().infer(x)

    def reference(self, x: Array) -> Array:
        if self.dtype.is_integer and DType.of(x.dtype).is_float:
            return _saturated(x, self.dtype)
        if self.dtype is bool_:
            return rounded(compute(x) != 0, bool_)
        return rounded(x, self.dtype)


def _saturated(x: Array, dtype: DType) -> Array:
    limits: Any = np.iinfo(dtype.numpy)
    # as floats the bounds of 64-bit types are one past the end, hence ≥ and the strict <
    low, high = float(limits.min), float(limits.max)
    wide = np.asarray(x, np.float64)
    inside = (wide > low) & (wide < high)  # false for NaN
    result = np.where(inside, wide, 0.0).astype(dtype.numpy)
    result[wide >= high] = limits.max
    result[wide <= low] = limits.min
    return result
