"""Packing filters at run time, where they are not known before."""

from __future__ import annotations

from rlx.codegen.emit import Module, Value
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.operands import Operands
from rlx.codegen.storage import compute_type, load, memory_type
from rlx.ir.dtype import DType
from rlx.support.records import dataclass


@dataclass(frozen=True)
class PackFilters(KernelSpec):
    """args: w, to, then the sizes and strides (in elements) that `args` names.

    to[group, tile, i, j, channel, row] = w at group·by_group + filter·by_row + channel·by_channel
    + i·by_y + j·by_x, and 0 where the last tile has no filter.
    """

    w: DType
    out: DType
    tile: int

    args = ("w", "to", "groups", "tiles", "rows", "channels", "taps_y", "taps_x",
             "by_group", "by_row", "by_channel", "by_y", "by_x")  # fmt: skip

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.args, ("w", "to"))
        sums = compute_type(self.out)
        terms = o["taps_y"] * o["taps_x"] * o["channels"]
        lo, hi = f.split(o["groups"] * o["tiles"] * terms)
        for at in f.range(lo, hi):
            number, term = at.udiv(terms), at.urem(terms)
            tap, channel = term.udiv(o["channels"]), term.urem(o["channels"])
            y, x = tap.udiv(o["taps_x"]), tap.urem(o["taps_x"])
            group, first = number.udiv(o["tiles"]), number.urem(o["tiles"]) * self.tile
            base = group * o["by_group"] + channel * o["by_channel"]
            base = base + y * o["by_y"] + x * o["by_x"]
            to = f.gep(o["to"], at, self.tile * sums.bytes)
            for row in f.range(0, self.tile):
                filter_ = first + row
                place = f.gep(o["w"], base + filter_ * o["by_row"], memory_type(self.w))

                def found(place: Value = place) -> Value:
                    return load(f, place, self.w, 1, sums)

                [value] = f.if_(filter_ < o["rows"], found, lambda: f.const(0, sums))
                f.store(value, f.gep(to, row, sums))
