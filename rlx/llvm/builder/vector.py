"""Vectors: lanes in and out, shuffles, horizontal reductions, and element-wise intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.errors import CodegenError
from rlx.llvm.builder.core import Core, Value, mismatch, unsuited
from rlx.llvm.builder.types import Number, Type, i1, i32, i64, vec


class VectorOps(Core):
    """Vector methods of a function."""

    def splat(self, value: Value, lanes: int) -> Value:
        """A scalar broadcast to all lanes."""
        if value.type.lanes != 1:
            unsuited("splat", value.type)
        if lanes == 1:
            return value
        type_ = vec(lanes, value.type)
        if value.const is not None:
            return self.const(value.const, type_)
        first = self.instr(
            f"insertelement {type_.name} poison, {value.type.name} {value.name}, i64 0", type_
        )
        return self.instr(
            f"shufflevector {type_.name} {first.name}, {type_.name} poison, "
            f"<{lanes} x i32> zeroinitializer",
            type_,
        )

    def iota(self, type_: Type, start: int = 0) -> Value:
        """start, start + 1, ... in the lanes."""
        return self.const([start + i for i in range(type_.lanes)], type_)

    def lane_mask(self, count: Value, lanes: int) -> Value:
        """The first `count` lanes: the mask of a tail."""
        # Narrowed, because masks of 64-bit comparisons must be packed again on AVX2.
        wide = self.splat(self.min(count, lanes).to(i32), lanes)
        return self.iota(wide.type) < wide

    def extract(self, vector: Value, lane: Value | int) -> Value:
        if vector.type.lanes == 1:
            return vector
        index = self.const(lane, i64) if isinstance(lane, int) else lane
        self._check_lane("extract", vector, index)
        return self.instr(
            f"extractelement {vector.type.name} {vector.name}, {index.type.name} {index.name}",
            vector.type.scalar,
        )

    def insert(self, vector: Value, value: Value, lane: Value | int) -> Value:
        if value.type is not vector.type.scalar:
            mismatch("insert", value.type, vector.type.scalar)
        index = self.const(lane, i64) if isinstance(lane, int) else lane
        self._check_lane("insert", vector, index)
        return self.instr(
            f"insertelement {vector.type.name} {vector.name}, {value.type.name} {value.name}, "
            f"{index.type.name} {index.name}",
            vector.type,
        )

    def _check_lane(self, op: str, vector: Value, index: Value) -> None:
        if index.const is not None and not 0 <= index.const < vector.type.lanes:
            raise CodegenError(
                "no such lane", where=op, got=index.const, expected=f"below {vector.type.lanes}"
            )

    def shuffle(self, a: Value, b: Value | None, lanes: Sequence[int]) -> Value:
        """Lanes picked from a (0 .. n-1) and b (n .. 2n-1); -1 leaves a lane undefined."""
        if b is not None and b.type is not a.type:
            mismatch("shuffle", a.type, b.type)
        limit = a.type.lanes * (2 if b is not None else 1)
        if a.type.lanes == 1 or not lanes or not all(-1 <= i < limit for i in lanes):
            raise CodegenError(
                "lanes out of range",
                where="shuffle",
                got=list(lanes),
                expected=f"-1 .. {limit - 1} of {a.type.name}",
            )
        picks = ", ".join("i32 poison" if i < 0 else f"i32 {i}" for i in lanes)
        other = b.name if b is not None else "poison"
        shuffled = vec(len(lanes), a.type.scalar)
        text = (
            f"shufflevector {a.type.name} {a.name}, {a.type.name} {other}, <{len(lanes)} x i32> "
            f"<{picks}>"
        )
        if len(lanes) == 1:
            return self.extract(self.instr(text, Type(f"<1 x {shuffled.name}>", "", 0, "")), 0)
        return self.instr(text, shuffled)

    def slice(self, vector: Value, start: int, lanes: int) -> Value:
        """`lanes` lanes from `start` on."""
        if lanes == 1:
            return self.extract(vector, start)
        return self.shuffle(vector, None, range(start, start + lanes))

    def concat(self, a: Value, b: Value) -> Value:
        """The lanes of a, then those of b."""
        if a.type.lanes == 1:
            empty = Value("poison", vec(2, a.type), a.fn)
            return self.insert(self.insert(empty, a, 0), b, 1)
        return self.shuffle(a, b, range(2 * a.type.lanes))

    def interleave(self, a: Value, b: Value) -> Value:
        """a0, b0, a1, b1, ..."""
        n = a.type.lanes
        return self.shuffle(a, b, [i // 2 + (i % 2) * n for i in range(2 * n)])

    def deinterleave(self, vectors: Sequence[Value], first: int = 0) -> Value:
        """Every n-th lane, from `first` on, of n concatenated vectors."""
        count, lanes = len(vectors), vectors[0].type.lanes
        if lanes == 1:
            return vectors[first]
        wanted = [first + i * count for i in range(lanes)]
        result = vectors[0]
        for n, vector in enumerate(vectors[1:], start=1):
            # lanes from earlier vectors stay where the last shuffle put them
            picks = []
            for i, at in enumerate(wanted):
                if at < n * lanes:
                    picks.append(at if n == 1 else i)
                else:
                    picks.append(at % lanes + lanes if at // lanes == n else -1)
            result = self.shuffle(result, vector, picks)
        return result

    def reverse(self, vector: Value) -> Value:
        return self.shuffle(vector, None, range(vector.type.lanes - 1, -1, -1))

    def reduce(self, op: str, vector: Value) -> Value:
        """Horizontal reduction by halving: add, mul, and, or, xor, min, max.

        The order is fixed, so a float sum is the same on every run. min and max keep NaN.
        """
        lanes = vector.type.lanes
        join: Callable[[Value, Value], Value]
        if op in ("min", "max"):
            join = self.min if op == "min" else self.max
        else:

            def join(a: Value, b: Value) -> Value:
                return self.binary(op, a, b)

        while lanes > 1:
            if lanes % 2:
                raise CodegenError("lanes not a power of two", where="reduce", got=vector.type.name)
            lanes //= 2
            vector = join(self.slice(vector, 0, lanes), self.slice(vector, lanes, lanes))
        return vector

    def any(self, mask: Value) -> Value:
        """i1: is any lane of the mask set?"""
        return self._mask_bits(mask).ne(0)

    def all(self, mask: Value) -> Value:
        """i1: are all lanes of the mask set?"""
        return self._mask_bits(mask).eq(-1)

    def _mask_bits(self, mask: Value) -> Value:
        if mask.type.scalar is not i1:
            unsuited("mask", mask.type)
        if mask.type.lanes == 1:
            return mask
        bits = Type(f"i{mask.type.lanes}", f"i{mask.type.lanes}", mask.type.lanes, "int")
        return self.instr(f"bitcast {mask.type.name} {mask.name} to {bits.name}", bits)

    def fma(self, a: Value, b: Value | Number, c: Value | Number) -> Value:
        """a * b + c, rounded once where the target has the instruction, else rounded twice."""
        x, y = self.const(b, a.type), self.const(c, a.type)
        if not a.type.is_float:
            unsuited("fma", a.type)
        if not self.module.target.fma:
            return self.binary("add", self.binary("mul", a, x), y)
        return self.intrinsic(f"llvm.fma.{a.type.suffix}", a.type, a, x, y)

    def min(self, a: Value, b: Value | Number) -> Value:
        """The smaller (signed); NaN if either is NaN. The sign of min(-0, 0) is unspecified."""
        return self._extremum("min", "lt", a, self.const(b, a.type))

    def max(self, a: Value, b: Value | Number) -> Value:
        """The larger (signed); NaN if either is NaN."""
        return self._extremum("max", "gt", a, self.const(b, a.type))

    def _extremum(self, name: str, predicate: str, a: Value, b: Value) -> Value:
        if a.type.is_int:
            if a.const is not None and b.const is not None:
                return self.const(
                    min(a.const, b.const) if name == "min" else max(a.const, b.const), a.type
                )
            return self.intrinsic(f"llvm.s{name}.{a.type.suffix}", a.type, a, b)
        # One instruction that returns b when either is NaN; a NaN in a needs the second select.
        best = self.select(self.compare(predicate, a, b), a, b)
        return self.select(a.is_nan(), a, best)

    def min_fast(self, a: Value, b: Value | Number) -> Value:
        """One instruction: a < b ? a : b. A NaN on the right is kept, one on the left is lost."""
        other = self.const(b, a.type)
        return self.select(self.compare("lt", a, other), a, other)

    def max_fast(self, a: Value, b: Value | Number) -> Value:
        """One instruction: a > b ? a : b. A NaN on the right is kept, one on the left is lost."""
        other = self.const(b, a.type)
        return self.select(self.compare("gt", a, other), a, other)

    def umin(self, a: Value, b: Value | Number) -> Value:
        return self._unsigned("umin", a, self.const(b, a.type))

    def umax(self, a: Value, b: Value | Number) -> Value:
        return self._unsigned("umax", a, self.const(b, a.type))

    def _unsigned(self, name: str, a: Value, b: Value) -> Value:
        if not a.type.is_int:
            unsuited(name, a.type)
        return self.intrinsic(f"llvm.{name}.{a.type.suffix}", a.type, a, b)

    def abs(self, a: Value) -> Value:
        """Magnitude; the most negative integer stays itself."""
        if a.type.is_float:
            return self.intrinsic(f"llvm.fabs.{a.type.suffix}", a.type, a)
        return self.intrinsic(f"llvm.abs.{a.type.suffix}", a.type, a, self.const(0, i1))

    def copysign(self, magnitude: Value, sign: Value) -> Value:
        name = f"llvm.copysign.{magnitude.type.suffix}"
        return self.intrinsic(name, magnitude.type, magnitude, self.const(sign, magnitude.type))

    def sqrt(self, a: Value) -> Value:
        """Correctly rounded."""
        if not a.type.is_float:
            unsuited("sqrt", a.type)
        return self.intrinsic(f"llvm.sqrt.{a.type.suffix}", a.type, a)

    def ceil_div(self, a: Value, b: int) -> Value:
        """Non-negative a divided by b, rounded up."""
        return (a + (b - 1)).udiv(b)

    def popcount(self, a: Value) -> Value:
        return self.intrinsic(f"llvm.ctpop.{a.type.suffix}", a.type, a)

    def leading_zeros(self, a: Value) -> Value:
        """Zero bits above the highest one; all of them for zero."""
        return self.intrinsic(f"llvm.ctlz.{a.type.suffix}", a.type, a, self.const(0, i1))

    def i32(self, value: int) -> Value:
        return self.const(value, i32)

    def i64(self, value: int) -> Value:
        return self.const(value, i64)
