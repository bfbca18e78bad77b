"""Rows of packed weights as a warp reads and decodes them: see `row_planes`."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction
from rlx.backends.cuda.kernels.gemm.weight_rows import Raw, Segment, WeightRows, words
from rlx.backends.cuda.kernels.qgemm.digits import (
    DIGITS,
    RECORD,
    SCALE_AT,
    add_products,
    factors,
    half,
    quant_bytes,
    split,
)
from rlx.backends.cuda.kernels.qgemm.row_planes import MINIMA, RUNS, offsets
from rlx.llvm.builder import Value, f16, f32, i8, i16, i32, vec
from rlx.support.records import dataclass

_BIASED = 0x4B000000  # 2²³ as an f32: its low bits are an integer


@dataclass(frozen=True)
class PackedRows(WeightRows):
    """Weights of a scheme of `row_planes`."""

    scheme: str

    @property
    def has_bytes(self) -> bool:
        """Whether a quant is a byte with a sign."""
        return self.scheme == "Q8_0" or self.scheme in RUNS

    @property
    def elements(self) -> int:  # type: ignore[override]
        return 16 if self.has_bytes else 32

    @property
    def registers(self) -> int:  # type: ignore[override]
        usual = 7 if self.scheme in MINIMA else 5  # two floats take room of their own
        return {"Q4_K": 6, "Q5_K": 7, "Q6_K": 8}.get(self.scheme, usual)

    @property
    def record(self) -> int:  # type: ignore[override]
        return 0 if self.scheme in ("MXFP4", "Q2_K") else RECORD

    @property
    def most(self) -> int:
        """No number that `decode` gives is larger; the least is 0, or as far below it where nothing
        is added to them."""
        return 255 if self.has_bytes else {"Q6_K": 63, "Q5_K": 31}.get(self.scheme, 15)

    def row_bytes(self, k: int) -> int:
        return offsets(self.scheme, k)[1]

    def load(self, f: BlockFunction, base: Value, row: Value, chunk: Value, k: int) -> Raw:
        places, size = offsets(self.scheme, k)
        start = f.gep(base, row * size)
        found = words(f, f.gep(start, chunk * 16), 4)
        if self.scheme == "MXFP4":
            power = f.load(f.gep(start, chunk + places["scales"]), i8).to(i32, signed=False)
            return [*found, power]
        if self.scheme in RUNS:
            at = (chunk if RUNS[self.scheme] == 16 else chunk >> 1) * 4
            named = ["scales", *["minima"] * (self.scheme in MINIMA)]
            return found + [w for n in named for w in words(f, f.gep(start, at + places[n]), 1)]
        if self.scheme == "Q8_0":
            scale = f.gep(start, (chunk >> 1) * 2 + places["scales"])
        else:
            scale = f.gep(start, chunk * 2 + places["scales"])
        pair = f.load(scale, i16, align=2).to(i32, signed=False)
        if self.scheme in ("Q4_K", "Q5_K"):
            supers = words(f, f.gep(start, (chunk >> 3) * 4 + places["supers"]), 1)
            if self.scheme == "Q5_K":
                supers += words(f, f.gep(start, chunk * 4 + places["high"]), 1)
            return [*found, pair, *supers]
        if self.scheme == "Q6_K":
            high = words(f, f.gep(start, chunk * 8 + places["high"]), 2)
            whole = f.load(f.gep(start, (chunk >> 3) * 2 + places["supers"]), i16, align=2)
            return [*found, pair, whole.to(i32, signed=False), *high]
        return [*found, pair]

    def decode(self, f: BlockFunction, raw: Raw, chunk: Value) -> list[Value]:
        """Quants as they are stored; `segments` has what they are scaled with."""
        quants = raw[:4]
        if self.has_bytes:
            bias = 0 if self.scheme == "Q8_0" else 128
            return [v for word in quants for v in bytes_of(f, word ^ -0x7F7F7F80, bias)]
        low, high = [w & 0x0F0F0F0F for w in quants], [(w >> 4) & 0x0F0F0F0F for w in quants]
        if self.scheme == "MXFP4":
            return [v for word in (*low, *high) for v in small_floats(f, word)]
        if self.scheme == "Q5_K":
            for i in range(4):
                low[i] = low[i] | spread_bits(raw[6] >> 4 * i) << 4
                high[i] = high[i] | spread_bits(raw[6] >> 4 * i + 16) << 4
        if self.scheme == "Q6_K":
            more = raw[6:8]
            for i in range(4):
                word, shift = more[i % 2], 2 * (i // 2)
                low[i] = low[i] | ((word >> shift) & 0x03030303) << 4
                high[i] = high[i] | ((word >> shift + 4) & 0x03030303) << 4
        return [v for word in (*low, *high) for v in bytes_of(f, word)]

    def put_record(self, f: BlockFunction, values: Sequence[Value], at: Value) -> None:
        words, scale, total = split(f, values)
        for i in range(0, len(words), 4):
            f.store_shared(f.join(words[i : i + 4]), at, 4 * i, align=16)
        f.store_shared(f.join([scale, total]), at, SCALE_AT, align=8)

    def operands(self, f: BlockFunction, start: Value | int, chunk: Value) -> list[Value]:
        found, number = list[Value](), chunk.to(i32)
        record = number >> 1 if self.has_bytes else number
        at = record * RECORD + start
        words = at + (number & 1) * 16 if self.has_bytes else at
        for plane in range(DIGITS):
            for i in range(0, self.elements, 16):
                found += shared_words(f, words, 32 * plane + i, 4)
        pair = f.load_shared(at, vec(2, f32), SCALE_AT, align=8)
        whole = f.extract(pair, 1)
        if self.scheme in MINIMA:  # of the numbers of two chunks, for the first
            whole = f.select((number & 1).eq(0), whole, 0.0)
        return [*found, f.extract(pair, 0), whole]

    def add(self, f: BlockFunction, raw: Raw, operands: Sequence[Value], total: Value) -> Value:
        if self.scheme in RUNS:
            scales = [w.bits(f32) if i == 0 else -w.bits(f32) for i, w in enumerate(raw[4:])]
            return add_products(f, "Q8_0", raw[:4], scales, operands, total)
        quants = quant_bytes(f, self.scheme, raw[:4], raw[6:])
        scales = factors(f, self.scheme, raw[4], raw[-1] if len(raw) < 6 else raw[5])
        return add_products(f, self.scheme, quants, scales, operands, total)

    def segments(self, f: BlockFunction, raw: Raw) -> list[Segment]:
        if self.scheme in RUNS:
            offset = -raw[5].bits(f32) if raw[5:] else f.const(0.0, f32)
            return [(16, raw[4].bits(f32), offset)]
        if self.scheme in ("Q8_0", "Q4_0"):
            scale = half(f, raw[4])
            bias = -128.0 if self.scheme == "Q8_0" else -8.0
            return [(self.elements, scale, scale * bias)]
        if self.scheme == "MXFP4":
            power = f.select(raw[4].eq(0), f.i32(1 << 22), raw[4] << 23)  # of 2
            return [(32, power.bits(f32), f.const(0.0, f32))]
        if self.scheme in ("Q4_K", "Q5_K"):
            d, least = f.unpack_halves(raw[5], f16)
            scale, minimum = ((raw[4] >> s & 63).to(f32) for s in (0, 8))
            return [(32, d * scale, least * minimum * -1.0)]
        d = half(f, raw[5])
        found: list[Segment] = []
        for shift in (0, 8):
            scale = d * (raw[4] >> shift).to(i8).to(f32)
            found.append((16, scale, scale * -32.0))
        return found


def decode_one(f: BlockFunction, scheme: str, row: Value, column: Value, k: int) -> Value:
    """One number of a row, the same as `decode` and `segments` give."""
    places = offsets(scheme, k)[0]

    def number(part: str, size: int, at: Value) -> Value:
        type_ = i8 if size == 1 else i16 if size == 2 else i32
        found = f.load(f.gep(row, at * size + places[part]), type_, align=size)
        return found.to(i32, signed=False)

    chunk, inside = column >> 5, (column & 31).to(i32)
    if scheme == "Q8_0":
        quant = f.load(f.gep(row, column), i8).to(f32)
        return quant * half(f, number("scales", 2, chunk))
    q = number("quants", 1, chunk * 16 + (column & 15)) >> (inside >> 4) * 4 & 15
    if scheme == "Q5_K":
        q = q | (number("high", 4, chunk) >> inside & 1) << 4
    if scheme == "Q6_K":
        more = number("high", 1, chunk * 8 + (column & 7))
        q = q | (more >> (inside >> 3) * 2 & 3) << 4
        small = f.load(f.gep(row, (column >> 4) + places["scales"]), i8).to(f32)
        scale = half(f, number("supers", 2, column >> 8)) * small
        return f.fma(q.to(f32), scale, scale * -32.0)
    if scheme == "Q4_0":
        scale = half(f, number("scales", 2, chunk))
        return f.fma(q.to(f32), scale, scale * -8.0)
    pair = number("scales", 2, chunk)
    d, least = f.unpack_halves(number("supers", 4, column >> 8), f16)
    scale, minimum = ((pair >> s & 63).to(f32) for s in (0, 8))
    return f.fma(q.to(f32), d * scale, least * minimum * -1.0)


def shared_words(f: BlockFunction, at: Value, offset: int, count: int) -> list[Value]:
    """`count` values of 32 bits in shared memory, by one load."""
    found = f.load_shared(at, vec(count, i32), offset, align=4 * count)
    return [f.extract(found, i) for i in range(count)]


def bytes_of(f: BlockFunction, word: Value, bias: int = 0) -> list[Value]:
    """The four bytes of a value, less a bias, as f32."""
    found = []
    for shift in (0, 8, 16, 24):
        byte = word >> shift & 255
        found.append((byte | _BIASED).bits(f32) - float((1 << 23) + bias))
    return found


def spread_bits(word: Value) -> Value:
    """The four lowest bits of a value, each in a byte."""
    return ((word & 15) * 0x00204081) & 0x01010101


def small_floats(f: BlockFunction, word: Value) -> list[Value]:
    """Four bytes with a float of 4 bits each: a sign, two bits of exponent, one of mantissa."""
    found = []
    for shift in (0, 8, 16, 24):
        sign, rest = word >> shift << 28 & -(1 << 31), (word >> shift & 7) << 22
        found.append((sign | rest).bits(f32) * 2.0**126)
    return found
