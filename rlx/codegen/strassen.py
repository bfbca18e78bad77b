"""Products with an eighth fewer multiplications: one step of Strassen's scheme in Winograd's form.

Rows are taken as pairs of tiles, columns as pairs of panels, k as two halves. The four products of
such blocks become seven, with sums of blocks in place of some:

    S1 = A21 + A22    S2 = S1 - A11    S3 = A11 - A21    S4 = A12 - S2
    T1 = B12 - B11    T2 = B22 - T1    T3 = B22 - B12    T4 = B21 - T2

    P1 = A11·B11   P2 = A12·B21   P3 = S4·B22   P4 = A22·T4   P5 = S1·T1   P6 = S2·T2   P7 = S3·T3

    C11 = P1 + P2                 C12 = P1 + P6 + P5 + P3
    C21 = P1 + P6 + P7 + P4       C22 = P1 + P6 + P7 + P5

T1 to T4 lie ready behind the weight's panels; S1 to S4 are made once for a chunk of rows. All seven
products of a pair of tiles stay near until k is through, then they are added and finished.

A result is off by the rounding of numbers as large as its block's, not only of its own: rows far
apart in scale that come to lie in one pair of tiles cost the smaller ones their last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from rlx.codegen.emit import Function, Module, Value, i64, ptr
from rlx.codegen.matmul import TERMS, Matmul, Product, round_up, up
from rlx.codegen.matmul_micro import Geometry
from rlx.codegen.storage import compute_type
from rlx.codegen.target import Target
from rlx.ir.dtype import DType, f32
from rlx.support.records import dataclass

FEW = 48  # rows below which weights are read but once: sums of them would be as much again
CHUNK = 128  # rows whose sums are made at a time
GROUP = 4  # pairs of panels whose unfinished products are kept between blocks of k
_GRAIN = 4  # rows that a chunk is a multiple of: odd ones at the end cost a pair of tiles
_ODD = 3  # pairs of smaller tiles that a chunk may end with
_PRODUCTS, _SUMS = 7, 4


def suits_strassen(target: Target, x: DType, w: DType, out: DType, k: int, n: int) -> bool:
    """Whether products of such operands are faster so: tiles must be large beside what is done to
    them once, which those of narrow vectors are not."""
    if target.vector_bits < 256 or not x is w is out is f32:
        return False
    g = tall_geometry(target)
    return k >= TERMS // 2 and k % (2 * g.lanes) == 0 and n % (2 * g.width) == 0


def tall_geometry(target: Target) -> Geometry:
    """Of as many sums as other tiles, but, where there are registers for it, with rows that divide
    usual lengths of texts."""
    sums = compute_type(f32)
    if target.num_vector_registers < 32:
        return Geometry.of(target, sums)
    return Geometry(sums, target.lanes(sums.bits), vectors=3, rows=8)


@dataclass(frozen=True)
class Strassen(Matmul):
    """args: as `self.args` lists them. `w` is laid out as `strassenW`: panels, then T1 to T4."""

    def geometry(self, target: Target) -> Geometry:
        return tall_geometry(target)

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        plain = super().scratch(target, rows, n, k)
        if rows < FEW:
            return plain
        g, tall = self.geometry(target), up(min(rows, CHUNK), _GRAIN)
        groups = 1 if k <= TERMS else min(n // (2 * g.width), GROUP)
        tiles = groups * (tall // (2 * g.rows) + _ODD) * _PRODUCTS
        sums = 2 * tall * min(up(k // 2, g.lanes), TERMS // 2) * g.sums.bytes
        return max(plain, up(sums, 64) + tiles * g.tile_bytes)

    def emit(self, m: Module) -> None:
        StrassenProduct(self, m).emit()


class _Pair(NamedTuple):
    """Two tiles of rows: the first row's address and number, `height` rows of the upper tile, and
    those of the lower one that exist."""

    x: Value
    row: Value
    height: Value
    below: Value


class StrassenProduct(Product):
    def __init__(self, spec: Strassen, m: Module) -> None:
        g = spec.geometry(m.target)
        self.add_rows, self.add_tiles = _emit_row_sums(m, g), _emit_tile_sums(m, g)
        super().__init__(spec, m)
        self.dot = self.dots.joined(m)

    def emit(self) -> None:
        self.f.if_(self["m"] < FEW, super().emit, self._in_blocks)

    def _in_blocks(self) -> None:
        pairs = self["n"].udiv(2 * self.columns)
        per_chunk = self.rows_of_pairs(pairs)
        self.lay_out_pairs(pairs, per_chunk)
        self.deal(self.f.i64(1), per_chunk, pairs, self.pairs_of)

    def rows_of_pairs(self, pairs: Value) -> Value:
        """Rows of a chunk."""
        rows = self.rows_per_chunk(self["m"], pairs, CHUNK)
        return self.f.ceil_div(rows, _GRAIN) * _GRAIN

    def lay_out_pairs(self, pairs: Value, per_chunk: Value) -> None:
        """This worker's sums of rows, and tiles."""
        f, g = self.f, self.g
        self.panels, self.half = pairs * 2, self["k"].udiv(2)
        self.terms = self.block_of(self.half, TERMS // 2)
        self.single = self.terms >= self.half
        self.row_sums = f.gep(self["scratch"], f["tid"].to(i64) * self["step"])
        self.tiles = f.gep(self.row_sums, round_up(per_chunk * self.terms * (2 * g.sums.bytes)))

    def block_of(self, part: Value, most: int) -> Value:
        """Terms of equal blocks of a part of k, whole vectors."""
        f, lanes = self.f, self.g.lanes
        blocks = f.ceil_div(part, most)
        return f.ceil_div((part + blocks - 1).udiv(blocks), lanes) * lanes

    def pairs_of(
        self, x: Value, w: Value, rows: Value, at: Value, first: Value, last: Value
    ) -> None:
        """As `chunk`, with pairs of panels."""
        f = self.f
        group = f.select(self.single, f.max(last, 1), f.i64(GROUP))
        slots = (rows.udiv(2 * self.g.rows) + _ODD) * _PRODUCTS
        for start in f.range(first, last, group):
            stop = f.min(start + group, last)
            for k in f.range(0, self.half, self.terms, guard=False):
                terms = f.min(self.terms, self.half - k)
                above = f.gep(x, k, self.g.sums)
                self._each_pair(above, rows, lambda pair, _: self._sum_rows(pair, terms))  # noqa: B023
                for p in f.range(start, stop):
                    slot = f.select(self.single, 0, (p - start) * slots)
                    operands = self._operands(w, p, k), self._operands(w, f.min(p + 1, last - 1), k)
                    work = partial(self._pair, *operands, k, terms, slot, at, p * 2 * self.columns)
                    self._each_pair(above, rows, work)

    def _each_pair(self, x: Value, rows: Value, work: Callable[[_Pair, Value], None]) -> None:
        """Pairs of tiles with their numbers: full ones, then ever smaller ones for what is left."""
        f = self.f

        def step(r: Value, number: Value) -> list[Value]:
            left = rows - r
            height = f.select(left > 2, f.i64(2), f.i64(1))
            for size in (4, self.g.rows):
                height = f.select(left >= 2 * size, f.i64(size), height)
            below = f.min(left - height, height)
            work(_Pair(f.gep(x, r * self["x_line"]), r, height, below), number)
            return [r + height * 2, number + 1]

        f.while_([f.i64(0), f.i64(0)], lambda r, _: r < rows, step)

    def _sums_of(self, pair: _Pair) -> Value:
        """Where S1 to S4 of a pair lie, one after the other."""
        return self.f.gep(self.row_sums, pair.row * self.terms, 2 * self.g.sums.bytes)

    def _sum_rows(self, pair: _Pair, terms: Value) -> None:
        f = self.f
        across = self.half * self.g.sums.bytes
        sizes = self["x_line"], across, pair.height, pair.below, terms
        f.call(self.add_rows, pair.x, *sizes, self._sums_of(pair))

    def _operands(self, w: Value, p: Value, k: Value) -> list[Value]:
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
        terms: Value,
        slot: Value,
        at: Value,
        column: Value,
        pair: _Pair,
        number: Value,
    ) -> None:
        """The seven products of a pair of tiles over one block of k."""
        f, g = self.f, self.g
        slot = slot + f.select(self.single, 0, number * _PRODUCTS)
        tiles = f.gep(self.tiles, slot, g.tile_bytes)
        is_last = k + self.terms >= self.half
        results = self._results(pair, at, column)
        line, short = self["x_line"], terms * g.sums.bytes
        across = f.gep(pair.x, self.half, g.sums)
        lower = f.gep(across, f.min(pair.height, pair.height + pair.below - 1) * line)
        sums = [f.gep(self._sums_of(pair), pair.height * terms * i, g.sums) for i in range(_SUMS)]
        rows = [(pair.x, line), (across, line), (sums[3], short), (lower, line)]
        rows += [(s, short) for s in sums[:3]]
        for i, ((x, stride), w, then) in enumerate(zip(rows, operands, following, strict=True)):
            if i < len(results):
                count, to, _ = results[i]
                f.if_(is_last, partial(self._ask, count, to))
            count = f.max(pair.below, 1) if x is lower else pair.height
            ahead = self.dots.ahead(f, number, w, terms, then)
            tile = f.gep(tiles, i * g.tile_bytes)
            f.call(self.dot, count, x, stride, terms, w, f.i64(self.step), tile, k, ahead)
        f.if_(is_last, partial(self._finish_pair, tiles, pair.height, results))

    def _results(self, pair: _Pair, at: Value, column: Value) -> list[tuple[Value, Value, Value]]:
        """Of C11, C12, C21 and C22: rows, where they begin in the result, and column."""
        upper = at + pair.row * self["n"]
        parts = (pair.height, upper), (pair.below, upper + pair.height * self["n"])
        columns = column, column + self.columns
        return [(rows, to + c, c) for rows, to in parts for c in columns]

    def _finish_pair(
        self, tiles: Value, height: Value, results: list[tuple[Value, Value, Value]]
    ) -> None:
        f = self.f
        f.call(self.add_tiles, tiles, height)
        for i, (rows, to, column) in enumerate(results):
            self._finish(f.gep(tiles, i * self.g.tile_bytes), rows, to, column, f.null())


Blocks = Callable[[int, int], Value]
"""(row, column): a block of two by two."""


def left_operand(number: int, a: Blocks) -> Value:
    """Of P1 to P7, by their numbers."""
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


def _emit_row_sums(m: Module, g: Geometry) -> Function:
    """void row_sums(ptr x, i64 line, i64 across, i64 height, i64 below, i64 terms, ptr out)

    S1 to S4, each [height][terms], of rows `line` bytes apart whose second half of k begins
    `across` bytes behind the first. Of the lower tile `below` rows exist; the last row stands for
    others.
    """
    sizes = [(n, i64) for n in ("line", "across", "height", "below", "terms")]
    f = m.function("row_sums", [("x", ptr), *sizes, ("out", ptr)], internal=True)
    wide, size = g.sums.with_lanes(g.lanes), g.sums
    last, each = f["height"] + f["below"] - 1, f["height"] * f["terms"]
    for i in f.range(0, f["height"]):
        upper = f.gep(f["x"], i * f["line"])
        lower = f.gep(f["x"], f.min(f["height"] + i, last) * f["line"])
        for k in f.range(0, f["terms"], g.lanes):
            places = f.gep(upper, k, size), f.gep(lower, k, size)
            a = [[f.load(p, wide), f.load(f.gep(p, f["across"]), wide)] for p in places]
            to = f.gep(f["out"], i * f["terms"] + k, size)
            for j, product in enumerate((5, 6, 7, 3)):
                s = left_operand(product, lambda r, c: a[r][c])  # noqa: B023
                f.store(s, f.gep(to, each * j, size))
    return f


def _emit_tile_sums(m: Module, g: Geometry) -> Function:
    """void tile_sums(ptr tiles, i64 rows): C11, C12, C21, C22 from P1 to P7, in their place."""
    f = m.function("tile_sums", [("tiles", ptr), ("rows", i64)], internal=True)
    wide = g.sums.with_lanes(g.lanes)
    for at in f.range(0, f["rows"] * g.row_bytes, wide.bytes):
        places = [f.gep(f["tiles"], at + i * g.tile_bytes) for i in range(_PRODUCTS)]
        p1, p2, p3, p4, p5, p6, p7 = (f.load(p, wide) for p in places)
        u = p1 + p6
        v = u + p7
        for c, place in zip((p1 + p2, u + p5 + p3, v + p4, v + p5), places, strict=False):
            f.store(c, place)
    return f
