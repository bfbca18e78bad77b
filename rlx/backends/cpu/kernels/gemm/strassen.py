"""One level of Strassen's algorithm in Winograd's form: 7 multiplications of blocks instead of 8.

Rows are taken as pairs of tiles, columns as pairs of panels, k as two halves:

    S1 = A21 + A22    S2 = S1 - A11    S3 = A11 - A21    S4 = A12 - S2
    T1 = B12 - B11    T2 = B22 - T1    T3 = B22 - B12    T4 = B21 - T2

    P1 = A11·B11   P2 = A12·B21   P3 = S4·B22   P4 = A22·T4   P5 = S1·T1   P6 = S2·T2   P7 = S3·T3

    C11 = P1 + P2                 C12 = P1 + P6 + P5 + P3
    C21 = P1 + P6 + P7 + P4       C22 = P1 + P6 + P7 + P5

T1 to T4 are packed after the weight's panels; S1 to S4 are computed once per row block. The seven
products of a pair of tiles stay in the cache until k is done, then they are combined into C.

Error: a result carries the rounding of numbers as large as its block's largest. Rows of very
different scale in one pair of tiles cost the smaller ones their last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlx.backends.cpu.kernels.gemm.gemm import KC, Gemm, GemmEmitter, round_up, to_cache_line
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.ir.dtype import DType, f32
from rlx.llvm.builder import Function, Module, Value, i64, ptr
from rlx.llvm.storage import compute_type
from rlx.llvm.target import Target
from rlx.support.records import dataclass

MIN_ROWS = 48  # below so many rows plain GEMM is faster: it reads no sums of weights
MC = 128  # rows of a block, whose S1 to S4 are computed at a time
PANEL_GROUP = 4  # pairs of panels whose partial products are kept between k blocks
_GRAIN = 4  # a row block is a multiple of it: remainder rows cost a pair of tiles
_ODD = 3  # pairs of remainder tiles that a row block may end with
_PRODUCTS, _SUMS = 7, 4


def suits_strassen(target: Target, x: DType, w: DType, out: DType, k: int, n: int) -> bool:
    """Whether Strassen is faster: tiles must be large enough to pay for the additions, which those
    of narrow vectors are not."""
    if target.vector_bits < 256 or not x is w is out is f32:
        return False
    g = tall_tile(target)
    return k >= KC // 2 and k % (2 * g.lanes) == 0 and n % (2 * g.nr) == 0


def tall_tile(target: Target) -> TileShape:
    """As many accumulators as other tiles; with 32 registers 8 rows, which divide usual sequence
    lengths."""
    acc = compute_type(f32)
    if target.num_vector_registers < 32:
        return TileShape(acc, target.lanes(acc.bits), vectors=2)
    return TileShape(acc, target.lanes(acc.bits), vectors=3, mr=8)


@dataclass(frozen=True)
class Strassen(Gemm):
    """args: as `self.args` lists them. `w` is laid out as `strassenW`: panels, then T1 to T4."""

    def tile_shape(self, target: Target) -> TileShape:
        return tall_tile(target)

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        plain = super().scratch(target, rows, n, k)
        if rows < MIN_ROWS:
            return plain
        g, tall = self.tile_shape(target), round_up(min(rows, MC), _GRAIN)
        groups = 1 if k <= KC else min(n // (2 * g.nr), PANEL_GROUP)
        tiles = groups * (tall // (2 * g.mr) + _ODD) * _PRODUCTS
        sums = 2 * tall * min(round_up(k // 2, g.lanes), KC // 2) * g.acc.bytes
        return max(plain, round_up(sums, 64) + tiles * g.tile_bytes)

    def emit(self, m: Module) -> None:
        StrassenEmitter(self, m).emit()


class _Pair(NamedTuple):
    """Two tiles of rows: address and number of the first row, `height` rows of the upper tile, and
    `below` existing rows of the lower one."""

    x: Value
    row: Value
    height: Value
    below: Value


class StrassenEmitter(GemmEmitter):
    def __init__(self, spec: Strassen, m: Module) -> None:
        g = spec.tile_shape(m.target)
        self.add_rows, self.add_tiles = _emit_row_sums(m, g), _emit_tile_sums(m, g)
        super().__init__(spec, m)
        self.microkernel = self.microkernels.dispatcher(m)

    def emit(self) -> None:
        self.f.if_(self["m"] < MIN_ROWS, super().emit, self._strassen)

    def _strassen(self) -> None:
        pairs = self["n"].udiv(2 * self.columns)
        mc = self.choose_pair_mc(pairs)
        self.lay_out_pairs(pairs, mc)
        self.split_work(self.f.i64(1), mc, pairs, self.run_pairs)

    def choose_pair_mc(self, pairs: Value) -> Value:
        """Rows of a block."""
        rows = self.choose_mc(self["m"], pairs, MC)
        return self.f.ceil_div(rows, _GRAIN) * _GRAIN

    def lay_out_pairs(self, pairs: Value, mc: Value) -> None:
        """This worker's S1 to S4, and tiles."""
        f, g = self.f, self.g
        self.panels, self.half = pairs * 2, self["k"].udiv(2)
        self.kc = self.kc_of(self.half, KC // 2)
        self.one_k_block = self.kc >= self.half
        self.row_sums = f.gep(self["scratch"], f["tid"].to(i64) * self["worker_bytes"])
        self.tiles = f.gep(self.row_sums, to_cache_line(mc * self.kc * (2 * g.acc.bytes)))

    def kc_of(self, extent: Value, most: int) -> Value:
        """The size of equal k blocks of a part of k, in whole vectors."""
        f, lanes = self.f, self.g.lanes
        blocks = f.ceil_div(extent, most)
        return f.ceil_div((extent + blocks - 1).udiv(blocks), lanes) * lanes

    def run_pairs(
        self, x: Value, w: Value, rows: Value, at: Value, first: Value, last: Value
    ) -> None:
        """As `row_block`, with pairs of panels."""
        f = self.f
        group = f.select(self.one_k_block, f.max(last, 1), f.i64(PANEL_GROUP))
        slots = (rows.udiv(2 * self.g.mr) + _ODD) * _PRODUCTS
        for start in f.range(first, last, group):
            stop = f.min(start + group, last)
            for k in f.range(0, self.half, self.kc, guard=False):
                kc = f.min(self.kc, self.half - k)
                above = f.gep(x, k, self.g.acc)
                self._each_pair(above, rows, lambda pair, _: self._sum_rows(pair, kc))  # noqa: B023
                for p in f.range(start, stop):
                    slot = f.select(self.one_k_block, 0, (p - start) * slots)
                    operands = (
                        self._right_operands(w, p, k),
                        self._right_operands(w, f.min(p + 1, last - 1), k),
                    )
                    work = partial(self._pair, *operands, k, kc, slot, at, p * 2 * self.columns)
                    self._each_pair(above, rows, work)

    def _each_pair(self, x: Value, rows: Value, work: Callable[[_Pair, Value], None]) -> None:
        """Pairs of tiles with their numbers: full ones, then smaller ones for remainder rows."""
        f = self.f

        def step(r: Value, number: Value) -> list[Value]:
            left = rows - r
            height = f.select(left > 2, f.i64(2), f.i64(1))
            for size in (4, self.g.mr):
                height = f.select(left >= 2 * size, f.i64(size), height)
            below = f.min(left - height, height)
            work(_Pair(f.gep(x, r * self["x_stride_m"]), r, height, below), number)
            return [r + height * 2, number + 1]

        f.while_([f.i64(0), f.i64(0)], lambda r, _: r < rows, step)

    def _row_sums_of(self, pair: _Pair) -> Value:
        """Where S1 to S4 of a pair lie, contiguous."""
        return self.f.gep(self.row_sums, pair.row * self.kc, 2 * self.g.acc.bytes)

    def _sum_rows(self, pair: _Pair, kc: Value) -> None:
        f = self.f
        across = self.half * self.g.acc.bytes
        sizes = self["x_stride_m"], across, pair.height, pair.below, kc
        f.call(self.add_rows, pair.x, *sizes, self._row_sums_of(pair))

    def _right_operands(self, w: Value, p: Value, k: Value) -> list[Value]:
        """The weights of P1 to P7 from k on."""
        f, row, half = self.f, self.g.row_bytes, self.half
        left = f.gep(w, p * 4 * half + k, row)  # a panel is two halves
        low, right_low = f.gep(left, half, row), f.gep(left, half * 3, row)
        sums = f.gep(w, (self.panels + p * 2) * 2 * half + k, row)
        t1, t2, t3, t4 = (f.gep(sums, half * i, row) for i in range(_SUMS))
        return [left, low, right_low, t4, t1, t2, t3]

    def _pair(
        self,
        operands: list[Value],
        following: list[Value],
        k: Value,
        kc: Value,
        slot: Value,
        at: Value,
        column: Value,
        pair: _Pair,
        number: Value,
    ) -> None:
        """The seven products of a pair of tiles over one k block."""
        f, g = self.f, self.g
        slot = slot + f.select(self.one_k_block, 0, number * _PRODUCTS)
        tiles = f.gep(self.tiles, slot, g.tile_bytes)
        is_last = k + self.kc >= self.half
        results = self._results(pair, at, column)
        x_stride, short = self["x_stride_m"], kc * g.acc.bytes
        across = f.gep(pair.x, self.half, g.acc)
        lower = f.gep(across, f.min(pair.height, pair.height + pair.below - 1) * x_stride)
        sums = [f.gep(self._row_sums_of(pair), pair.height * kc * i, g.acc) for i in range(_SUMS)]
        rows = [(pair.x, x_stride), (across, x_stride), (sums[3], short), (lower, x_stride)]
        rows += [(s, short) for s in sums[:3]]
        for i, ((x, stride), w, then) in enumerate(zip(rows, operands, following, strict=True)):
            if i < len(results):
                count, to, _ = results[i]
                f.if_(is_last, partial(self._prefetch_out, count, to))
            count = f.max(pair.below, 1) if x is lower else pair.height
            ahead = self.microkernels.prefetch(f, number, w, kc, then)
            tile = f.gep(tiles, i * g.tile_bytes)
            f.call(
                self.microkernel, count, x, stride, kc, w, f.i64(self.panel_stride), tile, k, ahead
            )
        f.if_(is_last, partial(self._combine_pair, tiles, pair.height, results))

    def _results(self, pair: _Pair, at: Value, column: Value) -> list[tuple[Value, Value, Value]]:
        """For C11, C12, C21 and C22: rows, first element in the result, and column."""
        upper = at + pair.row * self["n"]
        parts = (pair.height, upper), (pair.below, upper + pair.height * self["n"])
        columns = column, column + self.columns
        return [(rows, to + c, c) for rows, to in parts for c in columns]

    def _combine_pair(
        self, tiles: Value, height: Value, results: list[tuple[Value, Value, Value]]
    ) -> None:
        f = self.f
        f.call(self.add_tiles, tiles, height)
        for i, (rows, to, column) in enumerate(results):
            self._run_epilogue(f.gep(tiles, i * self.g.tile_bytes), rows, to, column, f.null())


Blocks = Callable[[int, int], Value]
"""(row, column) of a 2x2 block matrix."""


def left_operand(number: int, a: Blocks) -> Value:
    """The left operand of product P1 to P7."""
    match number:
        case 1:
            return a(0, 0)
        case 2:
            return a(0, 1)
        case 3:
            return a(0, 1) - left_operand(6, a)
        case 4:
            return a(1, 1)
        case 5:
            return a(1, 0) + a(1, 1)
        case 6:
            return left_operand(5, a) - a(0, 0)
    return a(0, 0) - a(1, 0)


def _emit_row_sums(m: Module, g: TileShape) -> Function:
    """void row_sums(ptr x, i64 x_stride, i64 across, i64 height, i64 below, i64 kc, ptr out)

    S1 to S4, each [height][kc], of rows `x_stride` bytes apart whose second half of k begins
    `across` bytes after the first. The lower tile has `below` rows; missing ones repeat the last.
    """
    sizes = [(n, i64) for n in ("x_stride", "across", "height", "below", "kc")]
    f = m.function("row_sums", [("x", ptr), *sizes, ("out", ptr)], internal=True)
    wide, size = g.acc.with_lanes(g.lanes), g.acc
    last, each = f["height"] + f["below"] - 1, f["height"] * f["kc"]
    for i in f.range(0, f["height"]):
        upper = f.gep(f["x"], i * f["x_stride"])
        lower = f.gep(f["x"], f.min(f["height"] + i, last) * f["x_stride"])
        for k in f.range(0, f["kc"], g.lanes):
            places = f.gep(upper, k, size), f.gep(lower, k, size)
            a = [[f.load(p, wide), f.load(f.gep(p, f["across"]), wide)] for p in places]
            to = f.gep(f["out"], i * f["kc"] + k, size)
            for j, product in enumerate((5, 6, 7, 3)):
                s = left_operand(product, lambda r, c: a[r][c])  # noqa: B023
                f.store(s, f.gep(to, each * j, size))
    return f


def _emit_tile_sums(m: Module, g: TileShape) -> Function:
    """void tile_sums(ptr tiles, i64 rows): C11, C12, C21, C22 from P1 to P7, in place."""
    f = m.function("tile_sums", [("tiles", ptr), ("rows", i64)], internal=True)
    wide = g.acc.with_lanes(g.lanes)
    for at in f.range(0, f["rows"] * g.row_bytes, wide.bytes):
        places = [f.gep(f["tiles"], at + i * g.tile_bytes) for i in range(_PRODUCTS)]
        p1, p2, p3, p4, p5, p6, p7 = (f.load(p, wide) for p in places)
        u = p1 + p6
        v = u + p7
        for c, place in zip((p1 + p2, u + p5 + p3, v + p4, v + p5), places, strict=False):
            f.store(c, place)
    return f
