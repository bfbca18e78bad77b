"""The register-blocked heart of every product: a tile of a few rows by one panel of columns.

A panel is `width` columns of a weight, `[K][width]`, so that one step of k is one run of memory.
Rows come as they lie in memory, or packed beside it, `[K][rows]` in the type of the sums. The tile,
`[rows][width]`, is held in registers while k runs; it is written to memory once per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlx.codegen.emit import Function, Module, Type, Value, i64, ptr, vec
from rlx.codegen.storage import LINE, load, memory_type
from rlx.codegen.target import Target
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

ROWS = 6  # of the full tile; a remainder runs in one of the smaller ones
_CHAINS = 8  # additions that must be under way to keep two units of latency 4 busy
_LINES = 2  # of the next panel that each step of k asks for: the first tiles of a panel bring it


@dataclass(frozen=True)
class Geometry:
    """How a target holds a tile: `vectors` registers of `lanes` sums for each of `rows` rows."""

    sums: Type
    lanes: int
    vectors: int
    rows: int = ROWS

    @staticmethod
    def of(target: Target, sums: Type) -> Geometry:
        # 6 rows of 4 (of 2) vectors leave room for the panel's vectors and a broadcast among 32
        # (among 16) registers, and are enough chains to hide the latency of fma. Wide panels with
        # few rows beat the same number of sums the other way round once weights must be converted.
        vectors = 4 if target.num_vector_registers >= 32 else 2
        return Geometry(sums, target.lanes(sums.bits), vectors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of a tile and of those for a remainder."""
        return self.rows, 4, 2, 1

    @property
    def width(self) -> int:
        return self.lanes * self.vectors

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a tile."""
        return self.width * self.sums.bytes

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.row_bytes

    def padded(self, f: Function, rows: Value) -> Value:
        """The size of the tile that holds so many rows, as far as there are any."""
        return f.select(rows > 4, f.i64(self.rows), f.select(rows > 2, f.i64(4), rows))


_PARAMS = [
    ("count", i64), ("a", ptr), ("line", i64), ("terms", i64), ("b", ptr), ("step", i64),
    ("tile", ptr), ("k", i64), ("ahead", ptr),
]  # fmt: skip


class Dots:
    """The functions of one module that add products to a tile, one per tile size.

    `packed`: rows come packed. `following`: while a panel is read, the next one is asked for.
    """

    def __init__(
        self,
        m: Module,
        geometry: Geometry,
        weight: DType,
        sizes: tuple[int, ...],
        packed: bool = True,
        following: bool = False,
    ) -> None:
        self.geometry, self.packed = geometry, packed
        self.step = geometry.width * memory_type(weight).bytes
        self.asked = 0
        if following:
            self.asked = LINE if self.step % (_LINES * LINE) else _LINES * LINE
            self.asked = min(self.asked, self.step)
        self.functions = {
            r: emit_dot(m, geometry, weight, r, packed, 0 if r <= 2 else self.asked) for r in sizes
        }

    def ahead(self, f: Function, tile: Value, panel: Value, terms: Value, next_: Value) -> Value:
        """What the tile of that number asks for: its part of the next panel, or nothing new."""
        if not self.asked:
            return panel
        parts = -(-self.step // self.asked)
        part = f.gep(next_, tile * terms, self.asked)
        return f.select(tile < parts, part, panel)

    def joined(self, m: Module) -> Function:
        """One function that chooses among them, for code with many calls."""
        f = m.function("dot", _PARAMS, internal=True)
        self.call(f, *(f[name] for name, _ in _PARAMS))
        return f

    def call(self, f: Function, rows: Value, *given: Value) -> None:
        """tile += a·b with `rows` rows; `given` are the other arguments of `dot`."""

        def run(function: Function) -> None:
            f.call(function, rows, *given)

        size = self.geometry.padded(f, rows)
        f.switch(size, {r: partial(run, dot) for r, dot in self.functions.items()})


def emit_dot(
    m: Module, geometry: Geometry, weight: DType, rows: int, packed: bool, asked: int
) -> Function:
    """void dot(i64 count, ptr a, i64 line, i64 terms, ptr b, i64 step, ptr tile, i64 k, ptr ahead)

    `count` of the rows exist; they are `line` bytes apart where they are not packed. `step` is
    the bytes from one k of b to the next. The tile begins with zeros where `k` is 0. Each step asks
    for `asked` bytes from `ahead` on.
    """
    f = m.function(f"dot{rows}", _PARAMS, internal=True)
    dot = _Dot(f, geometry, weight, rows, packed, asked)
    sums, terms = dot.start(), f["terms"]
    start: Value | int = 0
    if rows <= 2:
        # Few sums: unrolled, and with two sets of them, so that chains of additions are short.
        unroll = 4 if rows == 1 else 2
        start = terms - (terms & (unroll - 1))
        if len(sums) < _CHAINS:
            sums += [f.const(0, v.type) for v in sums]
        sums = f.loop(0, start, unroll, sums, lambda k, *s: dot.steps(k, unroll, s))
        sums = dot.joined(sums)
    dot.write_tile(f.loop(start, terms, 1, sums, lambda k, *s: dot.step(k, s)))
    return f


class _Dot:
    def __init__(
        self, f: Function, geometry: Geometry, weight: DType, rows: int, packed: bool, asked: int
    ) -> None:
        self.f, self.geometry, self.weight, self.rows = f, geometry, weight, rows
        self.packed, self.asked = packed, asked
        self.places = [
            (i * geometry.width + j * geometry.lanes) * geometry.sums.bytes
            for i in range(rows)
            for j in range(geometry.vectors)
        ]
        if not packed:
            # The last row stands for those that are not there: a smaller tile would hold the first.
            sure = max((s + 1 for s in geometry.sizes if s < rows), default=1)
            last = f["count"] - 1
            numbers = [f.i64(i) if i < sure else f.min(last, i) for i in range(rows)]
            self.lines = [f.gep(f["a"], f["line"] * i) for i in numbers]

    def start(self) -> list[Value]:
        """The sums so far."""
        type_ = vec(self.geometry.lanes, self.geometry.sums)
        return self.f.if_(
            self.f["k"].eq(0),
            lambda: [self.f.const(0, type_)] * len(self.places),
            lambda: [self.f.load(self.f["tile"], type_, at) for at in self.places],
        )

    def write_tile(self, sums: list[Value]) -> None:
        for value, at in zip(sums, self.places, strict=True):
            self.f.store(value, self.f["tile"], at)

    def step(self, k: Value, sums: Sequence[Value]) -> list[Value]:
        f = self.f
        for at in range(0, self.asked, LINE):
            f.prefetch(f.gep(f["ahead"], k, self.asked), at, locality=2)
        return self._products(k, 0, f.gep(f["b"], k * f["step"]), sums)

    def steps(self, k: Value, count: int, sums: tuple[Value, ...]) -> list[Value]:
        """Several steps, into each set of sums in turn."""
        f = self.f
        b = f.gep(f["b"], k * f["step"])
        sets = self._sets(sums)
        for u in range(count):
            if f.target.read_ahead:
                for line in range(0, self.geometry.width * memory_type(self.weight).bytes, LINE):
                    f.prefetch(b, f.target.read_ahead + line)
            here = u % len(sets)
            sets[here] = self._products(k, u, b, sets[here])
            b = f.gep(b, f["step"]) if u < count - 1 else b
        return [v for part in sets for v in part]

    def _sets(self, sums: Sequence[Value]) -> list[list[Value]]:
        size = len(self.places)
        return [list(sums[i : i + size]) for i in range(0, len(sums), size)]

    def joined(self, sums: list[Value]) -> list[Value]:
        """One set of sums from one or two."""
        first, *second = self._sets(sums)
        return [a + b for a, b in zip(first, second[0], strict=True)] if second else first

    def _products(self, k: Value, later: int, b: Value, sums: Sequence[Value]) -> list[Value]:
        f, g = self.f, self.geometry
        size = memory_type(self.weight).bytes
        columns = [
            load(f, b, self.weight, g.lanes, g.sums, j * g.lanes * size) for j in range(g.vectors)
        ]
        out = []
        for i in range(self.rows):
            x = self._element(i, k, later)
            for j, column in enumerate(columns):
                out.append(multiply_add(f, x, column, sums[i * g.vectors + j]))
        return out

    def _element(self, row: int, k: Value, later: int) -> Value:
        """Of a row, `later` terms behind k, in every lane."""
        f, g = self.f, self.geometry
        size = g.sums.bytes
        if self.packed:
            terms, at = f.gep(f["a"], k, self.rows * size), (later * self.rows + row) * size
        else:
            terms, at = f.gep(self.lines[row], k, size), later * size
        return f.broadcast_load(terms, g.sums, g.lanes, at)


def multiply_add(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a * b + c; integers wrap."""
    return f.fma(a, b, c) if a.type.is_float else a * b + c
