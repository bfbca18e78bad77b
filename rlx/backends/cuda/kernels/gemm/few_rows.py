"""Products of two to eight rows with bf16 weights, by tensor cores, at the bandwidth of memory.

Rows of the weight are the left side of small matrix products, rows of x the eight columns of the
right side. The order of the columns of x does not matter to a sum, so a lane loads eight neighbours
of a row and takes them for those that an instruction wants of it. x in f32 is the sum of three
16-bit numbers. Eight warps divide the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.kernels.gemm.weight_rows import load_run, words
from rlx.ir.dtype import f32 as _F32
from rlx.llvm.builder import Value, bf16, f32, i64
from rlx.support.records import dataclass

FEW = 8  # rows of x, at most
STEP = 32  # columns that a warp multiplies at a time
_WARPS = 8
TILE = 16  # rows of the weight
_PLANES = 3
_AHEAD = 4  # steps whose weights are loaded together
_MANY = 264  # blocks that fill a GPU twice

Fragments = list[list[Value]]  # of each tile row by row: 4 words of each lane


@dataclass(frozen=True)
class FewRows(BlockKernel):
    """args: x (f32), rows of x apart (in elements), weight, second weight of a pair (else 0), N, M,
    then those of the epilogue

    A block gives `tiles` times 16 columns of the result.
    """

    m: int
    k: int
    epilogue: Epilogue
    tiles: int

    @property
    def label(self) -> str:
        return f"gemv({self.m}x{self.k})"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def halves(self) -> int:
        return 2 if self.epilogue.pair else 1

    @property
    def outputs(self) -> int:
        return TILE * self.tiles

    @property
    def shared(self) -> int:
        return 4 * _WARPS * self.halves * self.outputs * FEW

    def blocks(self, n: int) -> int:
        return -(-n // self.outputs)

    def emit(self, m: KernelModule) -> None:
        _Emitter(m.begin_block(self.threads, self.shared, 2), self).emit()


def few_rows_for(m: int, k: int, n: int, epilogue: Epilogue) -> FewRows:
    tiles = 2 if not epilogue.pair and n >= 2 * TILE * _MANY else 1
    return FewRows(m, k, epilogue, tiles)


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: FewRows) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.x_stride = f.arg(args, 0), f.arg(args, 1, i64)
        self.n = f.arg(args, 4, i64)
        self.out = EpilogueArgs(f, kernel.epilogue, 6)
        self.warp = f.thread() >> 5
        self.group, self.quad = f.lane32() >> 2, f.lane32() & 3
        self.first = f.block_number().to(i64) * kernel.outputs
        self.steps = kernel.k // STEP  # of all warps
        self.own_steps = -(-self.steps // _WARPS)
        weights = [f.arg(args, 2 + i) for i in range(kernel.halves)]
        self.rows: list[Value] = []  # where this lane's rows of the weight begin
        for weight in weights:
            for r in range(2 * kernel.tiles):
                row = f.min(self.first + self.group.to(i64) + 8 * r, self.n - 1)
                self.rows.append(f.gep(weight, row * (2 * kernel.k)))

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        count = -(-self.own_steps // _AHEAD)
        ahead = self._load(f.i64(0))
        f.let_next_start()
        f.wait_for_previous()
        row = f.min(self.group, kernel.m - 1).to(i64)
        self.base = f.gep(self.x, row * self.x_stride, 4)
        sums = [f.const(0.0, f32)] * (4 * kernel.halves * kernel.tiles)
        if count == 1:
            sums = self._add(sums, ahead, f.i64(0))
        else:
            flat, size = [v for step in ahead for v in step], len(ahead[0])

            def body(i: Value, *carried: Value) -> list[Value]:
                now = list(carried[len(sums) :])
                steps = [now[j : j + size] for j in range(0, len(now), size)]
                following = self._load((i + 1) * _AHEAD)
                new = self._add(list(carried[: len(sums)]), steps, i * _AHEAD)
                return [*new, *(v for step in following for v in step)]

            sums = f.loop(f.i64(0), f.i64(count), 1, [*sums, *flat], body)[: len(sums)]
        sizes = self.n, f.i64(kernel.m)
        store_sums(f, kernel, self.out, sums, (self.first, f.i64(0)), sizes)

    def _place(self, step: Value) -> tuple[Value, Value]:
        """The first column of this lane in a step of this warp, and whether there is one."""
        f = self.f
        number = step * _WARPS + self.warp.to(i64)
        there = f.min(number, self.steps - 1)
        return there * STEP + (self.quad << 3).to(i64), number < self.steps

    def _load(self, first: Value) -> Fragments:
        """The weights of some steps; those behind the last are 0."""
        f, found = self.f, list[list[Value]]()
        ahead = min(_AHEAD, self.own_steps)
        divides = self.steps % (_WARPS * ahead) == 0  # what is loaded behind the last is not used
        for i in range(ahead):
            column, inside = self._place(first + i)
            step: list[Value] = []
            for row in self.rows:
                loaded = words(f, f.gep(row, column, 2), 4)
                step += loaded if divides else [f.select(inside, v, 0) for v in loaded]
            found.append(step)
        return found

    def _add(self, sums: list[Value], steps: Fragments, first: Value) -> list[Value]:
        f, sums = self.f, list(sums)
        for i, step in enumerate(steps):
            column, _ = self._place(first + i)
            planes = self._planes(load_run(f, self.base, column, 8, _F32))
            for t in range(len(step) // 8):
                low, high = step[8 * t : 8 * t + 4], step[8 * t + 4 : 8 * t + 8]
                for s in (0, 2):
                    a = [low[s], high[s], low[s + 1], high[s + 1]]
                    for plane in planes:
                        own = sums[4 * t : 4 * t + 4]
                        sums[4 * t : 4 * t + 4] = f.multiply(a, plane[s : s + 2], own, bf16)
        return sums

    def _planes(self, numbers: Sequence[Value]) -> list[list[Value]]:
        """Numbers as sums of 16-bit ones, two in a word; the largest ones last."""
        f, rest, found = self.f, list(numbers), list[list[Value]]()
        for number in range(_PLANES):
            pairs = zip(rest[::2], rest[1::2], strict=True)
            packed = [f.pack_halves(a, b, bf16) for a, b in pairs]
            found.append(packed)
            if number + 1 < _PLANES:
                parts = [v for word in packed for v in f.unpack_halves(word, bf16)]
                rest = [a - b for a, b in zip(rest, parts, strict=True)]
        return found[::-1]


class Tiles(Protocol):
    """A kernel whose blocks have tiles of sums."""

    @property
    def threads(self) -> int: ...
    @property
    def m(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def halves(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def epilogue(self) -> Epilogue: ...


def store_sums(
    f: BlockFunction, kernel: Tiles, out: EpilogueArgs, sums: Sequence[Value],
    first: tuple[Value, Value], sizes: tuple[Value, Value],
) -> None:  # fmt: skip
    """Add up the sums of the warps, and store: `first` are the first column of the result and its
    first row, `sizes` how many there are."""
    (column0, row0), (n, rows) = first, sizes
    count = kernel.halves * kernel.tiles
    tile = 4 * TILE * FEW  # bytes of a tile of sums: for each row of it those of x
    own = (f.thread() >> 5) * (tile * count)
    for t in range(count):
        for half in range(2):
            at = own + ((f.lane32() >> 2) + 8 * half) * (4 * FEW) + (f.lane32() & 3) * 8
            pair = f.join(sums[4 * t + 2 * half : 4 * t + 2 * half + 2])
            f.store_shared(pair, at, tile * t, align=8)
    f.barrier()
    row = f.thread().udiv(kernel.outputs)
    number = f.thread() - row * kernel.outputs
    column, there = column0 + number.to(i64), row0 + row.to(i64)

    def store() -> None:
        place = number * (4 * FEW) + row * 4
        totals = []
        for half in range(kernel.halves):
            total = f.const(0.0, f32)
            for warp in range(kernel.threads // WARP):
                offset = warp * (tile * count) + half * kernel.tiles * tile
                total = total + f.load_shared(place, f32, offset)
            totals.append(total)
        other = totals[1] if kernel.epilogue.pair else None
        out.store(totals[0], other, column, there * n + column)

    f.if_((row < kernel.m) & (column < n) & (there < rows), store)
