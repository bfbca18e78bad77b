"""Products of a few rows with a weight, at the bandwidth of memory.

Warps of a block divide the columns of x and the rows of the weight. Weights are loaded before the
kernel in front has ended: they do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.cuda.builder import WARP, BlockFunction, KernelModule
from rlx.backends.cuda.kernel import BlockKernel
from rlx.backends.cuda.kernels.gemm.epilogue import Epilogue, EpilogueArgs
from rlx.backends.cuda.kernels.gemm.weight_rows import FloatRows, Raw, Segment, WeightRows, load_run
from rlx.ir.dtype import DType
from rlx.llvm.builder import Value, f32, i64
from rlx.llvm.storage import memory_type
from rlx.support.records import dataclass

_WARPS = 8
_IN_FLIGHT = 16  # loads of weights that a lane has under way
_FEWER = 8  # beside split numbers
_ROWS = (2, 3, 4, 6, 8, 12, 16)  # of a warp
_MULTIPROCESSORS = 132
_LARGE = 1 << 25  # numbers of a weight, from which on a launch is little of the time
_HALF = 108  # registers of a thread for numbers, where two blocks share a multiprocessor


@dataclass(frozen=True)
class Norm:
    """x is to be normed by the root of the mean square, and `adds` a residual before."""

    eps: float
    adds: bool


@dataclass(frozen=True)
class Gemv(BlockKernel):
    """args: x, rows of x apart (in elements), weight, second weight of a pair (else 0), N, M, then
    those of the epilogue

    With a `norm` of the one row of x, then gamma, residual and where their sum goes. With
    `experts`, their type, then the number of the expert of each row (there is one row at a time),
    how many there are, status, error number: weights of experts [experts, N, k] follow each other.
    `m` rows of x [M, k] at a time; `many`: M is more. A warp has `rows` rows of the weight; `split`
    warps divide their columns.
    """

    weight: WeightRows
    x: DType
    m: int
    k: int
    epilogue: Epilogue
    rows: int
    split: int
    many: bool = False
    norm: Norm | None = None
    resident: int = 0  # blocks that share a multiprocessor; 0: one, or two where that costs nothing
    in_flight: int = 0  # loads of weights that a lane has under way; 0: as many as usual
    experts: DType | None = None

    @property
    def label(self) -> str:
        return f"{'gemv' if self.experts is None else 'expert gemv'}({self.m}x{self.k})"

    @property
    def threads(self) -> int:
        return _WARPS * WARP

    @property
    def splits_x(self) -> bool:
        """Whether x is split, to be multiplied as integers."""
        one = self.m == 1 and (not self.many or self.experts is not None) and self.x.name == "f32"
        return one and self.weight.record > 0 and self.k % 32 == 0

    @property
    def records_at(self) -> int:
        """Where split numbers of x begin in shared memory."""
        return (4 * _WARPS * (self.values + (self.norm is not None)) + 15) // 16 * 16

    @property
    def shared(self) -> int:
        return self.records_at + (self.k // 32 * self.weight.record if self.splits_x else 0)

    @property
    def halves(self) -> int:
        return 2 if self.epilogue.pair else 1

    @property
    def values(self) -> int:
        """Sums that a warp has."""
        return self.halves * self.m * self.rows

    @property
    def outputs(self) -> int:
        """Columns of the result that a block gives."""
        return _WARPS // self.split * self.rows

    @property
    def steps(self) -> int:
        """Chunks of a lane in a row."""
        return -(-self.weight.chunks(self.k) // (WARP * self.split))

    @property
    def group(self) -> int:
        """Steps whose weights are loaded together."""
        most = self.in_flight or (_FEWER if self.splits_x else _IN_FLIGHT)
        return max(1, min(most // (self.halves * self.rows), self.steps))

    @property
    def groups(self) -> int:
        return -(-self.steps // self.group)

    @property
    def _registers(self) -> int:
        """Those of a group's weights and of x."""
        weights = self.halves * self.rows * self.weight.registers
        return self.group * (weights + self.m * self.weight.elements)

    def blocks(self, n: int) -> int:
        """Blocks for `m` rows of x."""
        return -(-n // self.outputs)

    def emit(self, m: KernelModule) -> None:
        # what loads all of its weights at once is quick: the next kernel needs room beside it
        blocks = 2 if self.m == self.groups == 1 and self._registers <= _HALF else 1
        _Emitter(m.begin_block(self.threads, self.shared, self.resident or blocks), self).emit()


def gemv_for(
    weight: WeightRows,
    x: DType,
    m: int,
    k: int,
    n: int,
    epilogue: Epilogue,
    many: bool = False,
    norm: Norm | None = None,
    experts: DType | None = None,
) -> Gemv:
    """The kernel for these sizes: enough blocks to fill a GPU, enough loads in flight."""
    chunks = weight.chunks(k)
    split = 1
    while split < _WARPS and split * WARP < chunks and n * 2 < 40000 * split:
        split *= 2
    rows = _rows(m, n, _WARPS // split, 2 if epilogue.pair else 1)
    usual = Gemv(weight, x, m, k, epilogue, rows, split, many, norm, experts=experts)
    plain = m == 1 and not many and norm is None and not epilogue.pair
    return _large(usual, n) if plain and n * k >= _LARGE else usual


def _large(usual: Gemv, n: int) -> Gemv:
    """One row and a large weight, as measured to be fastest on an H200. Several blocks share a
    multiprocessor, so that some load while others begin and end."""
    if usual.splits_x:
        wide = usual.weight.registers > 6
        if usual.split > 1:  # each block splits all of a long x: few blocks
            rows = 12 if wide else 16
            return replace(usual, rows=rows, in_flight=rows, resident=1)
        if usual.steps == 1:
            return usual
        rows, in_flight = (6, 6) if usual.steps == 2 and not wide else (4, 4 if wide else 8)
        return replace(usual, rows=rows, in_flight=in_flight, resident=2)
    if not isinstance(usual.weight, FloatRows):
        return usual
    at_once = 2 * _MULTIPROCESSORS

    def idle(rows: int) -> float:
        """The share of the time that places for blocks are empty, when all take as long."""
        blocks = -(-n // (_WARPS // usual.split * rows))
        return round(1 - blocks / (-(-blocks // at_once) * at_once), 2)

    rows = min((8, 7, 6), key=idle)
    return replace(usual, rows=rows, in_flight=rows, resident=2)


def _rows(m: int, n: int, warps: int, halves: int) -> int:
    """Rows of the weight that a warp has: so many that every multiprocessor has one block, and room
    for one of the kernel behind; or as many as fit where there are more blocks anyway."""
    most = WARP // (m * halves)
    for rows in _ROWS:
        if rows <= most and -(-n // (warps * rows)) <= _MULTIPROCESSORS:
            return rows
    usual = 2 if m > 4 else 4 if m > 2 or halves > 1 else 8
    return min(usual, most)


class _Emitter:
    def __init__(self, f: BlockFunction, kernel: Gemv) -> None:
        self.f, self.kernel = f, kernel
        args = f["args"]
        self.x, self.x_stride = f.arg(args, 0), f.arg(args, 1, i64)
        self.weights = [f.arg(args, 2 + i) for i in range(kernel.halves)]
        self.n = f.arg(args, 4, i64)
        self.m = f.arg(args, 5, i64)
        self.out = EpilogueArgs(f, kernel.epilogue, 6)
        place = 7 + kernel.epilogue.extras
        self.norm_args = [f.arg(args, place + i) for i in range(self._norm_count)]
        self.extra = place
        self.factor: Value | None = None
        self.gammas: list[list[Value]] = []  # of the first steps, loaded ahead
        warp = f.thread() >> 5
        self.warp_k, self.warp_n = warp & kernel.split - 1, warp.udiv(kernel.split)
        self.lane = f.lane32()
        block, self.row0 = f.block_number().to(i64), f.i64(0)
        if kernel.many:
            across = f.ceil_div(self.n, kernel.outputs)
            group = block.udiv(across)
            block, self.row0 = block - group * across, group * kernel.m
        self.first = block * kernel.outputs

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        chunks = kernel.weight.chunks(kernel.k)
        each, group, groups = WARP * kernel.split, kernel.group, kernel.groups
        own = self.lane.to(i64) + self.warp_k.to(i64) * WARP
        if kernel.experts is not None:  # the kernel in front may have chosen them
            f.let_next_start()
            f.wait_for_previous()
        rows = self._rows()

        def load(step: Value | int) -> list[list[Raw]]:
            """The weights of a group of steps."""
            return [
                self._load(rows, own + self._step(step, i) * each, chunks) for i in range(group)
            ]

        sums = [f.const(0.0, f32)] * kernel.values
        ahead = load(0)
        if kernel.norm is not None and groups <= 2 and not kernel.splits_x:
            first = [f.min(own + i * each, chunks - 1) for i in range(group)]
            self.gammas = [self._gamma(kernel.weight.runs(f, chunk)) for chunk in first]
        if kernel.experts is None:
            f.let_next_start()
            f.wait_for_previous()
        self._load_residual()
        if kernel.norm is not None:
            self.factor = self._norm(kernel.norm)
        if kernel.splits_x:
            self._split_x()
        if groups <= 2:
            for g in range(groups):
                now, ahead = ahead, load((g + 1) * group) if g + 1 < groups else ahead
                sums = self._add(sums, now, own + g * group * each, each, chunks)
        else:
            sums = self._loop(sums, ahead, load, own, (groups, group, each, chunks))
        self._finish(sums)

    def _split_x(self) -> None:
        f, kernel = self.f, self.kernel
        inside, records = f.i32(0).eq(0), kernel.k // 32
        for i in f.range(f.thread(), f.i32(records), f.i32(kernel.threads)):
            values = self._x(0, [((i * 32).to(i64), 32)], inside)
            kernel.weight.put_record(f, values, i * kernel.weight.record + kernel.records_at)
        f.barrier()

    @property
    def _norm_count(self) -> int:
        norm = self.kernel.norm
        return 0 if norm is None else 3 if norm.adds else 1

    def _norm(self, norm: Norm) -> Value:
        """What the row is multiplied with, beside gamma; the first block keeps x + residual."""
        f, kernel = self.f, self.kernel

        def add(at: Value, total: Value) -> Value:
            numbers = self._sum(at, 4)
            for v in numbers:
                total = f.fma(v, v, total)
            if norm.adds:
                to = f.gep(self.norm_args[2], at, 4)
                whole = f.join(numbers)
                f.if_(f.block_number().eq(0), lambda: f.store(whole, to, align=16))
            return total

        first, step = (f.thread() * 4).to(i64), 4 * kernel.threads
        [total] = f.loop(first, f.i64(kernel.k), step, [f.const(0.0, f32)], add)
        total, place = f.warp_sum(total), 4 * _WARPS * kernel.values
        warp = f.thread() >> 5
        f.if_(self.lane.eq(0), lambda: f.store_shared(total, warp * 4 + place))
        f.barrier()
        whole = f.const(0.0, f32)
        for i in range(_WARPS):
            whole = whole + f.load_shared(f.i32(place + 4 * i), f32)
        return 1.0 / f.sqrt(whole * (1.0 / kernel.k) + norm.eps)

    def _gamma(self, columns: list[tuple[Value, int]]) -> list[Value]:
        f, gamma = self.f, self.norm_args[0]
        return [v for first, n in columns for v in load_run(f, gamma, first, n, self.kernel.x)]

    def _load_residual(self) -> None:
        """What this thread adds to its sum in the end."""
        f, kernel = self.f, self.kernel
        m, column = self._place()
        row = f.min(self.row0 + f.min(m, kernel.m - 1).to(i64), self.m - 1)
        self.out.load_residual(row * self.n + f.min(column, self.n - 1))

    def _place(self) -> tuple[Value, Value]:
        """The row of x (i32) and the column of the result (i64) that this thread stores."""
        thread, outputs = self.f.thread(), self.kernel.outputs
        m = thread.udiv(outputs)
        return m, self.first + (thread - m * outputs).to(i64)

    def _sum(self, at: Value, count: int) -> list[Value]:
        """x, or x + residual."""
        f, kernel = self.f, self.kernel
        numbers = load_run(f, self.x, at, count, kernel.x)
        if kernel.norm is None or not kernel.norm.adds:
            return numbers
        others = load_run(f, self.norm_args[1], at, count, kernel.x)
        return [a + b for a, b in zip(numbers, others, strict=True)]

    def _step(self, step: Value | int, i: int) -> Value:
        return self.f.i64(step + i) if isinstance(step, int) else step + i

    def _loop(
        self, sums: list[Value], ahead: list[list[Raw]], load: object, own: Value,
        sizes: tuple[int, int, int, int],
    ) -> list[Value]:  # fmt: skip
        """A loop over groups of steps: the next weights are loaded while these are multiplied."""
        groups, group, each, chunks = sizes
        assert callable(load)
        flat = [v for step in ahead for raw in step for v in raw]
        count = len(sums)

        def body(g: Value, *carried: Value) -> list[Value]:
            rest = iter(carried[count:])
            now = [[[next(rest) for _ in raw] for raw in step] for step in ahead]
            following = load((g + 1) * group)
            new = self._add(list(carried[:count]), now, own + g * (group * each), each, chunks)
            return [*new, *(v for step in following for raw in step for v in raw)]

        return self.f.loop(0, groups, 1, [*sums, *flat], body)[:count]

    def _rows(self) -> list[tuple[Value, Value]]:
        """Weight and row number of each row of this warp; those past the end are the last one."""
        f, kernel = self.f, self.kernel
        first = self.first + (self.warp_n * kernel.rows).to(i64)
        numbers = [f.min(first + r, self.n - 1) for r in range(kernel.rows)]
        if kernel.experts is not None:
            start = self._expert(kernel.experts) * self.n
            numbers = [start + n for n in numbers]
        return [(w, n) for w in self.weights for n in numbers]

    def _expert(self, dtype: DType) -> Value:
        """The number of this row's expert; a wrong one is told, and the first taken instead."""
        f, args = self.f, self.f["args"]
        at = f.gep(f.arg(args, self.extra), f.min(self.row0, self.m - 1), dtype.bytes)
        found = f.load(at, memory_type(dtype)).to(i64, signed=dtype.kind == "int")
        known = found.ult(f.arg(args, self.extra + 1, i64))
        report = f.arg(args, self.extra + 2), f.arg(args, self.extra + 3, i64)
        f.if_(~known, lambda: f.store(report[1], report[0]))
        return f.select(known, found, 0)

    def _load(self, rows: Sequence[tuple[Value, Value]], chunk: Value, chunks: int) -> list[Raw]:
        f, kernel = self.f, self.kernel
        there = f.min(chunk, chunks - 1)
        found = [kernel.weight.load(f, w, row, there, kernel.k) for w, row in rows]
        if self._divides:
            return found
        return [[f.select(chunk < chunks, v, 0) for v in raw] for raw in found]

    @property
    def _divides(self) -> bool:
        """Whether every step of every group is a chunk of every lane: else those past the end must
        count nothing."""
        kernel = self.kernel
        each = WARP * kernel.split * kernel.group
        return kernel.weight.chunks(kernel.k) == each * kernel.groups

    def _add(
        self, sums: list[Value], loaded: list[list[Raw]], chunk: Value, each: int, chunks: int
    ) -> list[Value]:
        """Add the products of some steps; a chunk past the end counts nothing."""
        f, kernel = self.f, self.kernel
        sums = list(sums)
        for i, step in enumerate(loaded):
            at = chunk + i * each
            inside = at < chunks
            there = f.min(at, chunks - 1)
            if kernel.splits_x:
                x = kernel.weight.operands(f, kernel.records_at, there)
                sums = [kernel.weight.add(f, raw, x, s) for raw, s in zip(step, sums, strict=True)]
                continue
            columns = kernel.weight.runs(f, there)
            xs = [self._x(m, columns, inside) for m in range(kernel.m)]
            for r, raw in enumerate(step):
                half, row = divmod(r, kernel.rows)
                numbers = kernel.weight.decode(f, raw, there)
                segments = kernel.weight.segments(f, raw)
                for m in range(kernel.m):
                    place = (half * kernel.m + m) * kernel.rows + row
                    sums[place] = self._products(xs[m], numbers, segments, sums[place])
        return sums

    def _products(
        self, x: list[Value], numbers: list[Value], segments: list[Segment], total: Value
    ) -> Value:
        """Add x · numbers, scaled by segments: x · (s·q + t) = s · (x·q) + t · Σx."""
        f = self.f
        if not segments:
            for a, b in zip(x, numbers, strict=True):
                total = f.fma(a, b, total)
            return total
        at = 0
        for size, scale, offset in segments:
            product, plain = x[at] * numbers[at], x[at]
            for a, b in zip(x[at + 1 : at + size], numbers[at + 1 : at + size], strict=True):
                product, plain = f.fma(a, b, product), plain + a
            total = f.fma(scale, product, f.fma(offset, plain, total))
            at += size
        return total

    def _x(self, m: int, columns: list[tuple[Value, int]], inside: Value) -> list[Value]:
        f, kernel = self.f, self.kernel
        row = f.i64(m)
        if self.factor is not None:
            found = [v for first, n in columns for v in self._sum(first, n)]
            gamma = self.gammas.pop(0) if self.gammas else self._gamma(columns)
            found = [a * self.factor * g for a, g in zip(found, gamma, strict=True)]
            return found if self._divides else [f.select(inside, v, 0.0) for v in found]
        if kernel.many:
            row = f.min(self.row0 + m, self.m - 1)
        base = f.gep(self.x, self.x_stride * row, kernel.x.bytes)
        found = [v for first, n in columns for v in load_run(f, base, first, n, kernel.x)]
        if self._divides:
            return found
        return [f.select(inside, v, 0.0) for v in found]

    def _finish(self, sums: list[Value]) -> None:
        """Add up the lanes and the warps, and store."""
        f, kernel = self.f, self.kernel
        value, spread = scatter_sums(f, sums, self.lane)
        warps = _WARPS // kernel.split
        place = (self.warp_k * warps + self.warp_n) * (4 * kernel.values)
        keeps = (self.lane & spread - 1).eq(0) & (self.lane.udiv(spread) < kernel.values)
        f.if_(keeps, lambda: f.store_shared(value, place + self.lane.udiv(spread) * 4))
        f.barrier()
        m, column = self._place()
        j = f.thread() - m * kernel.outputs

        def store() -> None:
            totals = [self._total(m, j, half) for half in range(kernel.halves)]
            at = (self.row0 + m.to(i64)) * self.n + column
            self.out.store(totals[0], totals[1] if kernel.epilogue.pair else None, column, at)

        inside = (m < kernel.m) & (column < self.n)
        if kernel.many:
            inside = inside & (self.row0 + m.to(i64) < self.m)
        f.if_(inside, store)

    def _total(self, m: Value, j: Value, half: int) -> Value:
        f, kernel = self.f, self.kernel
        warps = _WARPS // kernel.split
        wn = j.udiv(kernel.rows)
        value = (m + half * kernel.m) * kernel.rows + (j - wn * kernel.rows)
        place = (wn * kernel.values + value) * 4
        total = f.load_shared(place, f32)
        for i in range(1, kernel.split):
            total = total + f.load_shared(place, f32, i * warps * 4 * kernel.values)
        return total


def scatter_sums(f: BlockFunction, values: Sequence[Value], lane: Value) -> tuple[Value, int]:
    """The sums of values over the lanes of a warp: lane `spread` · i has that of value i."""
    left = list(values)
    while len(left) & len(left) - 1:
        left.append(f.const(0.0, f32))
    spread, distance = WARP // len(left), WARP // 2
    while distance:
        if len(left) == 1:
            left = [left[0] + f.exchange(left[0], distance)]
        else:
            half = len(left) // 2
            upper = (lane & distance).ne(0)
            left = [
                f.select(upper, b, a) + f.exchange(f.select(upper, a, b), distance)
                for a, b in zip(left[:half], left[half:], strict=True)
            ]
        distance //= 2
    return left[0], spread
