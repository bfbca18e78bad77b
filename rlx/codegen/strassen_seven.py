"""One turn of two steps of Strassen's scheme: the seven inner products of an outer one.

Products are not kept for themselves. On its way out of the registers each adds what earlier ones
left, as `_INNER` says for the inner products; those that complete a block of the outer product go
on as `_OUTER` says, and what completes the result is finished. Meanwhile the processor is busy with
the next product already.

Between 16 terms of a product and the next ones a vector's worth of the next turn's sums of rows is
made: additions and stores run beside multiplications for nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from rlx.codegen.emit import Function, Module, Value, i32, i64, ptr
from rlx.codegen.matmul import Product
from rlx.codegen.matmul_micro import Geometry
from rlx.codegen.storage import LINE
from rlx.codegen.strassen import left_operand

TURNS = 7
RESULTS = 16  # tiles of a four of rows and a four of panels
SECTIONS = 3  # of a weight: its panels, outer sums, inner sums
STATE_BYTES = 16  # sums of rows that are made, and the address of the rows that are next

_P5, _P1, _U, _V = range(4)  # tiles that are kept: U is P1 + P6, V is P1 + P6 + P7
INNER_TILES = 4
OUTER_TILES = 2 * 4  # V and U in the place of P1

_NONE, _ON = -1, -2  # no tile; the sums of the product before, as they are


class _Way(NamedTuple):
    """Of a product out of the registers: what it starts with, where it is kept, what is added then;
    and the block of its own product that it then is."""

    start: int = _NONE
    kept: int = _NONE
    plus: int = _NONE
    block: int = _NONE


_INNER = {
    5: _Way(kept=_P5),
    1: _Way(kept=_P1),
    6: _Way(_ON, kept=_U),
    7: _Way(_ON, kept=_V, plus=_P5, block=3),
    4: _Way(_V, block=2),
    2: _Way(_P1, block=0),
    3: _Way(_U, plus=_P5, block=1),
}
_OUTER = {
    5: _Way(kept=_P5),
    1: _Way(kept=_P1),
    2: _Way(_P1, block=0),
    6: _Way(_P1, kept=_P1),
    3: _Way(_P1, plus=_P5, block=1),
    7: _Way(_P1, kept=_P1, plus=_P5, block=3),
    4: _Way(_P1, block=2),
}
_FIELDS = (
    "a", "section", "quarter", "start", "kept", "plus", "outer_start", "outer_kept", "outer_plus",
    "result",
)  # fmt: skip
_STEP_BYTES = 4 * len(_FIELDS)

# Where right operands of P1 to P7 lie: halves of k of two panels, sums behind them.
_RAW = {1: 0, 2: 1, 3: 3}
_SUMMED = {4: 3, 5: 0, 6: 1, 7: 2}


def _steps(g: Geometry) -> bytes:
    """The 49 products in their order, `_FIELDS` of each. Tiles are given by their bytes' offset."""
    fields = []
    for o, outer in _OUTER.items():
        for i, inner in _INNER.items():
            has_block = inner.block != _NONE
            blocks = [b * 4 + inner.block if has_block and b != _NONE else _NONE for b in outer]
            tiles = [inner.start, inner.kept, inner.plus, *blocks]
            fields += [(i - 1) * g.lanes * g.sums.bytes, *_weight(o, i)]
            fields += [t * g.tile_bytes if t >= 0 else t for t in tiles]
    return struct.pack(f"<{len(fields)}i", *fields)


def _weight(o: int, i: int) -> tuple[int, int]:
    """The place of a section's address, and the number of the quarter of k in it, of the right
    operand of inner product i of outer product o."""
    if i in _SUMMED:
        return 2 * 8, (o - 1) * 4 + _SUMMED[i]
    section, half = (0, _RAW[o]) if o in _RAW else (8, _SUMMED[o])
    right, low = divmod(_RAW[i], 2)
    return section, 8 * right + 2 * half + low


_SUMS_PARAMS = [
    ("state", ptr), ("line", i64), ("across", i64), ("terms", i64), ("out", ptr),
]  # fmt: skip


def emit_turn_sums(m: Module, g: Geometry) -> Function:
    """void sum_turn(i64 turn, ptr state, i64 line, i64 across, i64 terms, ptr out)

    What is left to do of a turn's left operands, [rows][terms / lanes][7] vectors: sums of four
    tiles of rows, `line` bytes apart, whose quarters of k begin `across` bytes from each other.
    """
    f = m.function("sum_turn", [("turn", i64), *_SUMS_PARAMS], internal=True)
    end = f["terms"] * g.rows

    def all_left(one: Callable[[Value], Value]) -> None:
        f.while_([f.load(f["state"], i64)], lambda made: made < end, one)

    _of_turn(f, g, f["turn"], all_left)
    return f


def _of_turn(
    f: Function, g: Geometry, turn: Value, work: Callable[[Callable[[Value], Value]], None]
) -> None:
    """work(one), where `one` makes the turn's next sums after so many."""
    f.switch(turn, {n: partial(work, partial(_sum_rows, f, g, o)) for n, o in enumerate(_OUTER)})


def _sum_rows(f: Function, g: Geometry, outer: int, made: Value) -> Value:
    """One vector of each left operand of an outer product; gives how many numbers are made then."""
    wide, size = g.sums.with_lanes(g.lanes), g.sums.bytes
    x = f.load(f["state"], ptr, 8)

    @cache
    def part(tile: int, k: int) -> Value:
        row = f.gep(x, f["line"] * (tile * g.rows))
        return f.load(f.gep(row, f["across"] * k), wide)

    @cache
    def operand(row: int, k: int) -> Value:
        """The outer product's: a tile of rows and quarter of k of two each."""
        return left_operand(outer, lambda i, j: part(2 * i + row, 2 * j + k))

    to = f.gep(f["out"], made, TURNS * size)
    for i in range(TURNS):
        f.store(left_operand(i + 1, operand), to, i * wide.bytes)
    then = made + g.lanes
    is_row_end = then.urem(f["terms"]).eq(0)
    on = f.select(is_row_end, f["line"] - (f["terms"] - g.lanes) * size, wide.bytes)
    f.store(then, f["state"])
    f.store(f.gep(x, on), f["state"], 8)
    return then


_PARAMS = [
    ("args", ptr), ("turn", i64), ("a", ptr), ("quarter", i64), ("sections", ptr), ("inner", ptr),
    ("outer", ptr), ("k", i64), ("is_last", i64), ("at", i64), ("column", i64),
]  # fmt: skip


class Seven:
    """void seven(ptr args, i64 turn, ptr a, i64 quarter, ptr sections, ptr inner, ptr outer,
    i64 k, i64 is_last, i64 at, i64 column, ptr state, i64 line, i64 across, i64 terms, ptr out)

    One turn of a four of rows and a four of panels over one block of k. `a` holds the turn's left
    operands; `sections` are the addresses that right ones are quarters of, `quarter` bytes each.
    Results are added to from the second block on and finished by the last one; `at` and `column`
    are where they begin. From `state` on: what `sum_turn` takes, for the turn that follows.
    """

    def __init__(self, product: Product, m: Module) -> None:
        g = product.g
        self.f = f = m.function("seven", [*_PARAMS, *_SUMS_PARAMS], internal=True)
        self.product, self.g = product, g
        self.wide = g.sums.with_lanes(g.lanes)
        self.places = [i * self.wide.bytes for i in range(g.rows * g.vectors)]
        self.zeros = [f.const(0, self.wide)] * len(self.places)
        self.results = f.gep(f["outer"], OUTER_TILES * g.tile_bytes)
        self.result, self.n = product.arg(f, "out"), product.arg(f, "n")
        self.table = m.table(f, _steps(g))
        first = f["turn"] * TURNS
        f.loop(first, first + TURNS, 1, self.zeros, self._product, guard=False)

    def _product(self, number: Value, *before: Value) -> list[Value]:
        """One inner product, from its start until it is where it belongs."""
        f = self.f
        step = self._step(number)
        is_result = step["result"] >= 0
        f.if_(is_result & f["is_last"].ne(0), lambda: self._ask(*self._corner(step)[:1]))
        start = step["start"]
        sums = f.if_(
            start >= 0,
            lambda: self._read(f.gep(f["inner"], start)),
            lambda: f.if_(start.eq(_ON), lambda: list(before), lambda: self.zeros),
        )
        following = self._step(f.min(number + 1, TURNS * TURNS - 1))
        sums = self._multiply(sums, step, self._weights(following))
        self._keep(f["inner"], step["kept"], sums)
        sums = self._plus(f["inner"], step["plus"], sums)
        sums = self._plus(f["outer"], step["outer_start"], sums)
        self._keep(f["outer"], step["outer_kept"], sums)
        sums = self._plus(f["outer"], step["outer_plus"], sums)
        return f.if_(is_result, lambda: self._end(step, sums), lambda: sums)

    def _step(self, number: Value) -> dict[str, Value]:
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

    def _multiply(self, sums: list[Value], step: dict[str, Value], following: Value) -> list[Value]:
        """Add the product to sums; weights of the next one are asked for."""
        f, g = self.f, self.g
        b, x = self._weights(step), f.gep(f["a"], step["a"])
        line = f["terms"] * (TURNS * g.sums.bytes)
        end = f["terms"] * g.rows

        def vector(k: Value, *sums: Value) -> list[Value]:
            rows = [f.gep(x, line * r + k * (TURNS * g.sums.bytes)) for r in range(g.rows)]
            here, ahead = f.gep(b, k, g.row_bytes), f.gep(following, k, g.row_bytes)
            term = partial(self._term, rows, here, ahead)
            out = f.loop(0, g.lanes, 1, list(sums), term)
            made = f.load(f["state"], i64)

            def sum_one(one: Callable[[Value], Value]) -> None:
                one(made)

            f.if_(made < end, lambda: _of_turn(f, g, f["turn"] + 1, sum_one))
            return out

        return f.loop(0, f["terms"], g.lanes, sums, vector, guard=False)

    def _term(
        self, rows: list[Value], b: Value, ahead: Value, i: Value, *sums: Value
    ) -> list[Value]:
        f, g = self.f, self.g
        for at in range(0, g.row_bytes, LINE):
            f.prefetch(f.gep(ahead, i, g.row_bytes), at, locality=2)
        weights = f.gep(b, i, g.row_bytes)
        columns = [f.load(weights, self.wide, j * self.wide.bytes) for j in range(g.vectors)]
        elements = [f.broadcast_load(f.gep(r, i, g.sums), g.sums, g.lanes, 0) for r in rows]
        products = [(a, c) for a in elements for c in columns]
        return [f.fma(a, c, s) for (a, c), s in zip(products, sums, strict=True)]

    def _corner(self, step: dict[str, Value]) -> tuple[Value, Value]:
        """Where a result's tile begins: the element, and the column."""
        f, g = self.f, self.g
        block = step["result"].udiv(g.tile_bytes)
        outer, inner = block.udiv(4), block & 3
        row = ((outer & 2) + inner.udiv(2)) * g.rows
        column = ((inner & 1) * 2 + (outer & 1)) * self.product.columns
        return f["at"] + row * self.n + column, f["column"] + column

    def _ask(self, at: Value) -> None:
        """For the memory of a result: it comes while the product is made."""
        f, g = self.f, self.g
        for r in range(g.rows):
            row = f.gep(self.result, at + self.n * r, g.sums)
            for line in range(0, g.row_bytes, LINE):
                f.prefetch(row, line)

    def _end(self, step: dict[str, Value], sums: list[Value]) -> list[Value]:
        """A tile of the result: added to what is there of it, and finished by the last block."""
        f = self.f
        tile = f.select(f["k"] > 0, step["result"], f.i64(_NONE))
        self._write(f.gep(self.results, step["result"]), self._plus(self.results, tile, sums))

        def finish() -> None:
            rows, (at, column) = f.i64(self.g.rows), self._corner(step)
            done = f.gep(self.results, step["result"])
            f.call(self.product.finish, f["args"], done, rows, at, column, f.null())

        f.if_(f["is_last"].ne(0), finish)
        return self.zeros
