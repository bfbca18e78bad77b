"""Packing of filters that are not constant, at run time."""

from __future__ import annotations

from rlx.backends.cpu.kernels.args import Operands
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Module, Value
from rlx.llvm.storage import compute_type, load, memory_type
from rlx.records import dataclass


@dataclass(frozen=True)
class PackFilters(KernelSpec):
    """words: w, to, then the sizes and strides (in elements) that `words` names.

    to[group, tile, i, j, channel, row] = w at group·stride_group + filter·stride_row +
    channel·stride_channel + i·stride_y + j·stride_x, and 0 where the last tile has no filter.
    """

    w: DType
    out: DType
    tile: int

    words = ("w", "to", "groups", "tiles", "rows", "channels", "taps_y", "taps_x",
             "stride_group", "stride_row", "stride_channel", "stride_y", "stride_x")  # fmt: skip

    def emit(self, m: Module) -> None:
        f = m.kernel()
        o = Operands(f, self.words, ("w", "to"))
        sums = compute_type(self.out)
        terms = o["taps_y"] * o["taps_x"] * o["channels"]
        lo, hi = f.split(o["groups"] * o["tiles"] * terms)
        for at in f.range(lo, hi):
            number, term = at.udiv(terms), at.urem(terms)
            tap, channel = term.udiv(o["channels"]), term.urem(o["channels"])
            y, x = tap.udiv(o["taps_x"]), tap.urem(o["taps_x"])
            group, first = number.udiv(o["tiles"]), number.urem(o["tiles"]) * self.tile
            base = group * o["stride_group"] + channel * o["stride_channel"]
            base = base + y * o["stride_y"] + x * o["stride_x"]
            to = f.gep(o["to"], at, self.tile * sums.bytes)
            for row in f.range(0, self.tile):
                filter_ = first + row
                address = f.gep(o["w"], base + filter_ * o["stride_row"], memory_type(self.w))

                def load_weight(address: Value = address) -> Value:
                    return load(f, address, self.w, 1, sums)

                [value] = f.if_(filter_ < o["rows"], load_weight, lambda: f.const(0, sums))
                f.store(value, f.gep(to, row, sums))
