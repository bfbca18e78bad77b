"""Rows of a weight as a warp reads them: 16 bytes of each lane at a time, decoded to f32."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.builder import BlockFunction
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i32, vec
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

Raw = list[Value]  # what a lane has loaded of a row: values of 32 bits
Segment = tuple[int, Value, Value]  # so many numbers are scaled, and have this added to each


class WeightRows:
    """Weights [N, K], a row for each output. A chunk is what one lane loads at a time."""

    elements: int  # of a chunk
    registers = 4  # of a chunk as it is loaded
    record = 0  # bytes in which 32 numbers of x are kept to be multiplied, where they are split

    def chunks(self, k: int) -> int:
        return k // self.elements

    def row_bytes(self, k: int) -> int:
        raise NotImplementedError

    def load(self, f: BlockFunction, base: Value, row: Value, chunk: Value, k: int) -> Raw:
        """Load chunk `chunk` (i64) of row `row` (i64)."""
        raise NotImplementedError

    def runs(self, f: BlockFunction, chunk: Value) -> list[tuple[Value, int]]:
        """Which columns a chunk holds: runs of neighbours, as (first, count)."""
        return [(chunk * self.elements, self.elements)]

    def decode(self, f: BlockFunction, raw: Raw, chunk: Value) -> list[Value]:
        """The numbers of a chunk, in the order of its runs."""
        raise NotImplementedError

    def put_record(self, f: BlockFunction, values: Sequence[Value], at: Value) -> None:
        """Split 32 numbers of x, into shared memory."""
        raise NotImplementedError

    def operands(self, f: BlockFunction, start: Value | int, chunk: Value) -> list[Value]:
        """What `add` needs of the numbers that a chunk is multiplied with; the first record lies at
        `start`."""
        raise NotImplementedError

    def add(self, f: BlockFunction, raw: Raw, operands: Sequence[Value], total: Value) -> Value:
        """Add the products of a chunk and split numbers."""
        raise NotImplementedError

    def segments(self, f: BlockFunction, raw: Raw) -> list[Segment]:
        """What the numbers of a chunk are scaled with; nothing where they are as they should be."""
        return []


@dataclass(frozen=True)
class FloatRows(WeightRows):
    """Floats as they are."""

    dtype: DType

    @property
    def elements(self) -> int:  # type: ignore[override]
        return 16 // self.dtype.bytes

    def row_bytes(self, k: int) -> int:
        return k * self.dtype.bytes

    def load(self, f: BlockFunction, base: Value, row: Value, chunk: Value, k: int) -> Raw:
        start = f.gep(base, row * (k * self.dtype.bytes) + chunk * 16)
        return words(f, start, 4)

    def decode(self, f: BlockFunction, raw: Raw, chunk: Value) -> list[Value]:
        return floats_of(f, raw, self.dtype)


def words(f: BlockFunction, start: Value, count: int) -> Raw:
    """`count` (1, 2 or 4) values of 32 bits at an aligned address, by one load."""
    if count == 1:
        return [f.load(start, i32, align=4)]
    whole = f.load(start, vec(count, i32), align=4 * count)
    return [f.extract(whole, i) for i in range(count)]


def floats_of(f: BlockFunction, raw: Sequence[Value], dtype: DType) -> list[Value]:
    """The floats in values of 32 bits."""
    if dtype.bytes == 4:
        return [v.bits(f32) for v in raw]
    kind = memory_type(dtype)
    return [number for word in raw for number in f.unpack_halves(word, kind)]


def load_run(f: BlockFunction, base: Value, first: Value, count: int, dtype: DType) -> list[Value]:
    """`count` neighbouring floats from element `first` (i64) on; 16 bytes are loaded at a time."""
    per = 16 // dtype.bytes
    found: list[Value] = []
    start = f.gep(base, first, dtype.bytes)
    for i in range(0, count, per):
        size = min(per, count - i) * dtype.bytes // 4
        found += floats_of(f, words(f, f.gep(start, i * dtype.bytes), size), dtype)
    return found
