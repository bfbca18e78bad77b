"""One row against a matrix whose columns lie side by side: its rows, scaled, added as they come.

Memory is read in long runs, in order; the sums of a block of columns stay on the stack.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlx.codegen.batches import batch_args, batch_count, batch_start
from rlx.codegen.emit import Module, Value, i64, ptr, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul_micro import multiply_add
from rlx.codegen.storage import compute_type, load, memory_type, store
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

_COLUMNS = 1024  # at most, in a block
_TERMS = 4  # rows of w added at once


@dataclass(frozen=True)
class Vecmat(KernelSpec):
    """args: x, w, out, n, k, x_term, w_term, then size, x_batch, w_batch of each axis of batches.

    Columns of w follow each other; strides are bytes, `term` the one of k.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0

    @property
    def args(self) -> list[str]:
        return ["x", "w", "out", "n", "k", "x_term", "w_term", *batch_args(self.batch)]

    def emit(self, m: Module) -> None:
        _Vecmat(self, m).emit()


class _Vecmat:
    def __init__(self, spec: Vecmat, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.given = {
            name: f.arg(f["args"], i, ptr if i < 3 else i64) for i, name in enumerate(spec.args)
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
