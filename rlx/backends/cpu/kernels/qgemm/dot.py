"""Integer dot products of a target: codes of weights times codes of activations, summed by fours.

A vector holds four consecutive codes of each of `lanes` output channels, so that a step adds to one
32-bit sum per channel. Weight codes are unsigned, below 2^bits; activations are signed.

The micro-tile is a few rows of activations against the 16 columns of a column tile. Activations
lie as `layouts.quant_rows` describes; each word is broadcast to all lanes. The tile's f32 sums lie
in memory, `[row][columns]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import ClassVar

from rlx.backends.cpu.kernels.spec import read_ahead
from rlx.backends.cpu.layouts.quant_tiles import LINE
from rlx.errors import CodegenError
from rlx.llvm.builder import Function, Type, Value, f16, f32, i8, i16, i32, vec
from rlx.llvm.target import Target
from rlx.support.records import dataclass

Index = Value | int

UNROLL_ROWS = 8  # from so many rows on a block is unrolled: 4 % faster (Zen 4, Q8_0)
_UNROLL_STEPS = 16  # streams of codes that are unrolled at most: more is code alone


@dataclass
class DotLoop:
    """A loop of dot products over `groups` fours of k. `codes(g)` gives the streams of codes of
    step g (several that share a loaded line), `x(g, stream)` the address of its activations.

    Stream s adds to the sums of column vector `columns[s]`, times `scales[s]` if there are scales.
    """

    groups: Index
    bits: int
    codes: Callable[[Value], Sequence[Value]]
    x: Callable[[Value, int], Value]
    columns: Sequence[int]
    scales: Sequence[Value] | None = None

    def __post_init__(self) -> None:
        # Streams of one column vector and one scale share accumulators.
        scales = self.scales or ()
        keys = list(zip_longest(self.columns, scales))
        self.sets = list({(c, id(s)): (c, s) for c, s in keys}.values())
        order = {(c, id(s)): i for i, (c, s) in enumerate(self.sets)}
        self.set_of = [order[c, id(s)] for c, s in keys]


class IntDot(ABC):
    """The dot-product instruction of a target. Sums are flat lists, `sums[column * rows + row]`."""

    instruction: ClassVar[str]
    signed_bytes = False
    """Whether 8-bit codes are taken as signed; otherwise they have 128 added."""
    takes_pairs = False
    """Whether it reads two steps at once, best from rows whose words lie in pairs."""
    paired = False
    """Whether rows lie so (see `layouts.quant_rows`)."""

    def __init__(self, f: Function, rows: int, lanes: int) -> None:
        self.f, self.rows, self.lanes = f, rows, lanes
        self.sums, self.bytes = vec(lanes, i32), vec(4 * lanes, i8)

    @abstractmethod
    def accumulate(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        """The sums plus the dot products of the loop."""

    @abstractmethod
    def pairs(self, total: Value, a: Value, b: Value) -> Value:
        """total + a.low * b.low + a.high * b.high, of pairs of i16 in every lane."""

    def sum_of_pairs(self, a: Sequence[Value], b: Sequence[Value]) -> Value:
        """The `pairs` of several operands, summed."""
        total = self.f.const(0, self.sums)
        for x, y in zip(a, b, strict=True):
            total = self.pairs(total, x, y)
        return total

    @abstractmethod
    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        """Bytes of a table of 16 at `indices`."""

    def row(self, first: Value, i: int) -> Value:
        """The word of row i in every lane."""
        return self.f.broadcast_load(first, i32, self.lanes, 4 * i)

    # Sums of a tile are one vector for each row, one lane for each column, unless a subclass lays
    # them out otherwise: factors are then laid out alike, and `rows_of` gives rows.

    def tile_row(self, first: Value, i: int, type_: Type = i32) -> Value:
        """What the rows of sum i have in a word, `first` being the address of all rows' words."""
        return self.f.broadcast_load(first, type_, self.lanes, 4 * i)

    def tile_column(self, value: Value, i: int) -> Value:
        """What the columns of sum i have, from one lane for each column."""
        return value

    def rows_of(self, sums: Sequence[Value]) -> list[Value]:
        """The sums of each row."""
        return list(sums)

    def encode_bytes(self, raw: Value) -> Value:
        """8-bit signed weights as the codes that the target takes."""
        return raw if self.signed_bytes else raw ^ 0x80

    @property
    def byte_offset(self) -> int:
        """What `encode_bytes` adds."""
        return 0 if self.signed_bytes else 128

    def _call(self, name: str, result: Type, *args: Value) -> Value:
        return self.f.intrinsic(name, result, *args)


class FourWay(IntDot):
    """Targets with one instruction for four products and their sum."""

    starts_with_products = False
    """Whether the first step of a loop stands before it, so that it adds to nothing."""
    row_by_row = False
    """Whether a word of a row is multiplied with all codes before the next is loaded: there are few
    registers."""

    @abstractmethod
    def step(self, total: Value, codes: Value, x: Value) -> Value: ...

    def accumulate(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        f, rows = self.f, self.rows
        plain = loop.scales is None
        start = list(sums) if plain else [f.const(0, self.sums)] * (len(loop.sets) * rows)

        def step(g: Value, given: Sequence[Value]) -> list[Value]:
            totals, streams, places = list(given), loop.codes(g), dict[int, Value]()
            order = [(s, i) for s in range(len(streams)) for i in range(rows)]
            for s, i in sorted(order, key=lambda at: at[1]) if self.row_by_row else order:
                first = places[s] if s in places else places.setdefault(s, loop.x(g, s))
                at = loop.set_of[s] * rows + i
                totals[at] = self.step(totals[at], streams[s], self.tile_row(first, i))
            return totals

        if plain and isinstance(loop.groups, int) and self._is_unrolled(loop.groups, loop):
            totals = start
            for g in range(loop.groups):
                totals = step(f.i64(g), totals)
            return totals
        first = 1 if plain and self.starts_with_products and isinstance(loop.groups, int) else 0
        carried = f.carry(step(f.i64(0), start) if first else start)
        for group in carried.range(first, loop.groups):
            carried.values = step(group, carried.values)
        totals = carried.values
        if plain:
            return totals
        out = list(sums)
        most = 4 * 127 * (2**loop.bits - 1) * len(loop.columns) // len(loop.sets)
        known = loop.groups if isinstance(loop.groups, int) else 1 << 16
        for s, (column, scale) in enumerate(loop.sets):
            assert scale is not None
            add = self.scaled_add(scale, most * known)
            for i in range(rows):
                at = column * rows + i
                out[at] = add(out[at], totals[s * rows + i])
        return out

    def scaled_add(self, scale: Value, most: int) -> Callable[[Value, Value], Value]:
        """What adds sums of at most so much, times a 16-bit scale, to a total."""
        return lambda total, sums: total + sums * scale

    def _is_unrolled(self, groups: int, loop: DotLoop) -> bool:
        return self.rows >= UNROLL_ROWS and groups * len(loop.columns) <= _UNROLL_STEPS


class Vnni(FourWay):
    """vpdpbusd: unsigned times signed bytes, four to a 32-bit sum."""

    instruction = "vpdpbusd"

    def step(self, total: Value, codes: Value, x: Value) -> Value:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
        return self._call(name, self.sums, total, codes, x.bits(self.bytes))

    def pairs(self, total: Value, a: Value, b: Value) -> Value:
        halves = vec(2 * self.lanes, i16)
        name = f"llvm.x86.avx512.vpdpwssd.{32 * self.lanes}"
        return self._call(name, self.sums, total, a.bits(halves), b.bits(halves))

    def scaled_add(self, scale: Value, most: int) -> Callable[[Value, Value], Value]:
        if most >= 1 << 15:
            return super().scaled_add(scale, most)
        low = scale & 0xFFFF  # one instruction in place of two
        return lambda total, sums: self.pairs(total, sums, low)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        return _shuffle_bytes(self, table, indices)


# Steps whose 16-bit pair sums cannot overflow: 2 * 127 * (2^bits - 1) each.
_SAFE_STEPS = {1: 64, 2: 32, 3: 16, 4: 8, 5: 4, 6: 2, 7: 1}
_HELD = 4  # vectors of codes that leave registers for the sums of a tile


class Pairwise(IntDot):
    """Targets that multiply pairs: of bytes into 16 bits, of those into 32."""

    instruction = "pmaddubsw"

    def __init__(self, f: Function, rows: int, lanes: int) -> None:
        super().__init__(f, rows, lanes)
        self.halves = vec(2 * lanes, i16)
        self._ubs, self._wd = {
            4: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
            8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
            16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        }[lanes]

    def _pair(self, a: Value, b: Value) -> Value:
        return self._call(self._wd, self.sums, a.bits(self.halves), b.bits(self.halves))

    def multiply_bytes(self, unsigned: Value, signed: Value) -> Value:
        """Sums of two products of bytes, in 16 bits, which saturate."""
        return self._call(self._ubs, self.halves, unsigned, signed)

    def multiply_halves(self, a: Value, b: Value) -> Value:
        """Sums of two products of i16, in 32 bits."""
        return self._pair(a, b)

    def pairs(self, total: Value, a: Value, b: Value) -> Value:
        return total + self._pair(a, b)

    def multiply(self, codes: Value, x: Value) -> Value:
        """Sums of two products in 16 bits."""
        return self._call(self._ubs, self.halves, codes, x)

    def factor(self, scale: Value | None) -> Value:
        """A scale, or 1, in both halves of every lane."""
        if scale is None:
            return self.f.const(1, self.halves)
        return (scale << 16 | scale & 0xFFFF).bits(self.halves)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        return _shuffle_bytes(self, table, indices)


class Maddubs(Pairwise):
    """pmaddubsw: sums of two products in 16 bits, which saturate; pmaddwd widens and scales them.

    8-bit codes are signed, since two products with codes up to 255 do not fit 16 bits: |w| times x
    with the sign of w does, and is widened at once.
    """

    signed_bytes = True

    def accumulate(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        f = self.f
        if loop.bits == 8:
            return self._accumulate_bytes(loop, sums)
        streams_per_set = len(loop.columns) // len(loop.sets)
        at_once = _SAFE_STEPS[loop.bits] // streams_per_set
        known = loop.groups if isinstance(loop.groups, int) else loop.groups.const
        if known is not None and known <= at_once:
            return self._flushed(loop, f.i64(0), known, sums)
        groups = f.const(loop.groups)
        whole = groups - groups.urem(at_once)
        result = f.carry(sums)
        for g in result.range(0, whole, at_once):
            result.values = self._flushed(loop, g, at_once, result.values)
        if known is None or known % at_once:
            for g in result.range(whole, groups):
                result.values = self._flushed(loop, g, 1, result.values)
        return result.values

    def _flushed(self, loop: DotLoop, g: Value, count: int, sums: Sequence[Value]) -> list[Value]:
        """Steps g .. g + count in 16 bits, then flushed to the 32-bit sums."""
        f, rows = self.f, self.rows
        if rows > 1 and count * len(loop.columns) <= _HELD:
            return self._row_by_row(loop, g, count, sums)
        width = len(loop.sets) * rows

        def step(j: Value, acc: Sequence[Value] | None) -> list[Value]:
            """One step; the first one starts the 16-bit sums."""
            found: dict[int, Value] = dict(enumerate(acc or ()))
            streams = loop.codes(g + j)
            places = [loop.x(g + j, s) for s in range(len(streams))]
            for i in range(rows):
                for s, codes in enumerate(streams):
                    at = loop.set_of[s] * rows + i
                    product = self.multiply(codes, self.row(places[s], i).bits(self.bytes))
                    found[at] = found[at] + product if at in found else product
            return [found[at] for at in range(width)]

        start = [f.const(0, self.halves)] * width
        first = 0
        if rows > 1:
            # With one row, which runs at memory speed, equal steps do better.
            start, first = step(f.i64(0), None), 1
        halves = f.carry(start)
        for j in halves.range(first, count):
            halves.values = step(j, halves.values)
        acc = halves.values
        out = list(sums)
        for s, (column, scale) in enumerate(loop.sets):
            factor = self.factor(scale)
            for i in range(rows):
                at = column * rows + i
                out[at] = out[at] + self._pair(acc[s * rows + i], factor)
        return out

    def _row_by_row(
        self, loop: DotLoop, g: Value, count: int, sums: Sequence[Value]
    ) -> list[Value]:
        """As `_flushed`, one row after the other: codes stay in registers, not 16-bit sums."""
        out, rows = list(sums), self.rows
        steps = [list(enumerate(loop.codes(g + j))) for j in range(count)]
        factors = [self.factor(scale) for _, scale in loop.sets]
        for i in range(rows):
            found: dict[int, Value] = {}
            for j, streams in enumerate(steps):
                for s, codes in streams:
                    x = self.row(loop.x(g + j, s), i).bits(self.bytes)
                    product, at = self.multiply(codes, x), loop.set_of[s]
                    found[at] = found[at] + product if at in found else product
            for at, halves in found.items():
                place = loop.sets[at][0] * rows + i
                out[place] = self.pairs(out[place], halves, factors[at])
        return out

    def _accumulate_bytes(self, loop: DotLoop, sums: Sequence[Value]) -> list[Value]:
        factors = [self.factor(scale) for _, scale in loop.sets]
        totals = self.f.carry(sums)
        for g in totals.range(0, loop.groups):
            out = list(totals.values)
            streams = loop.codes(g)
            places = [loop.x(g, s) for s in range(len(streams))]
            for i in range(self.rows):
                for s, codes in enumerate(streams):
                    x = self._signed(self.row(places[s], i).bits(self.bytes), codes)
                    pairs = self.multiply(self.f.abs(codes), x)
                    at = loop.columns[s] * self.rows + i
                    out[at] = out[at] + self._pair(pairs, factors[loop.set_of[s]])
            totals.values = out
        return totals.values

    def _signed(self, x: Value, codes: Value) -> Value:
        """x, negated where the code is negative; where it is 0 the result does not matter."""
        name = {4: "llvm.x86.ssse3.psign.b.128", 8: "llvm.x86.avx2.psign.b"}.get(self.lanes)
        if name is None:
            return self.f.select(codes < 0, -x, x)
        return self._call(name, self.bytes, x, codes)


class Widened(Pairwise, FourWay):
    """pmaddwd on signed 8-bit codes that have been widened to pairs of 16 bits: with many rows
    faster than `Maddubs`, where every row needs its signs."""

    signed_bytes = starts_with_products = row_by_row = True

    def step(self, total: Value, codes: Value, x: Value) -> Value:
        return self.pairs(total, codes, x)


def _shuffle_bytes(dot: IntDot, table: Sequence[int], indices: Value) -> Value:
    name = {
        4: "llvm.x86.ssse3.pshuf.b.128",
        8: "llvm.x86.avx2.pshuf.b",
        16: "llvm.x86.avx512.pshuf.b.512",
    }[dot.lanes]
    values = dot.f.const(list(table) * (dot.lanes // 4), dot.bytes)
    return dot.f.intrinsic(name, dot.bytes, values, indices)


def dot_kind(target: Target) -> type[IntDot] | None:
    """The integer dot product of the target; None where f32 is faster."""
    if target.is_x86:
        if target.vnni and (target.avx512 or target.vector_bits == 256):
            return Vnni
        return Maddubs if target.has("ssse3") else None
    from rlx.backends.cpu.kernels.qgemm.dot_arm import arm_dot  # made of the classes above

    return arm_dot(target)


def make_dot(f: Function, rows: int) -> IntDot:
    kind = dot_kind(f.target)
    if kind is None:
        raise CodegenError("no integer dot products", where="qgemm", got=f.target.key)
    return kind(f, rows, f.target.lanes(32))


class MicroTile:
    """`vectors` vectors of columns for `rows` rows: what format emitters build on.

    Addresses of a column tile are those of its first column: `shift` is the first column of this
    pass, and everything with one entry per column is offset by it.
    """

    def __init__(
        self, f: Function, rows: int, vectors: int, shift: Value, paired: bool = False
    ) -> None:
        self.f, self.rows, self.vectors = f, rows, vectors
        self.dot: IntDot = make_dot(f, rows)
        self.dot.paired = paired
        self.lanes = self.dot.lanes
        self.floating = vec(self.lanes, f32)
        self.shift = shift
        self.columns = range(vectors)
        self.ahead = read_ahead(f) if rows == 1 else 0

    def group_streams(self, streams: list[int]) -> list[list[int]]:
        """Streams of codes that share lines, in groups that leave registers for their sums."""
        room = 16 if self.f.target.num_vector_registers >= 32 else 4
        size = max(1, min(len(streams), room // (self.rows * self.vectors)))
        return [streams[i : i + size] for i in range(0, len(streams), size)]

    # -- weights ----------------------------------------------------------------------------

    def line(self, base: Value, index: Index, v: int) -> Value:
        """Four codes of each column of vector v, in word `index` of a block."""
        at = self.f.gep(base, index, LINE)
        return self.f.load(self.f.gep(at, self.shift, 4), self.dot.bytes, 4 * self.lanes * v)

    def word(self, base: Value, index: Index, v: int) -> Value:
        return self.line(base, index, v).bits(self.dot.sums)

    def streamed(self, base: Value, index: Index, v: int) -> Value:
        """A line of codes; with one row a later line is prefetched."""
        if self.ahead and v == 0:
            self.f.prefetch(self.f.gep(base, index, LINE), self.ahead)
        return self.line(base, index, v)

    def nibbles(self, raw: Value) -> list[Value]:
        """The low and the high halves of bytes."""
        return [raw & 15, (raw.bits(self.dot.sums) >> 4).bits(raw.type) & 15]

    def shifted(self, word: Value, count: Value) -> Value:
        """Lanes shifted right by one number of bits."""
        return word >> self.f.splat(count.to(i32), self.lanes)

    def f16_field(self, base: Value, v: int) -> Value:
        """The f16 of every column, as f32."""
        at = self.f.gep(base, self.shift, 2)
        return self.f.load(at, vec(self.lanes, f16), 2 * self.lanes * v).to(f32)

    def f32_field(self, base: Value, v: int) -> Value:
        at = self.f.gep(base, self.shift, 4)
        return self.f.load(at, vec(self.lanes, f32), 4 * self.lanes * v)

    def byte_field(self, base: Value, v: int, signed: bool) -> Value:
        """The byte of every column, as i32."""
        at = self.f.gep(base, self.shift)
        return self.f.load(at, vec(self.lanes, i8), self.lanes * v).to(i32, signed=signed)

    def low_f16(self, word: Value) -> Value:
        """The f16 in the low half of every lane."""
        return word.to(i16).bits(vec(self.lanes, f16)).to(f32)

    # -- activations ------------------------------------------------------------------------

    def rows_at(self, base: Value, index: Index) -> Value:
        """Address of word `index` of all rows."""
        return self.f.gep(base, index, 4 * self.rows)

    def x(self, base: Value, index: Index, row: int) -> Value:
        """Word `index` of a row of the tile, in every lane."""
        return self.dot.row(self.rows_at(base, index), row)

    def x_float(self, base: Value, index: Index, row: int) -> Value:
        at = self.rows_at(base, index)
        return self.f.broadcast_load(at, f32, self.lanes, 4 * row)

    def tile_float(self, base: Value, index: Index, row: int) -> Value:
        """The f32 of the rows of sum `row`, in word `index` of all rows of the tile."""
        return self.dot.tile_row(self.rows_at(base, index), row, f32)

    # -- sums -------------------------------------------------------------------------------

    def zeros(self) -> list[Value]:
        return [self.f.const(0, self.dot.sums)] * (self.vectors * self.rows)

    def float_zeros(self) -> list[Value]:
        return [self.f.const(0.0, vec(self.lanes, f32))] * (self.vectors * self.rows)

    def place(self, out: Value, stride: int, v: int, row: int) -> Value:
        """Address of the sums of vector v and a row, `stride` columns to a row."""
        at = self.f.gep(out, self.shift, 4)
        return self.f.gep(at, 4 * (row * stride + v * self.lanes))

    def places(self, out: Value, stride: int) -> Iterator[Value]:
        """Addresses of all sums, in order."""
        for v in self.columns:
            for i in range(self.rows):
                yield self.place(out, stride, v, i)

    def write(self, sums: list[Value], out: Value, stride: int) -> None:
        for value, place in zip(self.dot.rows_of(sums), self.places(out, stride), strict=True):
            self.f.store(value, place)
