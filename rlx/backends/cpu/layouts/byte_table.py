"""`byte_lookup`: a function of 8-bit integers as a table of 256."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import i8, u8
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.shape import Shape


@op("byte_lookup")
class ByteLookup(Op):
    """table[x], where x counts as unsigned: i8 numbers below zero have the upper half."""

    def infer(self, x: Shape, table: Shape) -> Shape:
        for given in (x, table):
            if given.dtype not in (u8, i8):
                raise DTypeError("not bytes", where=self.name, got=given, expected="u8 or i8")
        if table.dims != (256,):
            raise ShapeError("not a table", where=self.name, got=table, expected="[256]")
        return x.with_dtype(table.dtype)

    def reference(self, x: Array, table: Array) -> Array:
        return table[np.ascontiguousarray(x).view(np.uint8)]

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return Cost(0, inputs[0].size_bytes + outputs[0].size_bytes)
