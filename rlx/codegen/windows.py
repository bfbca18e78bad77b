"""Walking over the windows of an image: what pooling and depthwise convolutions have in common.

Workers take runs of output lines. In each plane, blocks of columns come one after the other, so
that which of their inputs exist is found once for all lines of the plane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from rlx.codegen.emit import Function, Value
from rlx.codegen.line import Line, store_some
from rlx.codegen.operands import Operands
from rlx.codegen.storage import memory_type
from rlx.ir.dtype import DType

GROUP = 4  # vectors of a line that are computed together where they fit
_MOST_TAPS = 8  # of a row of taps that become straight code

GEOMETRY = ["height", "width", "lines", "columns", "step_y", "step_x"]
GEOMETRY += ["taps_y", "first_y", "tap_y", "first_x"]
"""Args every kernel over windows has. Output (y, x) meets with tap (i, j) the input
(y·step_y + first_y + i·tap_y, x·step_x + first_x + j·tap_x)."""

Reader = Callable[[Value], Value]


class Windows(ABC):
    """Emits the walk. A kernel says what begins a sum, what a tap adds, and what is stored."""

    def __init__(
        self, f: Function, o: Operands, line: Line, out: DType, taps_x: int, tap_x: int
    ) -> None:
        self.f, self.o, self.line, self.dtype = f, o, line, out
        self.taps_x, self.tap_x, self.lanes = taps_x, tap_x, line.lanes

    @abstractmethod
    def enter(self, plane: Value) -> Value:
        """Begin a plane of results; gives the number of the plane of inputs it is made of."""

    @abstractmethod
    def begin(self) -> Value:
        """A vector that nothing was added to."""

    @abstractmethod
    def tap(self, sums: list[Value], inputs: list[Value] | None, i: Value, j: Value) -> list[Value]:
        """Sums with the inputs under tap (i, j); None where the line lies outside the image."""

    def finish(self, total: Value, top: Value, left: Value) -> Value:
        """What is stored, from the sum and the place of the window's first input."""
        return total

    def emit(self, planes: Value) -> None:
        """Code for all planes of results."""
        f, o = self.f, self.o
        lo, hi = f.split(planes * o["lines"])
        lines = f.max(o["lines"], 1)
        for plane in f.range(lo.udiv(lines), (hi + lines - 1).udiv(lines)):
            first = f.max(lo - plane * lines, 0)
            last = f.min(hi - plane * lines, lines)
            self._plane(plane, first, last)

    def _plane(self, plane: Value, first: Value, last: Value) -> None:
        f, o = self.f, self.o
        image = self.enter(plane)
        size = memory_type(self.line.dtype).bytes
        self.image = f.gep(o["x"], image * (o["height"] * o["width"]), size)
        results = plane * (o["lines"] * o["columns"])
        self.out = f.gep(o["out"], results, memory_type(self.dtype).bytes)
        f.while_([f.i64(0)], lambda x: x < o["columns"], lambda x: self._columns(x, first, last))

    def _columns(self, x: Value, first: Value, last: Value) -> Value:
        """The columns from x on that one set of vectors holds; gives the column after them."""
        f, o = self.f, self.o
        left = x * o["step_x"] + o["first_x"]
        right = left + (self.taps_x - 1) * self.tap_x

        def fits(vectors: int) -> Value:
            ahead = right + o["step_x"] * ((vectors - 1) * self.lanes)
            inside = self.line.is_inside(f, ahead, o["width"], o["step_x"])
            return (left >= 0) & inside & (o["columns"] - x >= vectors * self.lanes)

        def run(vectors: int, inside: bool) -> Value:
            starts = [left + o["step_x"] * (v * self.lanes) for v in range(vectors)]
            self._block(x, starts, first, last, inside)
            return x + vectors * self.lanes

        def one() -> list[Value]:
            return f.if_(fits(1), lambda: run(1, True), lambda: run(1, False))

        return f.if_(fits(GROUP), lambda: run(GROUP, True), one)[0]

    def _block(
        self, x: Value, starts: list[Value], first: Value, last: Value, inside: bool
    ) -> None:
        f, o = self.f, self.o
        known = [self._readers(starts, f.i64(j), inside) for j in self._straight]
        mask = None if inside else f.lane_mask(o["columns"] - x, self.lanes)
        size = memory_type(self.dtype).bytes
        for y in f.range(first, last):
            top = y * o["step_y"] + o["first_y"]

            def row(i: Value, *sums: Value, top: Value = top) -> list[Value]:
                return self._row(i, top + i * o["tap_y"], starts, known, list(sums), inside)

            sums = f.loop(0, o["taps_y"], 1, [self.begin()] * len(starts), row)
            for v, total in enumerate(sums):
                place = y * o["columns"] + x + v * self.lanes
                value = self.finish(total, top, starts[v])
                store_some(f, value, f.gep(self.out, place, size), self.dtype, mask)

    @property
    def _straight(self) -> range:
        """Taps of a row that are written out; many become a loop instead."""
        return range(self.taps_x if self.taps_x <= _MOST_TAPS else 0)

    def _readers(self, starts: list[Value], j: Value, inside: bool) -> list[tuple[Value, Reader]]:
        f, o = self.f, self.o
        places = [start + j * self.tap_x for start in starts]
        return [(at, self.line.reader(f, at, o["width"], o["step_x"], inside)) for at in places]

    def _row(
        self,
        i: Value,
        y: Value,
        starts: list[Value],
        known: list[list[tuple[Value, Reader]]],
        sums: list[Value],
        inside: bool,
    ) -> list[Value]:
        """Row i of the taps over line y of the image."""
        f, o = self.f, self.o
        size = memory_type(self.line.dtype).bytes
        line = f.gep(self.image, y * o["width"], size)

        def add(j: Value, readers: list[tuple[Value, Reader]], sums: list[Value]) -> list[Value]:
            inputs = [read(f.gep(line, at, size)) for at, read in readers]
            return self.tap(sums, inputs, i, j)

        def found(j: Value, *sums: Value) -> list[Value]:
            return add(j, self._readers(starts, j, inside), list(sums))

        def existing() -> list[Value]:
            out = sums
            for j, readers in enumerate(known):
                out = add(f.i64(j), readers, out)
            return out if known else f.loop(0, self.taps_x, 1, out, found)

        def missing() -> list[Value]:
            def none(j: Value, *sums: Value) -> list[Value]:
                return self.tap(list(sums), None, i, j)

            return f.loop(0, self.taps_x, 1, sums, none)

        return f.if_((y >= 0) & (y < o["height"]), existing, missing)
