"""GEMM with weights dequantised on the fly: any scheme, on any target.

A group of columns is dequantised, row by row of the stored weight, and multiplied with all rows of
a block, which share the cost. Neither operand is packed: sums run along k, which is contiguous in
both. Long sums are cut at fixed places, so that what is dequantised stays in the cache; the parts
are added in order.

Every result has an accumulator of its own, whose lanes take k in turn. They are added up at the
end, in one order: the bits of a result do not depend on the rows and columns beside it.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.kernels.gemm.epilogue import emit_epilogue
from rlx.backends.cpu.kernels.gemm.gemm import Gemm, round_up
from rlx.backends.cpu.kernels.gemm.grouped_gemm import GroupedGemm, each_chunk
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.backends.cpu.kernels.qgemm.dequantize import emit_dequantize
from rlx.ir.dtype import DType
from rlx.ir.dtype import f32 as f32_elements
from rlx.ir.quant.scheme import GGUF_SCHEMES, QuantScheme
from rlx.llvm.builder import Function, Module, Value, f32, i32, i64, ptr, vec
from rlx.llvm.horizontal import reduce_lanes
from rlx.llvm.storage import load, memory_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

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


_GROUP = 16  # columns that are dequantised for a block of rows
_FEW_ROWS = 12  # so many rows take the columns of a tile as soon as they are there
_ROWS = 256  # of a block
_KC = 1024  # k of a part
_PADDING = 16  # floats between columns, so that they lie in different sets of the cache
_POINTERS = frozenset(["x", "w", "out", "scratch", "scale", "zp", "table"])
_F32 = GGUF_SCHEMES["F32"]


def dequant_kc(scheme: QuantScheme) -> int:
    """k of a part: about `_KC`, in whole blocks."""
    run = scheme.block or scheme.block_size
    return max(_KC // run, 1) * run


@dataclass(frozen=True)
class DequantGemm(Gemm):
    """args: as `self.args` lists them; `w`, `scale` and `zp` are the weight's, with
    `row`, `scale_row` and `zp_row` bytes to a row."""

    scheme: QuantScheme = _F32

    @property
    def args(self) -> list[str]:
        return [*super().args, "scale", "zp", "row", "scale_row", "zp_row"]

    @property
    def label(self) -> str:
        return f"dequant_gemm {self.scheme}"

    def tile_shape(self, target: Target) -> TileShape:
        lanes = target.lanes(32)
        return TileShape(f32, lanes, _GROUP // lanes)

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        tall = round_up(min(rows, _ROWS), max(tile_heights(target)))
        return self.group_bytes + tall * self.tile_shape(target).row_bytes

    @property
    def pitch(self) -> int:
        """Bytes from one dequantised column to the next."""
        return 4 * (dequant_kc(self.scheme) + _PADDING)

    @property
    def group_bytes(self) -> int:
        return round_up(_GROUP * self.pitch, 64)

    def emit(self, m: Module) -> None:
        DequantGemmEmitter(self, m).emit()


class DequantGemmEmitter:
    """Emits the functions of one spec and the kernel that calls them."""

    routed = False

    def __init__(self, spec: DequantGemm, m: Module) -> None:
        self.spec, self.shape = spec, spec.tile_shape(m.target)
        self.dequantize = emit_dequantize(m, spec.scheme)
        self.heights = tile_heights(m.target)
        self.dots = {r: emit_dots(m, spec.x, r, self.routed) for r in self.heights}
        self.epilogue = emit_epilogue(m, self.shape, spec.epilogue, spec.args, self.routed)
        self.f = m.kernel()
        self.given = {name: self.arg(self.f, name) for name in spec.args}
        offset = self.f["tid"].to(i64) * self["worker_bytes"]
        self.columns = self.f.gep(self["scratch"], offset)
        self.tile = self.f.gep(self.columns, spec.group_bytes)

    def arg(self, f: Function, name: str) -> Value:
        index = self.spec.args.index(name)
        return f.arg(f["args"], index, ptr if name in _POINTERS else i64)

    def __getitem__(self, name: str) -> Value:
        return self.given[name]

    def emit(self) -> None:
        f, rows = self.f, self["m"]
        groups = f.ceil_div(self["n"], _GROUP)
        # Row blocks differ by at most a row, so that equal ranges of units are equal work.
        row_blocks = f.ceil_div(rows, _ROWS)
        lo, hi = f.split(row_blocks * groups)
        for unit in f.range(lo, hi):
            block = unit.udiv(groups)
            first, last = ((b * rows).udiv(row_blocks) for b in (block, block + 1))
            x = f.gep(self["x"], first * self["x_stride_m"])
            at = first * self["n"]
            self.group(x, f.i64(0), unit - block * groups, last - first, at, f.null())

    def group(
        self, x: Value, before: Value, group: Value, rows: Value, at: Value, route: Value
    ) -> None:
        """Some rows against a group of columns; `before` rows of the weight belong to others."""
        f, k, kc = self.f, self["k"], dequant_kc(self.spec.scheme)
        column = group * _GROUP
        at_once = f.select(rows <= _FEW_ROWS, f.i64(COLUMNS), f.i64(_GROUP))
        for first in f.range(0, k, kc, guard=False):
            count = f.min(k - first, kc)
            part = f.gep(x, first * self["x_stride_k"])
            for c in f.range(0, _GROUP, at_once):
                self._dequantize(before, column + c, at_once, first, count)
                for r in f.range(0, rows, max(self.heights)):
                    self._tiles(part, r, rows - r, c, at_once, count, first, route)
        f.call(self.epilogue, f["args"], self.tile, rows, at + column, column, route)

    def _dequantize(
        self, before: Value, column: Value, columns: Value, first: Value, count: Value
    ) -> None:
        """Columns from `column` on; the last one is taken for those beyond it."""
        f, last = self.f, self["n"] - 1
        names = (("w", "row"), ("scale", "scale_row"), ("zp", "zp_row"))
        for i in f.range(0, columns):
            row = before + f.min(column + i, last)
            places = [f.gep(self[base], row * self[step]) for base, step in names]
            f.call(self.dequantize, *places, first, count, f.gep(self.columns, i, self.spec.pitch))

    def _tiles(
        self,
        x: Value,
        r: Value,
        left: Value,
        c: Value,
        columns: Value,
        count: Value,
        first: Value,
        route: Value,
    ) -> None:
        """A tile of rows against all columns that are dequantised."""
        f, width = self.f, self.shape.row_bytes
        if not self.routed:
            x = f.gep(x, r * self["x_stride_m"])
        here = f.gep(route, r, 4) if self.routed else route
        height = f.i64(self.heights[0])
        for size in self.heights[1:]:
            height = f.select(left <= size, f.i64(size), height)
        for j in f.range(0, columns, COLUMNS):
            tile = f.gep(f.gep(self.tile, r, width), c + j, 4)
            w = f.gep(self.columns, j, self.spec.pitch)
            given = (
                x, self["x_stride_m"], here, left, w, f.i64(self.spec.pitch), count, tile,
                f.i64(width), first,
            )  # fmt: skip
            f.switch(height, {s: partial(self._run, d, given) for s, d in self.dots.items()})

    def _run(self, dots: Function, given: tuple[Value, ...]) -> None:
        self.f.call(dots, *given)


@dataclass(frozen=True)
class DequantGroupedGemm(DequantGemm, GroupedGemm):
    """args: those of `DequantGemm`, and `table`, `w_expert` as for `GroupedGemm`."""

    def emit(self, m: Module) -> None:
        _DequantGroupedEmitter(self, m).emit()


class _DequantGroupedEmitter(DequantGemmEmitter):
    routed = True

    def emit(self) -> None:
        f = self.f
        groups = f.ceil_div(self["n"], _GROUP)
        for chunk in each_chunk(f, self["table"], self["m"], groups):
            before = chunk.expert * self["n"]
            for g in f.range(chunk.first, chunk.last):
                self.group(self["x"], before, g, chunk.size, f.i64(0), chunk.route)
