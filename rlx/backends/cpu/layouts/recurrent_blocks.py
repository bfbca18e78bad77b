"""LSTM and GRU with the recurrent weight in blocks: the op that the packing pass puts into graphs.

`r` is `[H / lanes, H, gates, lanes]`, the units padded to whole blocks: a step of the product reads
the gates of a block of units from one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops.recurrent import Gru, Lstm
from rlx.ir.shape import Shape

CELLS: dict[str, type[Lstm] | type[Gru]] = {"lstm": Lstm, "gru": Gru}


@op("blocked_recurrence")
class BlockedRecurrence(Op):
    """`lstm` or `gru`, as `cell` says, with r in blocks; other operands and results as there."""

    cell: str
    hidden: int
    reverse: bool = False

    def check(self) -> None:
        if self.cell not in CELLS:
            raise AttributeValueError(
                "unknown cell", where=f"{self.name}.cell", got=self.cell, expected=sorted(CELLS)
            )

    @property
    def plain(self) -> Lstm | Gru:
        """The op without blocks."""
        return CELLS[self.cell](self.reverse)

    def _weight(self, r: Shape) -> Shape:
        return r.with_dims((self.hidden, self.hidden * self.plain.gates))

    def infer(self, x_gates: Shape, r: Shape, *rest: Shape) -> tuple[Shape, ...]:
        record: Any = self.plain
        found: tuple[Shape, ...] = record.infer(x_gates, self._weight(r), *rest)
        return found

    def reference(self, x_gates: Array, r: Array, *rest: Array) -> tuple[Array, ...]:
        units = np.moveaxis(r, 0, 2)  # [H, gates, blocks, lanes]
        flat = units.reshape(self.hidden, self.plain.gates, -1)[..., : self.hidden]
        record: Any = self.plain
        found: tuple[Array, ...] = record.reference(x_gates, flat.reshape(self.hidden, -1), *rest)
        return found

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        return self.plain.cost([inputs[0], self._weight(inputs[1]), *inputs[2:]], outputs)
