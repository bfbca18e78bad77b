"""Vectors of floats as bytes: rounded half to even, moved by a zero point, clamped to their type.

On x86 a vector is clamped from above and rounded, and the rest is done where values are packed: two
instructions that saturate, and an addition of 16-bit numbers that does.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import CodegenError
from rlx.ir.dtype import DType, u8
from rlx.ir.ops.conv_integer import integer_range
from rlx.llvm.builder import Function, Value, f32, i8, i16, i32, vec
from rlx.llvm.math.real import round_even

_PACKS = {
    4: ("sse2.packssdw.128", "sse2.packuswb.128", "sse2.packsswb.128"),
    8: ("avx2.packssdw", "avx2.packuswb", "avx2.packsswb"),
    16: ("avx512.packssdw.512", "avx512.packuswb.512", "avx512.packsswb.512"),
}  # words of pairs of vectors by the lanes of one, then bytes that are unsigned or signed


class ByteEncoder:
    """Bytes of vectors of `lanes` floats, none of which is NaN. With `relu` none is below zero."""

    def __init__(self, f: Function, lanes: int, dtype: DType, zero: Value, relu: bool) -> None:
        self.f, self.lanes, self.relu = f, lanes, relu
        self.unsigned = dtype is u8
        self.zero = zero
        low, high = (f.i32(int(x)) - zero for x in integer_range(dtype))
        if relu:
            low = f.max(low, 0)
        self.least, self.most = (f.splat(x.to(f32), lanes) for x in (low, high))

    def bounded(self, x: Value) -> Value:
        """The whole number, without the zero point, that a byte stands for."""
        return self.f.max_fast(self.f.min_fast(round_even(x), self.most), self.least)

    def store(
        self, reals: Sequence[Value], out: Value, mask: Value | None, tail: Value | None
    ) -> None:
        """The bytes of vectors that follow each other. `mask` has the lanes of the last one that
        exist, and `tail` their number."""
        f, lanes, count = self.f, self.lanes, len(reals)
        encoded = self._encoded(reals)
        wide = encoded.type.lanes
        if mask is not None and tail is not None and f.target.avx512:
            left = tail + (count - 1) * lanes
            f.masked_store(encoded, out, f.lane_mask(left, wide))
            return
        first = 0
        whole = count - (mask is not None)
        for part in (4, 2, 1):
            if part <= whole - first:
                f.store(self._part(encoded, first, part), out, first * lanes)
                first += part
        if mask is not None:
            f.masked_store(self._part(encoded, first, 1), out, mask, first * lanes)

    def of_units(self, reals: Sequence[Value]) -> Value:
        """The bytes of four vectors of which unit u (of 128 bits) has bytes 16·u … of the result,
        four from each vector."""
        if self.f.target.is_x86:
            return self._saturated(reals)
        if self.lanes != 4:
            raise CodegenError("units of wide vectors", where="of_units", got=self.lanes)
        return self._encoded(reals)

    def _part(self, encoded: Value, first: int, vectors: int) -> Value:
        if vectors * self.lanes == encoded.type.lanes:
            return encoded
        return self.f.slice(encoded, first * self.lanes, vectors * self.lanes)

    def _encoded(self, reals: Sequence[Value]) -> Value:
        """Bytes of one, two or four vectors; the last one is repeated."""
        f = self.f
        count = next(n for n in (1, 2, 4) if n >= len(reals))
        if f.target.is_x86:
            return self._packed(reals, count)
        offset = f.splat(self.zero, self.lanes)
        made = [(self.bounded(x).to(i32) + offset).to(i8) for x in reals]
        made += [made[-1]] * (count - len(made))
        while len(made) > 1:
            made = [f.concat(a, b) for a, b in zip(made[::2], made[1::2], strict=True)]
        return made[0]

    def _packed(self, reals: Sequence[Value], count: int) -> Value:
        """Both instructions that pack work in units: their bytes are put in order."""
        f, lanes, units = self.f, self.lanes, self.lanes // 4
        packed = self._saturated(reals).bits(vec(lanes, i32))
        order = [unit * 4 + j for j in range(count) for unit in range(units)]
        if len(order) == 1:
            return f.extract(packed, 0).bits(vec(lanes, i8))
        return f.shuffle(packed, None, order).bits(vec(count * lanes, i8))

    def _saturated(self, reals: Sequence[Value]) -> Value:
        f, lanes = self.f, self.lanes
        whole, halves, chars = vec(lanes, i32), vec(2 * lanes, i16), vec(4 * lanes, i8)
        to_halves, to_unsigned, to_signed = (f"llvm.x86.{name}" for name in _PACKS[lanes])
        name = f"llvm.lrint.{whole.suffix}.{vec(lanes, f32).suffix}"
        near = [f.intrinsic(name, whole, f.min_fast(x, self.most)) for x in reals]
        if len(near) > 1:
            near += [near[-1]] * (len(near) % 2)
        offset = f.splat(self.zero.to(i16), 2 * lanes)
        words = []
        for a, b in zip(near[::2], near[1::2] or near, strict=True):
            word = f.intrinsic(to_halves, halves, a, b)
            words.append(f.intrinsic(f"llvm.sadd.sat.{halves.suffix}", halves, word, offset))
        pack = to_unsigned if self.unsigned else to_signed
        packed = f.intrinsic(pack, chars, words[0], words[-1])
        if self.relu:
            least = f.splat(self.zero.to(i8), 4 * lanes)
            packed = (f.umax if self.unsigned else f.max)(packed, least)
        return packed
