"""Rows of packed weights as groups of four warps multiply them: numbers of a lane, in f16.

In a step of 64 columns a lane has 16 numbers of each of its rows. Of each unit of columns (16, or
32 of Q8_0) the four lanes of a row have neighbours, as they lie in memory; columns of x are ordered
in the same way, by `Planes`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.gemm.weight_rows import words
from rlx.backends.cuda.kernels.qgemm.digits import half
from rlx.backends.cuda.kernels.qgemm.row_planes import offsets
from rlx.llvm.builder import Value, f16, f32, i8, i16, i32, i64

Raw = list[Value]  # what a lane has loaded of a step of a row
_BLOCKS = 2  # of 32 columns, of a step
# an f32, which numbers of 8 bits and of up to 7 are added to as the second or the third byte of its
# bits, and the order of bytes: multiples of a scale less those of it are exact or nearly so
_WIDE, _NARROW = (0x47000000, 32768, 0x7404, 4), (0x43000000, 128, 0x7044, 8)
_ZERO = {"Q8_0": 128, "Q4_0": 8, "Q6_K": 32}  # of quants as numbers without a sign


def unit_of(scheme: str) -> int:
    """Of how many columns the four lanes of a row have neighbours."""
    return 32 if scheme == "Q8_0" else 16


class Fragments:
    def __init__(self, f: BlockFunction, scheme: str, k: int) -> None:
        self.f, self.scheme = f, scheme
        self.places, self._row_bytes = offsets(scheme, k)
        self.quad = f.lane32() & 3

    @property
    def size(self) -> int:
        """Values of a step of a row."""
        return {"Q8_0": 5, "Q4_0": 3, "Q4_K": 4, "Q5_K": 6, "Q6_K": 6}[self.scheme]

    def row(self, weight: Value, number: Value) -> Value:
        return self.f.gep(weight, number.to(i64) * self._row_bytes)

    def load(self, row: Value, step: Value) -> Raw:
        """Quants of two blocks, their scales, the super scale, higher bits."""
        f, scheme, block = self.f, self.scheme, step * _BLOCKS
        found: Raw = []
        each, size = (8, 32) if scheme == "Q8_0" else (4, 16)
        start = f.gep(row, (block * size + self.quad * each).to(i64))
        for i in range(_BLOCKS):
            found += words(f, f.gep(start, size * i), each // 4)
        found += words(f, f.gep(row, (block * 2).to(i64) + self.places["scales"]), 1)
        if scheme in ("Q4_K", "Q5_K"):
            supers = f.gep(row, ((block >> 3) * 4).to(i64) + self.places["supers"])
            found += words(f, supers, 1)
        if scheme == "Q5_K":
            found += words(f, f.gep(row, (block * 4).to(i64) + self.places["high"]), 2)
        if scheme == "Q6_K":
            supers = f.gep(row, ((block >> 3) * 2).to(i64) + self.places["supers"])
            found.append(f.load(supers, i16, align=2).to(i32, signed=False))
            high = f.gep(row, (block * 8 + (self.quad & 1) * 4).to(i64) + self.places["high"])
            for i in range(_BLOCKS):
                found += words(f, f.gep(high, 8 * i), 1)
        return found

    def decode(self, raw: Sequence[Value]) -> list[Value]:
        """Pairs of f16 of two rows, as four products of 16 columns take them."""
        halves = [raw[: self.size], raw[self.size :]]
        made = [[self._block(row, i) for i in range(_BLOCKS)] for row in halves]
        # of a row, a block and one of its two products: two pairs
        found = []
        for i in range(_BLOCKS):
            for part in range(2):
                first, second = (row[i][2 * part : 2 * part + 2] for row in made)
                found += [first[0], second[0], first[1], second[1]]
        return found

    def _block(self, raw: Sequence[Value], i: int) -> list[Value]:
        """Four pairs: two of each 16 columns."""
        f, scheme = self.f, self.scheme
        if scheme == "Q8_0":
            quants = [w ^ -0x7F7F7F80 for w in raw[2 * i : 2 * i + 2]]
            scales = raw[4]
        else:
            quants = [raw[i] & 0x0F0F0F0F, raw[i] >> 4 & 0x0F0F0F0F]
            scales = raw[2]
        if scheme == "Q5_K":
            bits = raw[4 + i] >> self.quad * 4
            quants = [
                q | ((bits >> shift & 15) * 0x02040810 & 0x10101010)
                for q, shift in zip(quants, (0, 16), strict=True)
            ]
        if scheme == "Q6_K":
            bits = raw[4 + i] >> (self.quad >> 1) * 2
            quants = [
                q | (bits << 4 & 0x30303030 if shift == 0 else bits & 0x30303030)
                for q, shift in zip(quants, (0, 4), strict=True)
            ]
        pair = scales >> 16 if i else scales
        found = []
        for number, word in enumerate(quants):
            scale, less = self._scale(pair, raw[3] if len(raw) > 3 else pair, number)
            magic, least, order, shift = _WIDE if scheme == "Q8_0" else _NARROW
            zero = scale * -float(least + _ZERO.get(scheme, 0))
            zero = zero if less is None else zero + less
            made = []
            for byte in range(4):
                whole = f.pick_bytes(word, f.i32(magic), order | byte << shift).bits(f32)
                made.append(f.fma(whole, scale, zero))
            found += [f.pack_halves(made[0], made[1], f16), f.pack_halves(made[2], made[3], f16)]
        return found

    def _scale(self, pair: Value, supers: Value, part: int) -> tuple[Value, Value | None]:
        """What quants of 16 columns are multiplied with, and what is added."""
        f = self.f
        if self.scheme in ("Q8_0", "Q4_0"):
            return half(f, pair), None
        if self.scheme == "Q6_K":
            return half(f, supers) * (pair >> 8 * part).to(i8).to(f32), None
        whole, least = f.unpack_halves(supers, f16)
        scale, minimum = ((pair >> shift & 63).to(f32) for shift in (0, 8))
        return whole * scale, least * minimum * -1.0
