"""One row against a matrix whose rows lie along k: dot products of runs of memory.

What Matmul would have to turn round first, this reads as it lies: scores of one query against keys,
a matrix times a vector.
"""

from __future__ import annotations

from functools import partial

from rlx.codegen.batches import batch_args, batch_count, batch_start
from rlx.codegen.emit import Module, Value, i64, ptr, vec
from rlx.codegen.kernel import KernelSpec
from rlx.codegen.matmul_micro import multiply_add
from rlx.codegen.storage import compute_type, load, memory_type, store
from rlx.ir.dtype import DType
from rlx.support.records import dataclass

_LINES = 4  # columns of w that share each piece of x
_UNROLL = 2


@dataclass(frozen=True)
class Matvec(KernelSpec):
    """args: x, w, out, n, k, w_line, then size, x_batch, w_batch of each axis of batches.

    Elements of x, and those of a column of w, follow each other; strides are bytes.
    """

    x: DType
    w: DType
    out: DType
    batch: int = 0

    @property
    def args(self) -> list[str]:
        return ["x", "w", "out", "n", "k", "w_line", *batch_args(self.batch)]

    def emit(self, m: Module) -> None:
        _Matvec(self, m).emit()


class _Matvec:
    def __init__(self, spec: Matvec, m: Module) -> None:
        f = self.f = m.kernel()
        self.spec, self.sums = spec, compute_type(spec.out)
        self.lanes = m.target.lanes(self.sums.bits)
        self.given = {
            name: f.arg(f["args"], i, ptr if i < 3 else i64) for i, name in enumerate(spec.args)
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
