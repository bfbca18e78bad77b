"""Dot products of a few rows with a few columns, both contiguous along k, in f32.

Every result has an accumulator of its own, whose lanes take k in turn. They are added up at the
end, in one order: the bits of a result do not depend on the rows and columns beside it.
"""

from __future__ import annotations

from functools import partial

from rlx.ir.dtype import DType
from rlx.ir.dtype import f32 as f32_elements
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64, ptr, vec
from rlx.llvm.horizontal import reduce_lanes
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target

COLUMNS = 4  # of a tile
_PARAMS = [
    ("x", ptr), ("stride", i64), ("route", ptr), ("count", i64), ("w", ptr), ("pitch", i64),
    ("k", i64), ("tile", ptr), ("width", i64), ("before", i64),
]  # fmt: skip


def tile_heights(target: Target) -> tuple[int, ...]:
    """Rows of tiles: as many as leave registers for x and a column."""
    return (6, 4, 2, 1) if target.num_vector_registers >= 32 else (3, 2, 1)


def emit_dots(m: Module, x: DType, rows: int, routed: bool) -> Function:
    """void dots(ptr x, i64 stride, ptr route, i64 count, ptr w, i64 pitch, i64 k, ptr tile,
    i64 width, i64 before)

    tile[i][j] = x[i] · w[j], added to what is there if k has parts `before` this one. Rows of x
    are `stride` bytes apart, columns of w `pitch` bytes, rows of the tile `width`. `count` rows
    exist, the last one is taken for the others. When `routed`, their numbers are in `route`.
    """
    f = m.function(f"dots{rows}", _PARAMS, internal=True)
    _Dots(f, x, rows, routed).emit()
    return f


class _Dots:
    def __init__(self, f: Function, x: DType, rows: int, routed: bool) -> None:
        self.f, self.x, self.lanes = f, x, f.target.lanes(32)
        last = f["count"] - 1
        numbers = [f.min(last, i) for i in range(rows)]
        if routed:
            numbers = [f.load(f.gep(f["route"], i, 4), i32).to(i64) for i in numbers]
        self.rows = [f.gep(f["x"], i * f["stride"]) for i in numbers]
        self.columns = [f.gep(f["w"], f["pitch"] * j) for j in range(COLUMNS)]

    def emit(self) -> None:
        f, k, is_first = self.f, self.f["k"], self.f["before"].eq(0)
        whole = k - k.urem(self.lanes)
        zeros = [f.const(0.0, vec(self.lanes, f32))] * (len(self.rows) * COLUMNS)
        lanes = f.loop(0, whole, self.lanes, zeros, self._step)
        parts = [lanes[i : i + COLUMNS] for i in range(0, len(lanes), COLUMNS)]
        sums = [reduce_lanes(f, part, COLUMNS)[0] for part in parts]
        for i, total in enumerate(f.loop(whole, k, 1, sums, self._single)):
            place = f.gep(f["tile"], f["width"] * i)
            f.if_(is_first, partial(f.store, total, place), partial(self._add, total, place))

    def _add(self, total: Value, place: Value) -> None:
        self.f.store(self.f.load(place, total.type) + total, place)

    def _step(self, at: Value, *sums: Value) -> list[Value]:
        """As many k as there are lanes."""
        f, out = self.f, list(sums)
        x = [self._read(row, self.x, at, self.lanes) for row in self.rows]
        for j, column in enumerate(self.columns):
            w = self._read(column, f32_elements, at, self.lanes)
            for i, value in enumerate(x):
                out[i * COLUMNS + j] = f.fma(value, w, out[i * COLUMNS + j])
        return out

    def _single(self, at: Value, *sums: Value) -> list[Value]:
        """One k of all columns."""
        f, w = self.f, self.f.const(0.0, vec(COLUMNS, f32))
        for j, column in enumerate(self.columns):
            w = f.insert(w, self._read(column, f32_elements, at, 1), j)
        x = [f.splat(self._read(row, self.x, at, 1), COLUMNS) for row in self.rows]
        return [f.fma(a, w, s) for a, s in zip(x, sums, strict=True)]

    def _read(self, base: Value, dtype: DType, at: Value, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, f32)
