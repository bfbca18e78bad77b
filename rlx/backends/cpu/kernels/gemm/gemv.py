"""One row against a matrix whose rows lie along k: dot products of runs of memory.

What Matmul would have to turn round first, this reads as it lies: scores of one query against keys,
a matrix times a vector.

One row against a matrix whose columns lie side by side: its rows, scaled, added as they come.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rlx.backends.cpu.kernels.gemm.batch_strides import batch_count, batch_start, batch_words
from rlx.backends.cpu.kernels.gemm.microkernel import multiply_add
from rlx.backends.cpu.kernels.spec import KernelSpec
from rlx.ir.dtype import DType
from rlx.llvm.builder import Module, Value, i64, ptr, vec
from rlx.llvm.storage import compute_type, load, memory_type, store
from rlx.records import dataclass

_LINES = 4  # columns of w that share each piece of x
_UNROLL = 2


@dataclass(frozen=True)
class Matvec(KernelSpec):
    """words: x, w, out, n, k, w_line, then size, x_batch, w_batch of each axis of batches.

    Elements of x, and those of a column of w, follow each other; strides are bytes.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0

    @property
    def words(self) -> list[str]:
        return ["x", "w", "out", "n", "k", "w_line", *batch_words(self.batch)]

    def emit(self, m: Module) -> None:
        _Matvec(self, m).emit()


class _Matvec:
    def __init__(self, spec: Matvec, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.given = {
            name: f.word(f["words"], i, ptr if i < 3 else i64) for i, name in enumerate(spec.words)
        }

    def emit(self) -> None:
        f, given, axes = self.f, self.given, self.spec.batch
        n = given["n"]
        groups = f.ceil_div(n, _LINES)
        lo, hi = f.split(batch_count(f, given, axes) * groups)
        for unit in f.range(lo, hi):
            batch = unit.udiv(groups)
            first = (unit - batch * groups) * _LINES
            x, w = batch_start(f, given, axes, batch)
            w = f.gep(w, first * given["w_line"])
            out = f.gep(given["out"], batch * n + first, memory_type(self.spec.out))
            left = f.min(n - first, _LINES)
            all_lines = partial(self._dots, x, w, out, _LINES)
            f.if_(left.eq(_LINES), all_lines, partial(self._one_by_one, x, w, out, left))

    def _one_by_one(self, x: Value, w: Value, out: Value, left: Value) -> None:
        f = self.f
        for i in f.range(0, left):
            line = f.gep(w, i * self.given["w_line"])
            self._dots(x, line, f.gep(out, i, memory_type(self.spec.out)), 1)

    def _dots(self, x: Value, w: Value, out: Value, count: int) -> None:
        f, spec, k = self.f, self.spec, self.given["k"]
        lines = [w]
        for _ in range(count - 1):
            lines.append(f.gep(lines[-1], self.given["w_line"]))
        step = self.lanes * _UNROLL
        whole = k - k.urem(step)
        zero = f.const(0, vec(self.lanes, self.sums))
        wide = f.loop(
            0, whole, step, [zero] * (count * _UNROLL), lambda at, *s: self._piece(x, lines, at, s)
        )
        totals = [
            f.reduce("add", _sum(wide[i * _UNROLL : (i + 1) * _UNROLL])) for i in range(count)
        ]

        def one(at: Value, *sums: Value) -> list[Value]:
            return self._products(x, lines, at, 1, sums)

        totals = f.loop(whole, k, 1, totals, one)
        for i, total in enumerate(totals):
            store(f, total, out, spec.out, i * memory_type(spec.out).bytes)

    def _piece(
        self, x: Value, lines: list[Value], at: Value, sums: tuple[Value, ...]
    ) -> list[Value]:
        out = list(sums)
        for u in range(_UNROLL):
            part = sums[u::_UNROLL]
            out[u::_UNROLL] = self._products(x, lines, at + u * self.lanes, self.lanes, part)
        return out

    def _products(
        self, x: Value, lines: list[Value], at: Value, lanes: int, sums: tuple[Value, ...]
    ) -> list[Value]:
        f, spec = self.f, self.spec
        a = load(f, f.gep(x, at, memory_type(spec.x)), spec.x, lanes, self.sums)
        return [
            multiply_add(
                f, load(f, f.gep(w, at, memory_type(spec.w)), spec.w, lanes, self.sums), a, s
            )
            for w, s in zip(lines, sums, strict=True)
        ]


def _sum(values: list[Value]) -> Value:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


_COLUMNS = 1024  # at most, in a block
_TERMS = 4  # rows of w added at once


@dataclass(frozen=True)
class Vecmat(KernelSpec):
    """words: x, w, out, n, k, x_term, w_term, then size, x_batch, w_batch of each axis of batches.

    Columns of w follow each other; strides are bytes, `term` the one of k.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0

    @property
    def words(self) -> list[str]:
        return ["x", "w", "out", "n", "k", "x_term", "w_term", *batch_words(self.batch)]

    def emit(self, m: Module) -> None:
        _Vecmat(self, m).emit()


class _Vecmat:
    def __init__(self, spec: Vecmat, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.given = {
            name: f.word(f["words"], i, ptr if i < 3 else i64) for i, name in enumerate(spec.words)
        }
        self.block = f.alloca(_COLUMNS * self.sums.bytes)

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
            self._block(x, w, out, f.min(per, n - first))

    def _columns_per_block(self, n: Value, batches: Value) -> Value:
        """Whole vectors, and enough blocks for all workers."""
        f = self.f
        workers = f["nth"].to(i64)
        share = (n * batches + workers - 1).udiv(workers)
        return f.min(f.ceil_div(f.max(share, 1), 64) * 64, _COLUMNS)

    def _block(self, x: Value, w: Value, out: Value, columns: Value) -> None:
        f, spec, k = self.f, self.spec, self.given["k"]
        for at, lanes in self._vectors(columns):
            f.store(f.const(0, vec(lanes, self.sums)), f.gep(self.block, at, self.sums))
        whole = k - (k & (_TERMS - 1))
        for count, start, stop in ((_TERMS, f.i64(0), whole), (1, whole, k)):
            for term in f.range(start, stop, count):
                self._add(f.gep(x, term * self.given["x_term"]), w, term, count, columns)
        for at, lanes in self._vectors(columns):
            value = f.load(f.gep(self.block, at, self.sums), vec(lanes, self.sums))
            store(f, value, f.gep(out, at, memory_type(spec.out)), spec.out)

    def _vectors(self, columns: Value) -> Iterator[tuple[Value, int]]:
        """Loops over the columns: in whole vectors, then one by one."""
        whole = columns - columns.urem(self.lanes)
        for lanes, start, stop in ((self.lanes, self.f.i64(0), whole), (1, whole, columns)):
            for at in self.f.range(start, stop, lanes):
                yield at, lanes

    def _add(self, x: Value, w: Value, term: Value, count: int, columns: Value) -> None:
        """Add `count` rows of w, times x, to the sums."""
        f, spec = self.f, self.spec
        factors, rows = [], []
        for i in range(count):
            factors.append(load(f, x, spec.x, 1, self.sums))
            rows.append(f.gep(w, (term + i) * self.given["w_term"]))
            x = f.gep(x, self.given["x_term"])
        wide = [f.splat(factor, self.lanes) for factor in factors]
        for at, lanes in self._vectors(columns):
            place = f.gep(self.block, at, self.sums)
            total = f.load(place, vec(lanes, self.sums))
            for row, one, many in zip(rows, factors, wide, strict=True):
                source = f.gep(row, at, memory_type(spec.w))
                weights = load(f, source, spec.w, lanes, self.sums)
                total = multiply_add(f, weights, many if lanes > 1 else one, total)
            f.store(total, place)
