"""The register-blocked heart of every product: a tile of a few rows by one panel of columns.

A panel is `width` columns of a weight, `[K][width]`, so that one step of k is one run of memory.
Rows come packed beside it, `[K][rows]` in the type of the sums. The tile, `[rows][width]`, is held
in registers while k runs; it is read and written in memory once per call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rlx.codegen.emit import Function, Module, Type, Value, i64, ptr, vec
from rlx.codegen.storage import load, memory_type
from rlx.codegen.target import Target
from rlx.ir.dtype import DType

ROWS = 6  # of the full tile; a remainder runs in one of the smaller ones
SIZES = (6, 4, 2, 1)
_CHAINS = 8  # additions that must be under way to keep two units of latency 4 busy

# Bytes ahead of the weights that a product of one or two rows asks for, as it runs at the speed of
# memory. With 512-bit vectors the loop is short enough for the CPU to look ahead by itself.
AHEAD = 4096


@dataclass(frozen=True)
class Geometry:
    """How a target holds a tile: `vectors` registers of `lanes` sums for each row."""

    sums: Type
    lanes: int
    vectors: int

    @staticmethod
    def of(target: Target, sums: Type) -> Geometry:
        # 6 rows of 4 (of 2) vectors leave room for the panel's vectors and a broadcast among 32
        # (among 16) registers, and are enough chains to hide the latency of fma. Wide panels with
        # few rows beat the same number of sums the other way round once weights must be converted.
        vectors = 4 if target.num_vector_registers >= 32 else 2
        return Geometry(sums, target.lanes(sums.bits), vectors)

    @property
    def width(self) -> int:
        return self.lanes * self.vectors

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a tile."""
        return self.width * self.sums.bytes

    @property
    def tile_bytes(self) -> int:
        return ROWS * self.row_bytes


def padded_rows(f: Function, rows: Value) -> Value:
    """The size of the tile that holds `rows` (1 to 6) rows: 3 and 5 take one more."""
    return rows + ((rows & 1) & (rows > 1).to(i64, signed=False))


class Dots:
    """The functions of one module that add products to a tile, one per tile size."""

    def __init__(
        self, m: Module, geometry: Geometry, weight: DType, sizes: tuple[int, ...] = SIZES
    ) -> None:
        self.geometry = geometry
        self.functions = {r: emit_dot(m, geometry, weight, r) for r in sizes}

    def call(
        self, f: Function, size: Value, terms: Value, a: Value, b: Value, step: Value, tile: Value
    ) -> None:
        """tile += a·b with a tile of `size` rows; `step`: bytes from one k of b to the next."""

        def run(function: Function) -> None:
            f.call(function, terms, a, b, step, tile)

        f.switch(size, {r: partial(run, dot) for r, dot in self.functions.items()})


def emit_dot(m: Module, geometry: Geometry, weight: DType, rows: int) -> Function:
    """void dot(i64 terms, ptr a, ptr b, i64 step, ptr tile)"""
    f = m.function(
        f"dot{rows}",
        [("terms", i64), ("a", ptr), ("b", ptr), ("step", i64), ("tile", ptr)],
        internal=True,
    )
    dot = _Dot(f, geometry, weight, rows)
    sums, terms = dot.read_tile(), f["terms"]
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
    def __init__(self, f: Function, geometry: Geometry, weight: DType, rows: int) -> None:
        self.f, self.geometry, self.weight, self.rows = f, geometry, weight, rows
        self.places = [
            (i * geometry.width + j * geometry.lanes) * geometry.sums.bytes
            for i in range(rows)
            for j in range(geometry.vectors)
        ]

    def read_tile(self) -> list[Value]:
        type_ = vec(self.geometry.lanes, self.geometry.sums)
        return [self.f.load(self.f["tile"], type_, at) for at in self.places]

    def write_tile(self, sums: list[Value]) -> None:
        for value, at in zip(sums, self.places, strict=True):
            self.f.store(value, self.f["tile"], at)

    def step(self, k: Value, sums: Sequence[Value]) -> list[Value]:
        f, size = self.f, self.geometry.sums.bytes
        b = f.gep(f["b"], k * f["step"])
        return self._products(f.gep(f["a"], k, self.rows * size), b, sums, 0)

    def steps(self, k: Value, count: int, sums: tuple[Value, ...]) -> list[Value]:
        """Several steps, into each set of sums in turn."""
        f, size = self.f, self.geometry.sums.bytes
        a, b = f.gep(f["a"], k, self.rows * size), f.gep(f["b"], k * f["step"])
        sets = self._sets(sums)
        for u in range(count):
            if not f.target.avx512:
                for line in range(0, self.geometry.width * memory_type(self.weight).bytes, 64):
                    f.prefetch(b, AHEAD + line)
            here = u % len(sets)
            sets[here] = self._products(a, b, sets[here], u * self.rows * size)
            b = f.gep(b, f["step"]) if u < count - 1 else b
        return [v for part in sets for v in part]

    def _sets(self, sums: Sequence[Value]) -> list[list[Value]]:
        size = len(self.places)
        return [list(sums[i : i + size]) for i in range(0, len(sums), size)]

    def joined(self, sums: list[Value]) -> list[Value]:
        """One set of sums from one or two."""
        first, *second = self._sets(sums)
        return [a + b for a, b in zip(first, second[0], strict=True)] if second else first

    def _products(self, a: Value, b: Value, sums: Sequence[Value], at: int) -> list[Value]:
        f, g = self.f, self.geometry
        size = memory_type(self.weight).bytes
        columns = [
            load(f, b, self.weight, g.lanes, g.sums, j * g.lanes * size) for j in range(g.vectors)
        ]
        out = []
        for i in range(self.rows):
            x = f.broadcast_load(a, g.sums, g.lanes, at + i * g.sums.bytes)
            for j, column in enumerate(columns):
                out.append(multiply_add(f, x, column, sums[i * g.vectors + j]))
        return out


def multiply_add(f: Function, a: Value, b: Value, c: Value) -> Value:
    """a * b + c; integers wrap."""
    return f.fma(a, b, c) if a.type.is_float else a * b + c
