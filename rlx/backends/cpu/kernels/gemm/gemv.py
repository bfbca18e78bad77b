"""GEMV, one row of x against w: as dot products along k, or as axpy of the rows of w.

Two forms read w whose columns are contiguous along k, such as keys for one query. The axpy form
reads w whose rows are contiguous: they are scaled and added as they come. None packs anything.

One row has the bits that GEMM gives it among others, so products are added in the order of k. The
dot form does not: it is for one column of w alone, whatever the number of rows, which take turns
as "columns".

Behind the sums comes the epilogue of the fused op, as in GEMM.

Several columns are taken together, one lane each: square tiles of them are transposed in registers.
A sum then takes k in order, one fma each, and has the bits that the micro-kernel gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rlx.backends.cpu.kernels.gemm.epilogue import Epilogue, RowEpilogue
from rlx.backends.cpu.kernels.gemm.gemm import batch_args, batch_count, batch_start
from rlx.backends.cpu.kernels.gemm.microkernel import multiply_add
from rlx.backends.cpu.kernels.loops.transpose_tiles import transposed
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Function, Module, Type, Value, i64, ptr, vec
from rlx.llvm.storage import compute_type, load, memory_type, store
from rlx.support.records import dataclass

COLUMNS = 16  # at once: fewer would wait for their sums


class ColumnDots:
    """A row of elements `x` times `COLUMNS` columns of elements `w`, in vectors of `acc`."""

    def __init__(self, f: Function, x: DType, w: DType, acc: Type) -> None:
        self.f, self.x, self.w, self.acc = f, x, w, acc
        self.lanes = f.target.lanes(acc.bits)

    def dots(self, row: Value, columns: Sequence[Value], k: Value) -> list[Value]:
        """The dot products over k of the row and the columns at these addresses."""
        f, lanes = self.f, self.lanes
        groups = [columns[i : i + lanes] for i in range(0, COLUMNS, lanes)]
        whole = k - k.urem(lanes)

        def tile(at: Value, *sums: Value) -> list[Value]:
            found = list(sums)
            for g, group in enumerate(groups):
                along = [self._read(c, self.w, at, lanes) for c in group]
                for j, across in enumerate(transposed(f, along)):
                    found[g] = self._step(row, at + j, across, found[g])
            return found

        def single(at: Value, *sums: Value) -> list[Value]:
            found = list(sums)
            for g, group in enumerate(groups):
                across = f.const(0, vec(lanes, self.acc))
                for j, c in enumerate(group):
                    across = f.insert(across, self._read(c, self.w, at, 1), j)
                found[g] = self._step(row, at, across, found[g])
            return found

        zeros = [f.const(0, vec(lanes, self.acc))] * len(groups)
        return f.loop(whole, k, 1, f.loop(0, whole, lanes, zeros, tile), single)

    def _step(self, row: Value, at: Value, across: Value, total: Value) -> Value:
        x = self.f.splat(self._read(row, self.x, at, 1), self.lanes)
        return multiply_add(self.f, x, across, total)

    def _read(self, base: Value, dtype: DType, at: Value, lanes: int) -> Value:
        return load(self.f, self.f.gep(base, at, memory_type(dtype)), dtype, lanes, self.acc)


_COLUMNS = 4  # columns of w that share each load of x
_UNROLL = 2
_MAX_COLUMNS = 1024  # of a block in the axpy form
_ROWS = 4  # rows of w added at once


@dataclass(frozen=True)
class GemvDot(KernelSpec):
    """out[n] = dot(x, column n of w); x and the columns of w are contiguous along k.

    args: x, w, out, n, k, w_stride_n, then size, x_batch, w_batch of each batch axis. Strides are
    bytes.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        return ["x", "w", "out", "n", "k", "w_stride_n", *batch_args(self.batch)]

    def emit(self, m: Module) -> None:
        _GemvDotEmitter(self, m).emit()


class _GemvDotEmitter:
    def __init__(self, spec: GemvDot, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.acc = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.acc.bits)
        self.given = {
            name: f.arg(f["args"], i, ptr if i < 3 else i64) for i, name in enumerate(spec.args)
        }

    def emit(self) -> None:
        f, given, axes = self.f, self.given, self.spec.batch
        n = given["n"]
        groups = f.ceil_div(n, _COLUMNS)
        lo, hi = f.split(batch_count(f, given, axes) * groups)
        for unit in f.range(lo, hi):
            batch = unit.udiv(groups)
            first = (unit - batch * groups) * _COLUMNS
            x, w = batch_start(f, given, axes, batch)
            w = f.gep(w, first * given["w_stride_n"])
            out = f.gep(given["out"], batch * n + first, memory_type(self.spec.out))
            left = f.min(n - first, _COLUMNS)
            all_columns = partial(self._dots, x, w, out, _COLUMNS)
            f.if_(left.eq(_COLUMNS), all_columns, partial(self._one_by_one, x, w, out, left))

    def _one_by_one(self, x: Value, w: Value, out: Value, left: Value) -> None:
        f = self.f
        for i in f.range(0, left):
            column = f.gep(w, i * self.given["w_stride_n"])
            self._dots(x, column, f.gep(out, i, memory_type(self.spec.out)), 1)

    def _dots(self, x: Value, w: Value, out: Value, count: int) -> None:
        f, spec, k = self.f, self.spec, self.given["k"]
        columns = [w]
        for _ in range(count - 1):
            columns.append(f.gep(columns[-1], self.given["w_stride_n"]))
        step = self.lanes * _UNROLL
        whole = k - k.urem(step)
        zero = f.const(0, vec(self.lanes, self.acc))
        wide = f.loop(
            0,
            whole,
            step,
            [zero] * (count * _UNROLL),
            lambda at, *s: self._unrolled(x, columns, at, s),
        )
        totals = [
            f.reduce("add", _sum(wide[i * _UNROLL : (i + 1) * _UNROLL])) for i in range(count)
        ]

        def one(at: Value, *acc: Value) -> list[Value]:
            return self._multiply_add(x, columns, at, 1, acc)

        totals = f.loop(whole, k, 1, totals, one)
        for i, total in enumerate(totals):
            store(f, total, out, spec.out, i * memory_type(spec.out).bytes)

    def _unrolled(
        self, x: Value, columns: list[Value], at: Value, acc: tuple[Value, ...]
    ) -> list[Value]:
        out = list(acc)
        for u in range(_UNROLL):
            part = acc[u::_UNROLL]
            out[u::_UNROLL] = self._multiply_add(x, columns, at + u * self.lanes, self.lanes, part)
        return out

    def _multiply_add(
        self, x: Value, columns: list[Value], at: Value, lanes: int, acc: tuple[Value, ...]
    ) -> list[Value]:
        f, spec = self.f, self.spec
        a = load(f, f.gep(x, at, memory_type(spec.x)), spec.x, lanes, self.acc)
        return [
            multiply_add(
                f, load(f, f.gep(w, at, memory_type(spec.w)), spec.w, lanes, self.acc), a, s
            )
            for w, s in zip(columns, acc, strict=True)
        ]


def _sum(values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _numbers_and_places(
    f: Function, args: Sequence[str], epilogue: Epilogue | None
) -> dict[str, Value]:
    """The kernel's args beside those of the epilogue."""
    own = args[: len(args) - len(epilogue.args)] if epilogue else args
    return {name: f.arg(f["args"], i, ptr if i < 3 else i64) for i, name in enumerate(own)}


def _row_epilogue(
    f: Function, args: Sequence[str], epilogue: Epilogue | None, acc: Type
) -> RowEpilogue | None:
    return None if epilogue is None else RowEpilogue(f, epilogue, args, acc)


@dataclass(frozen=True)
class GemvColumns(GemvDot):
    """The result and args of `GemvDot`, and those of the epilogue; sums are in the order of k."""

    epilogue: Epilogue | None = None

    @property
    def args(self) -> list[str]:
        return [*super().args, *(self.epilogue.args if self.epilogue else ())]

    def emit(self, m: Module) -> None:
        _GemvColumnsEmitter(self, m).emit()


class _GemvColumnsEmitter:
    def __init__(self, spec: GemvColumns, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.acc = spec, compute_type(spec.out)
        self.dots = ColumnDots(f, spec.x, spec.w, self.acc)
        self.given = _numbers_and_places(f, spec.args, spec.epilogue)
        self.epilogue = _row_epilogue(f, spec.args, spec.epilogue, self.acc)
        self.edge = f.alloca(COLUMNS * memory_type(spec.out).bytes)
        if self.epilogue is not None:
            self.sums = f.alloca(COLUMNS * self.acc.bytes)

    def emit(self) -> None:
        f, given, axes, count = self.f, self.given, self.spec.batch, COLUMNS
        n, out_type = given["n"], memory_type(self.spec.out)
        groups = f.ceil_div(n, count)
        lo, hi = f.split(batch_count(f, given, axes) * groups)
        for unit in f.range(lo, hi):
            batch = unit.udiv(groups)
            first = (unit - batch * groups) * count
            x, w = batch_start(f, given, axes, batch)
            # The last columns are taken again for those beyond them.
            numbers = [f.min(first + i, n - 1) for i in range(count)]
            columns = [f.gep(w, i * given["w_stride_n"]) for i in numbers]
            sums = self.dots.dots(x, columns, given["k"])
            out = f.gep(given["out"], batch * n + first, out_type)
            whole = first + count <= n
            if self.epilogue is not None:
                for is_whole in f.either(whole):
                    self._finish(sums, first, out, n - first, is_whole, self.epilogue)
                continue
            self._store(sums, f.select(whole, out, self.edge))
            f.if_(~whole, partial(self._copy_edge, out, n - first))

    def _store(self, sums: list[Value], to: Value) -> None:
        size = self.dots.lanes * memory_type(self.spec.out).bytes
        for i, value in enumerate(sums):
            store(self.f, value, to, self.spec.out, i * size)

    def _finish(
        self, sums: list[Value], first: Value, out: Value, count: Value, is_whole: bool,
        epilogue: RowEpilogue,
    ) -> None:  # fmt: skip
        """The epilogue of sums in columns from `first` on; only `count` columns are there."""
        f, lanes, out_type = self.f, self.dots.lanes, memory_type(self.spec.out)
        if is_whole:
            found = [epilogue.apply(s, first + i * lanes, lanes) for i, s in enumerate(sums)]
            self._store(found, out)
            return
        for i, value in enumerate(sums):
            f.store(value, self.sums, i * lanes * self.acc.bytes)
        for at in f.range(0, count):
            total = f.load(f.gep(self.sums, at, self.acc), self.acc)
            result = epilogue.apply(total, first + at, 1)
            store(f, result, f.gep(out, at, out_type), self.spec.out)

    def _copy_edge(self, out: Value, count: Value) -> None:
        f, type_ = self.f, memory_type(self.spec.out).as_int
        for i in f.range(0, count):
            f.store(f.load(f.gep(self.edge, i, type_), type_), f.gep(out, i, type_))


@dataclass(frozen=True)
class GemvAxpy(KernelSpec):
    """out = sum over k of x[k] * row k of w; the rows of w are contiguous.

    args: x, w, out, n, k, x_stride_k, w_stride_k, then size, x_batch, w_batch of each batch axis.
    Strides are bytes.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0
    epilogue: Epilogue | None = None

    @property
    def flushes_denormals(self) -> bool:
        return True

    @property
    def args(self) -> list[str]:
        sizes = ["x", "w", "out", "n", "k", "x_stride_k", "w_stride_k", *batch_args(self.batch)]
        return [*sizes, *(self.epilogue.args if self.epilogue else ())]

    def emit(self, m: Module) -> None:
        _GemvAxpyEmitter(self, m).emit()


class _GemvAxpyEmitter:
    def __init__(self, spec: GemvAxpy, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.acc = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.acc.bits)
        self.given = _numbers_and_places(f, spec.args, spec.epilogue)
        self.epilogue = _row_epilogue(f, spec.args, spec.epilogue, self.acc)
        self.block = f.alloca(_MAX_COLUMNS * self.acc.bytes)

    def emit(self) -> None:
        f, n = self.f, self.given["n"]
        batches = batch_count(f, self.given, self.spec.batch)
        per = self._columns_per_block(n, batches)
        blocks = (n + per - 1).udiv(per)
        lo, hi = f.split(batches * blocks)
        for unit in f.range(lo, hi):
            batch = unit.udiv(blocks)
            first = (unit - batch * blocks) * per
            x, w = batch_start(f, self.given, self.spec.batch, batch)
            w = f.gep(w, first, memory_type(self.spec.w))
            out = f.gep(self.given["out"], batch * n + first, memory_type(self.spec.out))
            self._block(x, w, out, first, f.min(per, n - first))

    def _columns_per_block(self, n: Value, batches: Value) -> Value:
        """Columns of a block: whole vectors, and enough blocks for all workers."""
        f = self.f
        workers = f["nth"].to(i64)
        share = (n * batches + workers - 1).udiv(workers)
        return f.min(f.ceil_div(f.max(share, 1), 64) * 64, _MAX_COLUMNS)

    def _block(self, x: Value, w: Value, out: Value, first: Value, columns: Value) -> None:
        f, spec, k = self.f, self.spec, self.given["k"]
        for at, lanes in self._vectors(columns):
            f.store(f.const(0, vec(lanes, self.acc)), f.gep(self.block, at, self.acc))
        whole = k - (k & (_ROWS - 1))
        for count, start, stop in ((_ROWS, f.i64(0), whole), (1, whole, k)):
            for row_index in f.range(start, stop, count):
                self._add(
                    f.gep(x, row_index * self.given["x_stride_k"]), w, row_index, count, columns
                )
        for at, lanes in self._vectors(columns):
            value = f.load(f.gep(self.block, at, self.acc), vec(lanes, self.acc))
            if self.epilogue is not None:
                value = self.epilogue.apply(value, first + at, lanes)
            store(f, value, f.gep(out, at, memory_type(spec.out)), spec.out)

    def _vectors(self, columns: Value) -> Iterator[tuple[Value, int]]:
        """Loops over the columns: in whole vectors, then one by one."""
        whole = columns - columns.urem(self.lanes)
        for lanes, start, stop in ((self.lanes, self.f.i64(0), whole), (1, whole, columns)):
            for at in self.f.range(start, stop, lanes):
                yield at, lanes

    def _add(self, x: Value, w: Value, row_index: Value, count: int, columns: Value) -> None:
        """acc += `count` rows of w, each times its element of x."""
        f, spec = self.f, self.spec
        factors, rows = [], []
        for i in range(count):
            factors.append(load(f, x, spec.x, 1, self.acc))
            rows.append(f.gep(w, (row_index + i) * self.given["w_stride_k"]))
            x = f.gep(x, self.given["x_stride_k"])
        wide = [f.splat(factor, self.lanes) for factor in factors]
        for at, lanes in self._vectors(columns):
            place = f.gep(self.block, at, self.acc)
            total = f.load(place, vec(lanes, self.acc))
            for row, one, many in zip(rows, factors, wide, strict=True):
                source = f.gep(row, at, memory_type(spec.w))
                weights = load(f, source, spec.w, lanes, self.acc)
                total = multiply_add(f, weights, many if lanes > 1 else one, total)
            f.store(total, place)
