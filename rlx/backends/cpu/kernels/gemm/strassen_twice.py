"""Two levels of Strassen's algorithm: 49 multiplications of blocks instead of 64.

Rows are taken in quads of tiles, columns in quads of panels, k in quarters. The algorithm of
`strassen.py` is applied to blocks of 2x2 tiles (the outer level), and again within each of its
seven products (the inner level). The first and third panel of a quad, and the second and fourth,
are the columns of one block: so the weight sums of one level are the outer sums of two.

A worker takes a quad of row tiles and runs the seven outer products one after another; the row
sums of the next outer product are computed between the multiplications of this one. Remainder
rows that are no whole quad go through one level.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from rlx.backends.cpu.kernels.gemm.gemm import KC, GemmEmitter, round_up, to_cache_line
from rlx.backends.cpu.kernels.gemm.microkernel import TileShape
from rlx.backends.cpu.kernels.gemm.strassen import (
    Strassen,
    StrassenEmitter,
    left_operand,
    tall_tile,
)
from rlx.llvm.builder import Function, Module, Value, i32, i64, ptr
from rlx.llvm.storage import LINE
from rlx.llvm.target import Target
from rlx.support.records import dataclass

PRODUCTS = 7
RESULTS = 16  # C tiles of a quad of row tiles and a quad of panels
SECTIONS = 3  # of a packed weight: its panels, outer sums, inner sums
STATE_BYTES = 16  # row sums computed so far, and the address of the next rows

_P5, _P1, _U, _V = range(4)  # saved tiles: U is P1 + P6, V is P1 + P6 + P7
INNER_TILES = 4
OUTER_TILES = 2 * 4  # U and V overwrite P1

_NONE, _CARRY = -1, -2  # no tile; the accumulators of the product before


class _Dataflow(NamedTuple):
    """How a product flows through saved tiles."""

    start: int = _NONE  # what its accumulators start from
    kept: int = _NONE  # where it is saved
    plus: int = _NONE  # the tile that is added after that
    block: int = _NONE  # the block of C that it then is


_INNER = {
    5: _Dataflow(kept=_P5),
    1: _Dataflow(kept=_P1),
    6: _Dataflow(_CARRY, kept=_U),
    7: _Dataflow(_CARRY, kept=_V, plus=_P5, block=3),
    4: _Dataflow(_V, block=2),
    2: _Dataflow(_P1, block=0),
    3: _Dataflow(_U, plus=_P5, block=1),
}
_OUTER = {
    5: _Dataflow(kept=_P5),
    1: _Dataflow(kept=_P1),
    2: _Dataflow(_P1, block=0),
    6: _Dataflow(_P1, kept=_P1),
    3: _Dataflow(_P1, plus=_P5, block=1),
    7: _Dataflow(_P1, kept=_P1, plus=_P5, block=3),
    4: _Dataflow(_P1, block=2),
}
_FIELDS = (
    "a", "section", "quarter", "start", "kept", "plus", "outer_start", "outer_kept", "outer_plus",
    "result",
)  # fmt: skip
_STEP_BYTES = 4 * len(_FIELDS)

# Where the right operands of P1 to P7 lie: halves of k of two panels, or T1 to T4 after them.
_RAW = {1: 0, 2: 1, 3: 3}
_SUMMED = {4: 3, 5: 0, 6: 1, 7: 2}


def _product_table(g: TileShape) -> bytes:
    """The 49 products in execution order, `_FIELDS` of each. Tiles are byte offsets."""
    fields = []
    for o, outer in _OUTER.items():
        for i, inner in _INNER.items():
            has_block = inner.block != _NONE
            blocks = [b * 4 + inner.block if has_block and b != _NONE else _NONE for b in outer]
            tiles = [inner.start, inner.kept, inner.plus, *blocks]
            fields += [(i - 1) * g.lanes * g.acc.bytes, *_weight(o, i)]
            fields += [t * g.tile_bytes if t >= 0 else t for t in tiles]
    return struct.pack(f"<{len(fields)}i", *fields)


def _weight(o: int, i: int) -> tuple[int, int]:
    """The right operand of inner product i of outer product o: byte offset of its section's
    address, and the quarter of k in that section."""
    if i in _SUMMED:
        return 2 * 8, (o - 1) * 4 + _SUMMED[i]
    section, half = (0, _RAW[o]) if o in _RAW else (8, _SUMMED[o])
    right, low = divmod(_RAW[i], 2)
    return section, 8 * right + 2 * half + low


_SUMS_PARAMS = [
    ("state", ptr), ("x_stride", i64), ("across", i64), ("kc", i64), ("out", ptr),
]  # fmt: skip


def emit_outer_row_sums(m: Module, g: TileShape) -> Function:
    """void sum_rows(i64 outer_index, ptr state, i64 x_stride, i64 across, i64 kc, ptr out)

    The remaining left operands of an outer product, [rows][kc / lanes][7] vectors: sums over four
    row tiles, `x_stride` bytes from row to row, whose quarters of k are `across` bytes apart.
    """
    f = m.function("sum_rows", [("outer_index", i64), *_SUMS_PARAMS], internal=True)
    end = f["kc"] * g.mr

    def all_left(one: Callable[[Value], Value]) -> None:
        f.while_([f.load(f["state"], i64)], lambda done: done < end, one)

    _switch_outer(f, g, f["outer_index"], all_left)
    return f


def _switch_outer(
    f: Function, g: TileShape, outer_index: Value, work: Callable[[Callable[[Value], Value]], None]
) -> None:
    """work(one), where one(done) computes the next row sums of an outer product."""
    f.switch(
        outer_index, {n: partial(work, partial(_sum_rows, f, g, o)) for n, o in enumerate(_OUTER)}
    )


def _sum_rows(f: Function, g: TileShape, outer: int, done: Value) -> Value:
    """One vector of each left operand of an outer product; returns how many elements are done."""
    wide, size = g.acc.with_lanes(g.lanes), g.acc.bytes
    x = f.load(f["state"], ptr, 8)

    @cache
    def part(tile: int, k: int) -> Value:
        row = f.gep(x, f["x_stride"] * (tile * g.mr))
        return f.load(f.gep(row, f["across"] * k), wide)

    @cache
    def operand(row: int, k: int) -> Value:
        """The left operand of the outer product, for one of two row tiles and quarters of k."""
        return left_operand(outer, lambda i, j: part(2 * i + row, 2 * j + k))

    to = f.gep(f["out"], done, PRODUCTS * size)
    for i in range(PRODUCTS):
        f.store(left_operand(i + 1, operand), to, i * wide.bytes)
    then = done + g.lanes
    is_row_end = then.urem(f["kc"]).eq(0)
    on = f.select(is_row_end, f["x_stride"] - (f["kc"] - g.lanes) * size, wide.bytes)
    f.store(then, f["state"])
    f.store(f.gep(x, on), f["state"], 8)
    return then


_PARAMS = [
    ("args", ptr), ("outer_index", i64), ("a", ptr), ("quarter", i64), ("sections", ptr),
    ("inner", ptr), ("outer", ptr), ("k", i64), ("is_last", i64), ("at", i64), ("column", i64),
]  # fmt: skip


class InnerProducts:
    """void inner_products(ptr args, i64 outer_index, ptr a, i64 quarter, ptr sections, ptr inner,
    ptr outer, i64 k, i64 is_last, i64 at, i64 column, ptr state, i64 x_stride, i64 across, i64 kc,
    ptr out)

    The seven inner products of one outer product, for a quad of row tiles and a quad of panels over
    one k block. `a` holds the left operands. `sections` are the addresses of the right ones, which
    are quarters of `quarter` bytes. `inner` and `outer` are saved tiles. C tiles are accumulated
    over the k blocks; the last one runs the epilogue, at element `at` and column `column`. From
    `state` on: the arguments of `sum_rows`, for the next outer product.
    """

    def __init__(self, gemm: GemmEmitter, m: Module) -> None:
        g = gemm.g
        self.f = f = m.function("inner_products", [*_PARAMS, *_SUMS_PARAMS], internal=True)
        self.gemm, self.g = gemm, g
        self.wide = g.acc.with_lanes(g.lanes)
        self.places = [i * self.wide.bytes for i in range(g.mr * g.vectors)]
        self.zeros = [f.const(0, self.wide)] * len(self.places)
        self.results = f.gep(f["outer"], OUTER_TILES * g.tile_bytes)
        self.result, self.n = gemm.arg(f, "out"), gemm.arg(f, "n")
        self.table = m.table(f, _product_table(g))
        first = f["outer_index"] * PRODUCTS
        f.loop(first, first + PRODUCTS, 1, self.zeros, self._product, guard=False)

    def _product(self, number: Value, *before: Value) -> list[Value]:
        """One inner product: start, multiply, and add to saved tiles or to C."""
        f = self.f
        step = self._entry(number)
        is_result = step["result"] >= 0
        f.if_(
            is_result & f["is_last"].ne(0), lambda: self._prefetch_out(*self._tile_corner(step)[:1])
        )
        start = step["start"]
        sums = f.if_(
            start >= 0,
            lambda: self._read(f.gep(f["inner"], start)),
            lambda: f.if_(start.eq(_CARRY), lambda: list(before), lambda: self.zeros),
        )
        following = self._entry(f.min(number + 1, PRODUCTS * PRODUCTS - 1))
        sums = self._multiply(sums, step, self._weights(following))
        self._keep(f["inner"], step["kept"], sums)
        sums = self._plus(f["inner"], step["plus"], sums)
        sums = self._plus(f["outer"], step["outer_start"], sums)
        self._keep(f["outer"], step["outer_kept"], sums)
        sums = self._plus(f["outer"], step["outer_plus"], sums)
        return f.if_(is_result, lambda: self._store_result(step, sums), lambda: sums)

    def _entry(self, number: Value) -> dict[str, Value]:
        f = self.f
        entry = f.gep(self.table, number, _STEP_BYTES)
        return {name: f.load(entry, i32, 4 * i).to(i64) for i, name in enumerate(_FIELDS)}

    def _weights(self, step: dict[str, Value]) -> Value:
        section = self.f.load(self.f.gep(self.f["sections"], step["section"]), ptr)
        return self.f.gep(section, step["quarter"] * self.f["quarter"])

    def _read(self, tile: Value) -> list[Value]:
        return [self.f.load(tile, self.wide, at) for at in self.places]

    def _write(self, tile: Value, sums: list[Value]) -> None:
        for at, value in zip(self.places, sums, strict=True):
            self.f.store(value, tile, at)

    def _keep(self, tiles: Value, tile: Value, sums: list[Value]) -> None:
        self.f.if_(tile >= 0, lambda: self._write(self.f.gep(tiles, tile), sums))

    def _plus(self, tiles: Value, tile: Value, sums: list[Value]) -> list[Value]:
        def added() -> list[Value]:
            there = self._read(self.f.gep(tiles, tile))
            return [a + b for a, b in zip(sums, there, strict=True)]

        return self.f.if_(tile >= 0, added, lambda: sums)

    def _multiply(
        self, sums: list[Value], step: dict[str, Value], next_weights: Value
    ) -> list[Value]:
        """Accumulate the product; the weights of the next one are prefetched."""
        f, g = self.f, self.g
        b, x = self._weights(step), f.gep(f["a"], step["a"])
        x_stride = f["kc"] * (PRODUCTS * g.acc.bytes)
        end = f["kc"] * g.mr

        def vector(k: Value, *sums: Value) -> list[Value]:
            rows = [f.gep(x, x_stride * r + k * (PRODUCTS * g.acc.bytes)) for r in range(g.mr)]
            here, ahead = f.gep(b, k, g.row_bytes), f.gep(next_weights, k, g.row_bytes)
            step = partial(self._rank_one, rows, here, ahead)
            out = f.loop(0, g.lanes, 1, list(sums), step)
            done = f.load(f["state"], i64)

            def sum_one(one: Callable[[Value], Value]) -> None:
                one(done)

            f.if_(done < end, lambda: _switch_outer(f, g, f["outer_index"] + 1, sum_one))
            return out

        return f.loop(0, f["kc"], g.lanes, sums, vector, guard=False)

    def _rank_one(
        self, rows: list[Value], b: Value, ahead: Value, i: Value, *sums: Value
    ) -> list[Value]:
        f, g = self.f, self.g
        for at in range(0, g.row_bytes, LINE):
            f.prefetch(f.gep(ahead, i, g.row_bytes), at, locality=2)
        weights = f.gep(b, i, g.row_bytes)
        columns = [f.load(weights, self.wide, j * self.wide.bytes) for j in range(g.vectors)]
        elements = [f.broadcast_load(f.gep(r, i, g.acc), g.acc, g.lanes, 0) for r in rows]
        products = [(a, c) for a in elements for c in columns]
        return [f.fma(a, c, s) for (a, c), s in zip(products, sums, strict=True)]

    def _tile_corner(self, step: dict[str, Value]) -> tuple[Value, Value]:
        """The element and the column of the top left corner of a C tile."""
        f, g = self.f, self.g
        block = step["result"].udiv(g.tile_bytes)
        outer, inner = block.udiv(4), block & 3
        row = ((outer & 2) + inner.udiv(2)) * g.mr
        column = ((inner & 1) * 2 + (outer & 1)) * self.gemm.columns
        return f["at"] + row * self.n + column, f["column"] + column

    def _prefetch_out(self, at: Value) -> None:
        """Prefetch the rows of a C tile while it is computed."""
        f, g = self.f, self.g
        for r in range(g.mr):
            row = f.gep(self.result, at + self.n * r, g.acc)
            for line in range(0, g.row_bytes, LINE):
                f.prefetch(row, line)

    def _store_result(self, step: dict[str, Value], sums: list[Value]) -> list[Value]:
        """Accumulate a C tile; the last k block runs its epilogue."""
        f = self.f
        tile = f.select(f["k"] > 0, step["result"], f.i64(_NONE))
        self._write(f.gep(self.results, step["result"]), self._plus(self.results, tile, sums))

        def epilogue() -> None:
            rows, (at, column) = f.i64(self.g.mr), self._tile_corner(step)
            done = f.gep(self.results, step["result"])
            f.call(self.gemm.epilogue, f["args"], done, rows, at, column, f.null())

        f.if_(f["is_last"].ne(0), epilogue)
        return self.zeros


_MAX_ELEMENTS = 1 << 20  # of a weight: with its sums it takes 3.75 times its size
_KC = 384  # per block of a quarter of k
_QUAD_GROUP = 4  # quads of panels that share the row sums
_MIN_UNITS = 2  # units of work per worker, at least


def suits_twice(target: Target, k: int, n: int) -> bool:
    """Whether two levels are faster than one, for a weight that suits one. They are not on Zen 5:
    1,024 tokens of MiniLM take a core 95.1 ms by plain GEMM, 89.7 by one level, 92.6 by two."""
    if target.cpu == "znver5":
        return False
    g = tall_tile(target)
    whole = k >= KC and k % (4 * g.lanes) == 0 and n % (4 * g.nr) == 0
    return whole and target.num_vector_registers >= 32 and k * n <= _MAX_ELEMENTS


@dataclass(frozen=True)
class StrassenTwice(Strassen):
    """args: as `self.args` lists them. `w` is laid out as `twiceW`."""

    def scratch(self, target: Target, rows: int, n: int, k: int) -> int:
        g = self.tile_shape(target)
        sums = 2 * PRODUCTS * g.mr * min(round_up(k // 4, g.lanes), _KC) * g.acc.bytes
        tiles = (INNER_TILES + _QUAD_GROUP * (OUTER_TILES + RESULTS)) * g.tile_bytes
        return max(super().scratch(target, rows, n, k), round_up(sums, 64) + tiles)

    def emit(self, m: Module) -> None:
        _StrassenTwiceEmitter(self, m).emit()


class _StrassenTwiceEmitter(StrassenEmitter):
    def __init__(self, spec: StrassenTwice, m: Module) -> None:
        self.sum_rows = emit_outer_row_sums(m, spec.tile_shape(m.target))
        super().__init__(spec, m)
        self.inner_products = InnerProducts(self, m).f

    def _strassen(self) -> None:
        """Two levels where there are enough quads for the workers, else one."""
        f = self.f
        pairs, tall = self["n"].udiv(2 * self.columns), self.g.mr * 4
        quads = self["m"].udiv(tall)
        enough = (quads > 1) & ((quads * pairs).udiv(2) >= f["nth"].to(i64) * _MIN_UNITS)
        mc = f.select(enough, tall, self.choose_pair_mc(pairs))
        self.lay_out_pairs(pairs, mc)
        self._lay_out_quads()
        each = f.select(enough, 2, f.i64(1))  # pairs of a unit
        columns = pairs.udiv(each)
        lo, hi = self._worker_range(columns, mc)

        def run(unit: Value) -> Value:
            row_block = unit.udiv(columns)
            first = unit - row_block * columns
            last = f.min(columns, first + (hi - unit))
            row = row_block * mc
            x, at = f.gep(self["x"], row * self["x_stride_m"]), row * self["n"]
            rows = f.min(mc, self["m"] - row)
            f.if_(
                enough & rows.eq(tall),
                lambda: self._run_quads(x, at, first, last),
                lambda: self.run_pairs(x, self["w"], rows, at, first * each, last * each),
            )
            return unit + (last - first)

        f.while_([lo], lambda u: u < hi, run)

    def _worker_range(self, columns: Value, mc: Value) -> tuple[Value, Value]:
        """The units of this worker: those of the last row block may be smaller."""
        f, workers = self.f, self.f["nth"].to(i64)
        whole = self["m"].udiv(mc) * columns
        left = self["m"].urem(mc)

        def start(worker: Value) -> Value:
            rows = (self["m"] * columns * worker).udiv(workers)
            beyond = rows - whole * mc
            among = (rows + mc.udiv(2)).udiv(mc)
            last = (beyond + left - 1).udiv(f.max(left, 1))
            return f.select(beyond > 0, whole + last, among)

        tid = f["tid"].to(i64)
        return start(tid), start(tid + 1)

    def _lay_out_quads(self) -> None:
        """This worker's row sums of two outer products, and tiles; in place of those of pairs."""
        f, g = self.f, self.g
        self.quarter = self["k"].udiv(4)
        self.quarter_kc = self.kc_of(self.quarter, _KC)
        size = self.quarter_kc * (2 * PRODUCTS * g.mr * g.acc.bytes)
        self.inner = f.gep(self.row_sums, to_cache_line(size))
        self.outer = f.gep(self.inner, INNER_TILES * g.tile_bytes)
        self.sections, self.state = f.alloca(SECTIONS * 8), f.alloca(STATE_BYTES)

    def _run_quads(self, x: Value, at: Value, first: Value, last: Value) -> None:
        """A quad of row tiles against quads of panels."""
        f = self.f
        for start in f.range(first, last, _QUAD_GROUP):
            stop = f.min(start + _QUAD_GROUP, last)
            for k in f.range(0, self.quarter, self.quarter_kc, guard=False):
                self._run_outer(f.gep(x, k, self.g.acc), at, start, stop, k)

    def _run_outer(self, x: Value, at: Value, start: Value, stop: Value, k: Value) -> None:
        """All outer products over one k block."""
        f, g = self.f, self.g
        kc = f.min(self.quarter_kc, self.quarter - k)
        sums = self["x_stride_m"], self.quarter * g.acc.bytes, kc
        size = kc * (PRODUCTS * g.mr * g.acc.bytes)
        is_last = (k + self.quarter_kc >= self.quarter).to(i64, signed=False)
        self._reset_sums(x, f.i64(0))
        f.call(self.sum_rows, f.i64(0), self.state, *sums, self.row_sums)
        for outer_index in f.range(0, PRODUCTS):
            now = f.gep(self.row_sums, (outer_index & 1) * size)
            then = f.gep(self.row_sums, (1 - (outer_index & 1)) * size)
            self._reset_sums(x, f.select(outer_index < PRODUCTS - 1, 0, kc * g.mr))
            for p in f.range(start, stop):
                self._store_sections(p, k)
                column = p * (4 * self.columns)
                tiles = f.gep(self.outer, p - start, (OUTER_TILES + RESULTS) * g.tile_bytes)
                f.call(
                    self.inner_products, f["args"], outer_index, now, self.quarter * g.row_bytes,
                    self.sections, self.inner, tiles, k, is_last, at + column, column, self.state,
                    *sums, then,
                )  # fmt: skip
            f.call(self.sum_rows, outer_index + 1, self.state, *sums, then)

    def _reset_sums(self, x: Value, done: Value) -> None:
        """Start the row sums of the next outer product at x; `done` elements are there already."""
        self.f.store(done, self.state)
        self.f.store(x, self.state, 8)

    def _store_sections(self, p: Value, k: Value) -> None:
        """Store the section addresses of a quad of panels: panels, outer sums, inner sums."""
        f = self.f
        quarters = p * 16, self.panels * 4 + p * 16, self.panels * 8 + p * 28
        for i, number in enumerate(quarters):
            section = f.gep(self["w"], number * self.quarter + k, self.g.row_bytes)
            f.store(section, self.sections, i * 8)
