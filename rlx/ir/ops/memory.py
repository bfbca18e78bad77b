"""Ops about where elements lie, not what they are."""

from __future__ import annotations

import numpy as np

from rlx.ir.op import Array, Op, op
from rlx.ir.shape import Shape


@op("contiguous")
class Contiguous(Op):
    """The same tensor, row-major in memory of its own: a strided view made plain."""

    def infer(self, x: Shape) -> Shape:
        return x

    def reference(self, x: Array) -> Array:
        return np.array(x, order="C")
