"""Packing what a panel of output pixels reads: every input under every tap, in the order of sums.

The pixels of a panel are cut into pieces that lie in one output line and in one vector. A piece
meets a tap at one input line, so whether its inputs exist is decided once for all channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.codegen.emit import Function, Module, Type, Value, i64, ptr
from rlx.codegen.line import Line
from rlx.codegen.operands import Operands
from rlx.codegen.storage import memory_type

if TYPE_CHECKING:
    from rlx.codegen.conv import Conv

_BLOCK = 32  # channels whose lines are packed together, so that the pieces find them in the cache
_PIECE = 24  # bytes that describe a piece: input line, input column, place in the panel


def emit_pack(m: Module, spec: Conv, sums: Type, lanes: int) -> Function:
    """void pack(ptr args, ptr image, i64 pixel, i64 count, ptr panel)"""
    params = [("args", ptr), ("image", ptr), ("pixel", i64), ("count", i64), ("panel", ptr)]
    f = m.function("pack", params, internal=True)
    _Pack(f, spec, sums, lanes).emit()
    return f


class _Pack:
    def __init__(self, f: Function, spec: Conv, sums: Type, lanes: int) -> None:
        self.f, self.spec, self.sums, self.lanes = f, spec, sums, lanes
        pointers = ("x", "filters", "out", "bias", "scratch")
        self.o = Operands(f, spec.args, pointers)
        self.term_bytes = spec.panel_bytes(f.target)
        self.line = Line(spec.x, sums, lanes, spec.step)
        self.size = memory_type(spec.x).bytes

    def emit(self) -> None:
        f, o = self.f, self.o
        most = self.term_bytes // self.sums.bytes
        self.pieces = f.alloca(most * _PIECE)
        end = f.gep(self.pieces, self._cut(), _PIECE)
        last = f.bitcast(end, i64)
        first = f.bitcast(self.pieces, i64)
        for i in f.range(0, o["taps_y"]):
            for j in f.range(0, o["taps_x"]):
                tap = i * o["taps_x"] + j
                down = o["first_y"] + i * o["tap_y"]
                right = o["first_x"] + j * o["tap_x"]
                for c in f.range(0, o["channels"], _BLOCK):
                    for piece in f.range(first, last, _PIECE):
                        self._piece(f.bitcast(piece, ptr), tap, down, right, c)

    def _cut(self) -> Value:
        """Describe the pieces; gives their number."""
        f, o = self.f, self.o
        pixel = f["pixel"]

        def cut(at: Value, count: Value, y: Value, x: Value) -> list[Value]:
            piece = f.gep(self.pieces, count, _PIECE)
            f.store(y * o["step_y"], piece)
            f.store(x * o["step_x"], piece, 8)
            f.store(at, piece, 16)
            n = f.min(o["columns"] - x, self.lanes)
            ends = (x + n).eq(o["columns"])
            return [at + n, count + 1, y + ends.to(i64), f.select(ends, 0, x + n)]

        start = [f.i64(0), f.i64(0), pixel.udiv(o["columns"]), pixel.urem(o["columns"])]
        return f.while_(start, lambda at, *_: at < f["count"], cut)[1]

    def _piece(self, piece: Value, tap: Value, down: Value, right: Value, c: Value) -> None:
        f, o = self.f, self.o
        y, x = f.load(piece, i64) + down, f.load(piece, i64, 8) + right
        exists = (y >= 0) & (y < o["height"])
        limit = f.select(exists, o["width"], 0)
        stop = f.min(c + _BLOCK, o["channels"])
        term = tap * o["channels"] + c
        to = f.gep(f["panel"], term, self.term_bytes)
        to = f.gep(to, f.load(piece, i64, 16), self.sums)
        plane = o["height"] * o["width"]
        source = f.gep(f["image"], c * plane + y * o["width"] + x, self.size)

        def copy(inside: bool) -> None:
            read = self.line.reader(f, x, limit, o["step_x"], inside)

            def channel(k: Value, source: Value, to: Value) -> list[Value]:
                f.store(read(source), to)
                return [f.gep(source, plane, self.size), f.gep(to, self.term_bytes)]

            f.loop(c, stop, 1, [source, to], channel, guard=False)

        inside = self.line.is_inside(f, x, limit, o["step_x"])
        f.if_(inside, lambda: copy(True), lambda: copy(False))
