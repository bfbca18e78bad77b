"""Rows of x as records of digits, in memory, for products of a few rows with large packed weights.

Where many blocks multiply the same rows, each would split them anew.
"""

from __future__ import annotations

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run
from rlx.backends.cuda.kernels.qgemm.digits import DIGITS, RECORD, SCALE_AT, Scale, digit_words
from rlx.ir.dtype import f32 as _F32
from rlx.llvm.builder import Value, f32, i32, i64
from rlx.support.records import dataclass

_WARPS = 4
PASS = 128  # columns that a warp splits at a time: each eight lanes a record


@dataclass(frozen=True)
class SplitDigits(BlockKernel):
    """args: x (f32), rows of x apart (in elements), records, M"""

    k: int

    @property
    def label(self) -> str:
        return "digits"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    def blocks(self, m: int) -> int:
        """Of a launch with m rows."""
        return -(-m * (self.k // PASS) // _WARPS)

    def emit(self, m: KernelModule) -> None:
        f = m.begin_block(self.threads)
        args = f["args"]
        x, stride, out = f.arg(args, 0), f.arg(args, 1, i64), f.arg(args, 2)
        item = f.block_number() * _WARPS + (f.thread() >> 5)
        row = item.udiv(self.k // PASS)
        column = (item - row * (self.k // PASS)) * PASS + f.lane32() * 4
        f.let_next_start()
        f.wait_for_previous()
        count = f.arg(args, 3, i64)
        there = f.min(row.to(i64), count - 1)
        base = f.gep(x, there * stride, 4)
        values = load_run(f, base, column.to(i64), 4, _F32)
        records = f.gep(out, there * (self.k // 32 * RECORD))
        store_record(f, values, records, column.to(i64), row.to(i64) < count)


def store_record(
    f: BlockFunction, values: list[Value], records: Value, column: Value, inside: Value
) -> None:
    """Store the digits of 32 numbers, four in each of eight neighbouring lanes, from this column
    (i64) on, in a row's records."""
    words, scale, total = split_by_eight(f, values)
    to, number = f.gep(records, (column >> 5) * RECORD), f.lane32() & 7

    def store() -> None:
        place = f.gep(to, number.to(i64), 4)
        for i in range(DIGITS):
            f.store(words[i], place, 32 * i, align=4)
        pair = f.join([scale, total])
        f.if_(number.eq(0), lambda: f.store(pair, to, SCALE_AT, align=8))

    f.if_(inside, store)


def split_by_eight(
    f: BlockFunction, values: list[Value]
) -> tuple[list[Value], Value, Value]:  # fmt: skip
    """Of 32 numbers, four in each of eight neighbouring lanes: the lane's word of each digit, their
    scale and their sum."""
    largest = f.i32(0)
    for v in values:
        largest = f.max(largest, v.bits(i32) & 0x7FFFFFFF)
    for distance in (1, 2, 4):
        largest = f.max(largest, f.exchange(largest, distance))
    power = Scale(f, largest)
    words, total = digit_words(f, power, values)
    for distance in (1, 2, 4):
        total = total + f.exchange(total, distance)
    scale = power.value()
    return words, scale, total.to(f32) * scale
