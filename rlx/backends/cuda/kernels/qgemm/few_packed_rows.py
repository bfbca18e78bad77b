"""Products of two to eight rows with packed weights, by tensor cores that multiply bytes.

Rows of the weight are the left side of small products, rows of x the eight columns of the right
side, one digit of them at a time. A product spans a block of 32 columns, so that sums are exact
before they are scaled. Warps divide the columns; a lane loads four blocks of a row together.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.batch_invariance import is_asked
from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.kernels.gemm.few_rows import FEW, TILE, store_sums
from rlx.backends.cuda.kernels.gemm.plan import BLOCKS
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run, words
from rlx.backends.cuda.kernels.qgemm.digits import (
    DIGITS,
    RECORD,
    SCALE_AT,
    Scale,
    digit_words,
    factors,
    quant_bytes,
    takes_bytes,
    whole_sum,
)
from rlx.backends.cuda.kernels.qgemm.row_planes import offsets
from rlx.ir.dtype import f32 as _F32
from rlx.ir.node import Node
from rlx.llvm.builder import Value, f32, i16, i32, i64
from rlx.support.records import dataclass

_BLOCKS = 4  # of 32 columns that a lane loads together
_COLUMNS = 32 * _BLOCKS
FEW_ROWS = 16  # of x, up to which there are kernels that keep all of its bits
MANY = 264  # blocks that fill a GPU twice

Pairs = list[list[Value]]
Operands = tuple[Pairs, list[Value], list[Value]]  # see `_operands`
Loaded = list[Value]  # of a row: quants of four blocks, higher bits of them, scales, super scale


@dataclass(frozen=True)
class FewPackedRows(BlockKernel):
    """args: those of `FewRows`; with `many`, groups of `m` rows of x follow each other

    Where x `is_split`, its rows are records of digits, so many bytes apart. A block gives `tiles`
    times 16 columns of the result.
    """

    scheme: str
    m: int
    k: int
    epilogue: Epilogue
    tiles: int
    many: bool
    warps: int
    is_split: bool = False

    @property
    def label(self) -> str:
        return f"gemv({self.m}x{self.k})"

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def halves(self) -> int:
        return 2 if self.epilogue.pair else 1

    @property
    def outputs(self) -> int:
        return TILE * self.tiles

    @property
    def shared(self) -> int:
        return 4 * self.warps * self.halves * self.outputs * FEW

    def blocks(self, n: int) -> int:
        """Blocks for `m` rows of x."""
        return -(-n // self.outputs)

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared, 16 // self.warps), self).emit()


def few_packed_rows_for(
    scheme: str,
    m: int,
    k: int,
    n: int,
    epilogue: Epilogue,
    many: bool,
    is_split: bool = False,
) -> FewPackedRows:
    fits = ("Q8_0",) if is_split else ("Q8_0", "Q4_0", "Q4_K")
    roomy = not epilogue.pair and scheme in fits  # registers suffice
    tiles = 2 if roomy and n >= 2 * TILE * MANY else 1
    warps: tuple[int, ...] = (8,)
    if -(-n // (TILE * tiles)) <= BLOCKS:  # each multiprocessor has one block at most
        warps = (8, 12, 16)
    fewest = min(warps, key=lambda w: -(-k // (_COLUMNS * w)))
    return FewPackedRows(scheme, m, k, epilogue, tiles, many, fewest, is_split)


def takes_digits(node: Node, m: int) -> bool:
    """Whether a `packed_planes_matmul` of up to m rows has this kernel, which could have x split
    before."""
    suits = node.inputs[0].dtype is _F32 and takes_bytes(node)
    return suits and 1 < m <= FEW_ROWS and not is_asked()


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: FewPackedRows) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.x_stride = f.arg(args, 0), f.arg(args, 1, i64)
        self.n, self.m = f.arg(args, 4, i64), f.arg(args, 5, i64)
        self.out = EpilogueArgs(f, kernel.epilogue, 6)
        self.warp, self.lane = f.thread() >> 5, f.lane32()
        self.group, self.quad = self.lane >> 2, self.lane & 3
        block, self.row0 = f.block_number().to(i64), f.i64(0)
        if kernel.many:
            across = f.ceil_div(self.n, kernel.outputs)
            number = block.udiv(across)
            block, self.row0 = block - number * across, number * kernel.m
        self.first = block * kernel.outputs
        self.steps = kernel.k // _COLUMNS  # of all warps
        self.own_steps = -(-self.steps // kernel.warps)
        self.places, size = offsets(kernel.scheme, kernel.k)
        self.rows: list[Value] = []  # where this lane's rows of the weight begin
        for i in range(kernel.halves):
            weight = f.arg(args, 2 + i)
            for r in range(2 * kernel.tiles):
                row = f.min(self.first + self.group.to(i64) + 8 * r, self.n - 1)
                self.rows.append(f.gep(weight, row * size))

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        ahead = self._load(f.i64(0))
        f.let_next_start()
        f.wait_for_previous()
        self.base = self._row(self.group)
        self.bases = [self._row(self.quad * 2 + i) for i in range(2 if kernel.is_split else 0)]
        sums = [f.const(0.0, f32)] * (4 * kernel.halves * kernel.tiles)
        if self.own_steps == 1:
            sums = self._add(sums, ahead, f.i64(0))
        else:
            size = len(ahead[0])

            def body(i: Value, *carried: Value) -> list[Value]:
                flat = list(carried[len(sums) :])
                now = [flat[j : j + size] for j in range(0, len(flat), size)]
                following = self._load(i + 1)
                new = self._add(list(carried[: len(sums)]), now, i)
                return [*new, *(v for row in following for v in row)]

            flat = [v for row in ahead for v in row]
            made = f.loop(f.i64(0), f.i64(self.own_steps), 1, [*sums, *flat], body)
            sums = made[: len(sums)]
        store_sums(f, kernel, self.out, sums, (self.first, self.row0), (self.n, self.m))

    def _row(self, number: Value) -> Value:
        """Where a row of x begins; those behind the last are the last."""
        f, kernel = self.f, self.kernel
        row = self.row0 + f.min(number, kernel.m - 1).to(i64)
        return f.gep(self.x, f.min(row, self.m - 1) * self.x_stride, 1 if kernel.is_split else 4)

    def _place(self, step: Value) -> tuple[Value, Value]:
        """The first block of a step of this warp, and whether it is there."""
        f = self.f
        number = step * self.kernel.warps + self.warp.to(i64)
        return f.min(number, self.steps - 1) * _BLOCKS, number < self.steps

    # -- weights ----------------------------------------------------------------------------------

    def _load(self, step: Value) -> list[Loaded]:
        """What the lane has of each of its rows in a step."""
        block, _ = self._place(step)
        return [self._load_row(row, block) for row in self.rows]

    def _load_row(self, row: Value, block: Value) -> Loaded:
        f, scheme, places = self.f, self.kernel.scheme, self.places
        found: Loaded = []
        each, size = (8, 32) if scheme == "Q8_0" else (4, 16)
        start = f.gep(row, block * size + (self.quad * each).to(i64))
        for i in range(_BLOCKS):
            found += words(f, f.gep(start, size * i), each // 4)
        if scheme == "Q5_K":
            found += words(f, f.gep(row, block * 4 + places["high"]), 4)
        if scheme == "Q6_K":
            high = f.gep(row, block * 8 + ((self.quad & 1) * 4).to(i64) + places["high"])
            for i in range(_BLOCKS):
                found += words(f, f.gep(high, 8 * i), 1)
        found += words(f, f.gep(row, block * 2 + places["scales"]), 2)
        if scheme in ("Q4_K", "Q5_K"):
            found += words(f, f.gep(row, (block >> 3) * 4 + places["supers"]), 1)
        if scheme == "Q6_K":
            whole = f.load(f.gep(row, (block >> 3) * 2 + places["supers"]), i16, align=2)
            found.append(whole.to(i32, signed=False))
        return found

    def _quants(self, row: Loaded, i: int) -> list[Value]:
        """Two words of bytes of a block: those of `_x_words` belong to them."""
        f, scheme = self.f, self.kernel.scheme
        if scheme == "Q8_0":
            return row[2 * i : 2 * i + 2]
        high = list[Value]()
        if scheme == "Q5_K":
            high = [row[_BLOCKS + i] >> self.quad * 4]
        if scheme == "Q6_K":
            high = [row[_BLOCKS + i] >> (self.quad >> 1) * 2]
        return quant_bytes(f, scheme, row[i : i + 1], high)

    def _factors(self, row: Loaded, i: int) -> list[Value]:
        """What sums of a block are multiplied with."""
        has_supers = self.kernel.scheme in ("Q4_K", "Q5_K", "Q6_K")
        pairs = row[-3:-1] if has_supers else row[-2:]
        pair = pairs[i // 2] >> 16 if i % 2 else pairs[i // 2]
        return factors(self.f, self.kernel.scheme, pair, row[-1])

    # -- x ----------------------------------------------------------------------------------------

    def _operands(self, block: Value, inside: Value) -> Operands:
        """Of a block of this lane's row of x two words of each digit; of the two rows of its sums
        the scales, and the sums of their numbers."""
        f, has_minima = self.f, self.kernel.scheme in ("Q4_K", "Q5_K")
        if not self.kernel.is_split:
            planes, scale, total = self._digits(block, inside)
            return planes, self._columns(scale), self._columns(total) if has_minima else []
        at, planes = f.gep(self.base, block * RECORD), list[list[Value]]()
        for d in range(DIGITS):
            if self.kernel.scheme == "Q8_0":
                start = f.gep(at, (self.quad * 8).to(i64))
                planes.append(words(f, f.gep(start, 32 * d), 2))
            else:
                start = f.gep(at, (self.quad * 4).to(i64))
                planes.append([w for i in (0, 16) for w in words(f, f.gep(start, 32 * d + i), 1)])
        pairs = [words(f, f.gep(b, block * RECORD + SCALE_AT), 2) for b in self.bases]
        found = [[f.select(inside, v.bits(f32), 0.0) for v in pair] for pair in pairs]
        return planes, [p[0] for p in found], [p[1] for p in found] if has_minima else []

    def _digits(self, block: Value, inside: Value) -> tuple[list[list[Value]], Value, Value]:
        """Of a block of this lane's row of x: two words of each digit, the scale and the sum."""
        f, scheme = self.f, self.kernel.scheme
        each, apart = (8, 4) if scheme == "Q8_0" else (4, 16)
        first = block * 32 + (self.quad * each).to(i64)
        values = [v for i in (0, apart) for v in load_run(f, self.base, first + i, 4, _F32)]
        found = [v.bits(i32) & 0x7FFFFFFF for v in values]
        while len(found) > 1:
            found = [f.max(a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
        largest = found[0]
        for distance in (1, 2):
            largest = f.max(largest, f.exchange(largest, distance))
        power = Scale(f, largest)
        split, total = digit_words(f, power, values)
        scale = f.select(inside, power.value(), 0.0)
        for distance in (1, 2) if scheme in ("Q4_K", "Q5_K") else ():
            total = total + f.exchange(total, distance)
        return [split[2 * d : 2 * d + 2] for d in range(DIGITS)], scale, total.to(f32) * scale

    def _columns(self, value: Value) -> list[Value]:
        """What the lanes of the two columns of this lane's sums have."""
        return [self.f.from_lane(value, self.quad * 8 + 4 * i) for i in range(2)]

    # -- products ---------------------------------------------------------------------------------

    def _add(self, sums: list[Value], rows: list[Loaded], step: Value) -> list[Value]:
        sums = list(sums)
        first, inside = self._place(step)
        for i in range(_BLOCKS):
            planes, scales, totals = self._operands(first + i, inside)
            for t in range(len(rows) // 2):
                pair = rows[2 * t : 2 * t + 2]
                own = sums[4 * t : 4 * t + 4]
                sums[4 * t : 4 * t + 4] = self._add_tile(pair, i, planes, (scales, totals), own)
        return sums

    def _add_tile(
        self, rows: Sequence[Loaded], i: int, planes: list[list[Value]],
        columns: tuple[list[Value], list[Value]], sums: list[Value],
    ) -> list[Value]:  # fmt: skip
        """Add the products of 16 rows of the weight and a block."""
        f, scheme = self.f, self.kernel.scheme
        low, high = (self._quants(row, i) for row in rows)
        by = [self._factors(row, i) for row in rows]
        scales, totals = columns
        # each 16 numbers of Q6_K have a scale
        halves = [(0,), (1,)] if scheme == "Q6_K" else [(0, 1)]
        for number, half in enumerate(halves):
            a = [v for h in half for v in (low[h], high[h])]
            found = [
                f.multiply_bytes(a, [plane[h] for h in half], [f.i32(0)] * 4) for plane in planes
            ]
            for e in range(4):
                whole = whole_sum(f, scheme, [s[e] for s in found], 16 * len(half))
                sums[e] = f.fma(whole, by[e // 2][number] * scales[e % 2], sums[e])
        if totals:
            for e in range(4):
                sums[e] = f.fma(by[e // 2][-1], totals[e % 2], sums[e])
        return sums
