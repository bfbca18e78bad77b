"""Stable sort of rows: radix sort from the last byte of a key on, and insertion sort of short rows.

A key is an unsigned integer in the order of the elements. Elements move as they are, with their
indices beside them for argsort, and each pass computes their keys anew: that costs less than memory
for them, and −0 and NaN keep their bits. A pass in which all keys have the same byte is left out.
"""

from __future__ import annotations

from functools import partial

from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i8, i16, i32, i64
from rlx.support.records import dataclass

_SHORT = 24  # rows up to here: clearing the counts would take longer than insertion
_BUCKETS = 256
_RAW: dict[int, Type] = {1: i8, 2: i16, 4: i32, 8: i64}
_MANTISSA = {"f8e4m3": 3, "f8e5m2": 2, "f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def raw_bits(f: Function, at: Value, dtype: DType) -> Value:
    """An element's bits, in i32 or i64."""
    raw = f.load(at, _RAW[dtype.bytes])
    return raw.to(i32, signed=False) if dtype.bytes < 4 else raw


def key_of(f: Function, bits: Value, dtype: DType, descending: bool = False) -> Value:
    """An element's key from its bits: unsigned, in the element's order, NaN greatest."""
    width = dtype.bits
    most = (1 << width) - 1
    sign = 1 << (width - 1)
    if dtype.kind == "int":
        key = bits ^ _wrapped(sign, bits)
    elif dtype.is_float:
        size = bits & _wrapped(sign - 1, bits)
        plain = f.select(size.eq(0), 0, bits)  # −0 is 0
        negative = (plain & _wrapped(sign, bits)).ne(0)
        key = f.select(negative, ~plain & _wrapped(most, bits), plain | _wrapped(sign, bits))
        key = f.select(size > _infinity(dtype), _wrapped(most, bits), key)
    else:
        key = bits
    return key ^ _wrapped(most, bits) if descending else key


def _infinity(dtype: DType) -> int:
    """The bits beyond which a positive float is NaN."""
    if dtype.name == "f8e4m3":
        return 0x7E  # the largest number: it has no infinity
    return (1 << dtype.bits - 1) - (1 << _MANTISSA[dtype.name])


def _wrapped(number: int, like: Value) -> int:
    """An unsigned constant as the builder takes it, in two's complement."""
    width = like.type.bits
    return number - (1 << width) if number >> (width - 1) else number


@dataclass(frozen=True)
class RadixSort(KernelSpec):
    """args: x, y, scratch, scratch_bytes, outer, n, inner

    Sorts along n of a contiguous [outer, n, inner]. With `indices`, y is i64 and gets the order.
    `scratch` holds `scratch_bytes` for each worker.
    """

    dtype: DType
    descending: bool
    indices: bool

    args = ("x", "y", "scratch", "scratch_bytes", "outer", "n", "inner")

    @property
    def label(self) -> str:
        return "argsort" if self.indices else "sort"

    def scratch(self, n: int) -> int:
        """Bytes each worker needs for rows of up to n elements."""
        return 2 * (_line(n * self.dtype.bytes) + _line(4 * n) * self.indices) + self.counts

    @property
    def counts(self) -> int:
        return self.dtype.bytes * _BUCKETS * 8

    def emit(self, m: Module) -> None:
        _Sort(self, m.kernel()).emit()


def _line(size: int) -> int:
    return -(-size // 64) * 64


class _Sort:
    def __init__(self, spec: RadixSort, f: Function) -> None:
        self.spec, self.f = spec, f
        self.o = Operands(f, spec.args, ("x", "y", "scratch"))
        self.n, self.size = self.o["n"], spec.dtype.bytes

    def emit(self) -> None:
        f, o = self.f, self.o
        self.counts = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        first = f.gep(self.counts, self.spec.counts)
        values, numbers = self._lines(self.size), self._lines(4)
        second = f.gep(first, values)
        indices = f.gep(second, values)
        self.buffers = [first, second, indices, f.gep(indices, numbers)]
        lo, hi = f.split(o["outer"] * o["inner"])
        for row in f.range(lo, hi):
            outer = row.udiv(o["inner"])
            start = outer * self.n * o["inner"] + (row - outer * o["inner"])
            f.if_(self.n <= _SHORT, partial(self._short, start), partial(self._long, start))

    def _lines(self, size: int) -> Value:
        return (self.n * size + 63) & -64

    # -- elements ---------------------------------------------------------------------------------

    def _key(self, bits: Value) -> Value:
        return key_of(self.f, bits, self.spec.dtype, self.spec.descending)

    def _read(self, base: Value, at: Value) -> Value:
        return raw_bits(self.f, self.f.gep(base, at, self.size), self.spec.dtype)

    def _write(self, bits: Value, base: Value, at: Value) -> None:
        self.f.store(bits.to(_RAW[self.size], signed=False), self.f.gep(base, at, self.size))

    def _load(self, start: Value, i: Value) -> Value:
        """Element i of the row, copied to the first buffer."""
        bits = self._read(self.o["x"], start + i * self.o["inner"])
        self._write(bits, self.buffers[0], i)
        if self.spec.indices:
            self.f.store(i.to(i32), self.f.gep(self.buffers[2], i, 4))
        return bits

    def _store(self, start: Value, values: Value, indices: Value) -> None:
        f, o = self.f, self.o
        for i in f.range(0, self.n):
            to = start + i * o["inner"]
            if self.spec.indices:
                number = f.load(f.gep(indices, i, 4), i32).to(i64, signed=False)
                f.store(number, f.gep(o["y"], to, 8))
            else:
                self._write(self._read(values, i), o["y"], to)

    # -- short rows -------------------------------------------------------------------------------

    def _short(self, start: Value) -> None:
        f, (values, _, indices, _) = self.f, self.buffers
        for i in f.range(0, self.n):
            bits = self._load(start, i)
            key = self._key(bits)

            def before(j: Value, key: Value = key) -> Value:
                other = self._key(self._read(values, f.max(j - 1, 0)))
                return (j > 0) & f.compare("ult", key, other)

            def shift(j: Value) -> list[Value]:
                self._write(self._read(values, j - 1), values, j)
                if self.spec.indices:
                    f.store(f.load(f.gep(indices, j - 1, 4), i32), f.gep(indices, j, 4))
                return [j - 1]

            (place,) = f.while_([i + 0], before, shift)
            self._write(bits, values, place)
            if self.spec.indices:
                f.store(i.to(i32), f.gep(indices, place, 4))
        self._store(start, values, indices)

    # -- long rows --------------------------------------------------------------------------------

    def _bucket(self, byte: int, key: Value) -> Value:
        """The address of the count for that byte of a key."""
        digit = (key >> (8 * byte) & (_BUCKETS - 1)).to(i64, signed=False)
        return self.f.gep(self.counts, digit + byte * _BUCKETS, 8)

    def _long(self, start: Value) -> None:
        f, zero = self.f, self.f.i64(0)
        for at in f.range(0, self.size * _BUCKETS):
            f.store(zero, f.gep(self.counts, at, 8))
        for i in f.range(0, self.n):
            key = self._key(self._load(start, i))
            for byte in range(self.size):
                bucket = self._bucket(byte, key)
                f.store(f.load(bucket, i64) + 1, bucket)
        state = self.buffers
        first = self._key(self._read(self.buffers[0], zero))
        for byte in range(self.size):
            several = f.load(self._bucket(byte, first), i64).ne(self.n)
            state = f.if_(several, partial(self._pass, byte, state), partial(list, state))
        self._store(start, state[0], state[2])

    def _pass(self, byte: int, state: list[Value]) -> list[Value]:
        """Distribute the elements by a byte of their keys. Returns the buffers, swapped."""
        f, (source, target, numbers, renumbered) = self.f, state

        def place(digit: Value, total: Value) -> Value:
            count = f.gep(self.counts, digit + byte * _BUCKETS, 8)
            found = f.load(count, i64)
            f.store(total, count)
            return total + found

        f.loop(0, _BUCKETS, 1, [f.i64(0)], place)
        for i in f.range(0, self.n):
            bits = self._read(source, i)
            bucket = self._bucket(byte, self._key(bits))
            at = f.load(bucket, i64)
            f.store(at + 1, bucket)
            self._write(bits, target, at)
            if self.spec.indices:
                f.store(f.load(f.gep(numbers, i, 4), i32), f.gep(renumbered, at, 4))
        return [target, source, renumbered, numbers]
