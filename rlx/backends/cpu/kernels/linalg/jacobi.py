"""Singular values and symmetric eigenproblems of small real matrices: one-sided Jacobi, in f64.

Rows of g are rotated in pairs until all are orthogonal, and the same rotations make w of a unit
matrix. With g = xᵀ (or x, if that has fewer rows) the norms of the rows are singular values; the
rows, normalised, are the long singular vectors, and those of w the short ones. Of a symmetric x,
g = x + c·I, with the Frobenius norm as c, has the eigenvectors in w. All rows are contiguous
vectors, and small singular values keep their digits. Large matrices are left to LAPACK.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rlx.backends.cpu.kernels.linalg.householder import padded
from rlx.backends.cpu.kernels.spec import KernelSpec, Operands
from rlx.backends.cpu.lowering import (
    Context,
    KernelArg,
    KernelLaunch,
    Pointer,
    Scratch,
    lower_custom,
    lowers,
)
from rlx.ir.dim import upper_bound
from rlx.ir.dtype import DType
from rlx.ir.node import Node
from rlx.llvm.builder import Function, Module, Value, f64, i64, vec
from rlx.llvm.storage import load, store
from rlx.llvm.target import Target
from rlx.support.records import dataclass

_LARGE = 32  # rows or columns: beyond, reduction to a band needs far fewer operations
_SWEEPS = 40  # six to ten are usual
_NOTHING = 1e-290  # squares below are those of a row of zeros


@dataclass(frozen=True)
class Jacobi(KernelSpec):
    """args: x, values, long, short, scratch, scratch_bytes, matrices, rows, columns

    `kind` is "tall" or "wide" for singular values of [rows, columns], or "eigh". Vectors: u and vh
    of a tall matrix are the long and the short ones, of a wide one vh and u. `long` is not
    written for "eigh". Without `vectors` the values alone are. `scratch` holds `scratch_bytes` for
    each worker.
    """

    dtype: DType
    kind: str
    vectors: bool

    args = (
        "x", "values", "long", "short", "scratch", "scratch_bytes", "matrices", "rows", "columns",
    )  # fmt: skip

    @property
    def label(self) -> str:
        return "eigh" if self.kind == "eigh" else "svd"

    @staticmethod
    def scratch(target: Target, rows: int, columns: int) -> int:
        """Bytes each worker needs: g, w, values and the keys they are sorted by."""
        few, many = sorted((rows, columns))
        return 8 * (few * (padded(target, many) + padded(target, few)) + 2 * padded(target, few))

    def emit(self, m: Module) -> None:
        _Jacobi(self, m.kernel()).emit()


class _Jacobi:
    def __init__(self, spec: Jacobi, f: Function) -> None:
        self.spec, self.f, self.dtype = spec, f, spec.dtype
        self.lanes = f.target.lanes(64)
        self.vector = vec(self.lanes, f64)
        self.zero = f.const(0, f64)
        self.o = Operands(f, spec.args, ("x", "values", "long", "short", "scratch"))
        rows, columns = self.o["rows"], self.o["columns"]
        self.n, self.m = (columns, rows) if spec.kind == "tall" else (rows, columns)

    def emit(self) -> None:
        f, o, spec = self.f, self.o, self.spec
        self.pitch_g, self.pitch_w = self._padded(self.m), self._padded(self.n)
        self.g = f.gep(o["scratch"], f["tid"].to(i64) * o["scratch_bytes"])
        self.w = f.gep(self.g, self.n * self.pitch_g, 8)
        self.values = f.gep(self.w, self.n * self.pitch_w, 8)
        self.keys = f.gep(self.values, self.pitch_w, 8)
        bound = 2.0**-52 if spec.dtype.bits == 64 else 2.0**-33
        self.limit = f.sqrt(f.max(self.m, 1).to(f64)) * bound
        lo, hi = f.split(o["matrices"])
        for matrix in f.range(lo, hi):
            start = matrix * (self.m * self.n)
            scale = self._load(start)
            f.while_([f.i64(0), f.i64(1)], self._goes_on, lambda sweep, _: self._sweep(sweep))
            self._find_values(start, scale)
            if spec.vectors and spec.kind != "eigh":
                self._complete()
            for rank in f.range(0, self.n):
                self._store(matrix, rank, self._next())

    def _padded(self, n: Value) -> Value:
        return self.f.ceil_div(n, self.lanes) * self.lanes

    def _row_g(self, i: Value) -> Value:
        return self.f.gep(self.g, i * self.pitch_g, 8)

    def _row_w(self, i: Value) -> Value:
        return self.f.gep(self.w, i * self.pitch_w, 8)

    # -- operands ---------------------------------------------------------------------------------

    def _element(self, start: Value, i: Value, j: Value) -> Value:
        """Element j of row i of g."""
        f, kind = self.f, self.spec.kind
        if kind == "tall":
            i, j = j, i
        elif kind == "eigh":  # the lower triangle
            i, j = f.max(i, j), f.min(i, j)
        at = start + i * self.o["columns"] + j
        return load(f, f.gep(self.o["x"], at, self.dtype.bytes), self.dtype, 1, f64)

    def _load(self, start: Value) -> Value:
        """Copy x to g, scaled to numbers up to 1; w is the unit matrix. Returns the scale."""
        f, one = self.f, self.f.const(1.0, f64)

        def row(i: Value, most: Value) -> Value:
            [found] = f.loop(
                0, self.m, 1, [most], lambda j, m: f.max(m, f.abs(self._element(start, i, j)))
            )
            return found

        [most] = f.loop(0, self.n, 1, [self.zero], row)
        scale = f.select(most.eq(0.0), one, most)
        nothing = scale - scale  # NaN where x is not finite
        shift = self._norm(start, scale) if self.spec.kind == "eigh" else self.zero
        for i in f.range(0, self.n):
            for j in f.range(0, self.pitch_g):
                f.store(self.zero, f.gep(self._row_g(i), j, 8))
            for j in f.range(0, self.m):
                value = self._element(start, i, j) / scale + f.select(i.eq(j), shift, 0.0)
                f.store(value, f.gep(self._row_g(i), j, 8))
            for j in f.range(0, self.pitch_w):
                f.store(f.select(i.eq(j), nothing + 1.0, nothing), f.gep(self._row_w(i), j, 8))
        return scale

    def _norm(self, start: Value, scale: Value) -> Value:
        """The Frobenius norm, scaled: at least as large as every eigenvalue."""
        f = self.f

        def row(i: Value, total: Value) -> Value:
            def add(j: Value, total: Value) -> Value:
                x = self._element(start, i, j) / scale
                return f.fma(x, x, total)

            [found] = f.loop(0, self.m, 1, [total], add)
            return found

        [squares] = f.loop(0, self.n, 1, [self.zero], row)
        return f.sqrt(squares)

    # -- rotations --------------------------------------------------------------------------------

    def _goes_on(self, sweep: Value, rotations: Value) -> Value:
        return rotations.ne(0) & (sweep < _SWEEPS)

    def _sweep(self, sweep: Value) -> list[Value]:
        """Rotate every pair of rows. Returns the next sweep and how many were not orthogonal."""
        f = self.f

        def first(p: Value, total: Value) -> Value:
            [found] = f.loop(p + 1, self.n, 1, [total], lambda q, t: t + self._pair(p, q))
            return found

        [rotations] = f.loop(0, self.n, 1, [f.i64(0)], first)
        return [sweep + 1, rotations]

    def _pair(self, p: Value, q: Value) -> Value:
        f, a, b = self.f, self._row_g(p), self._row_g(q)
        alpha, beta, gamma = self._dots(a, b)
        size = f.sqrt(alpha) * f.sqrt(beta)
        rotates = (f.abs(gamma) > size * self.limit) & (f.min(alpha, beta) > _NOTHING)

        def rotate() -> list[Value]:
            zeta = (beta - alpha) / (gamma * 2.0)
            tangent = 1.0 / (f.abs(zeta) + f.sqrt(f.fma(zeta, zeta, 1.0)))
            tangent = f.copysign(tangent, zeta)
            cosine = 1.0 / f.sqrt(f.fma(tangent, tangent, 1.0))
            sine = cosine * tangent
            self._rotate(a, b, self.pitch_g, cosine, sine)
            self._rotate(self._row_w(p), self._row_w(q), self.pitch_w, cosine, sine)
            return [f.i64(1)]

        [count] = f.if_(rotates, rotate, lambda: [f.i64(0)])
        return count

    def _dots(self, a: Value, b: Value) -> list[Value]:
        """a·a, b·b and a·b"""
        f, zero = self.f, self.f.const(0, self.vector)

        def add(j: Value, aa: Value, bb: Value, ab: Value) -> list[Value]:
            x, y = (f.load(f.gep(row, j, 8), self.vector) for row in (a, b))
            return [f.fma(x, x, aa), f.fma(y, y, bb), f.fma(x, y, ab)]

        sums = f.loop(0, self.pitch_g, self.lanes, [zero] * 3, add)
        return [f.reduce("add", total) for total in sums]

    def _rotate(self, a: Value, b: Value, length: Value, cosine: Value, sine: Value) -> None:
        f = self.f
        c, s = f.splat(cosine, self.lanes), f.splat(sine, self.lanes)
        for j in f.range(0, length, self.lanes):
            at_a, at_b = f.gep(a, j, 8), f.gep(b, j, 8)
            x, y = f.load(at_a, self.vector), f.load(at_b, self.vector)
            f.store(f.fma(c, x, -(s * y)), at_a)
            f.store(f.fma(s, x, c * y), at_b)

    # -- results ----------------------------------------------------------------------------------

    def _quotient(self, start: Value, scale: Value, w: Value) -> Value:
        """wᵀ·x·w, scaled. Its error is the square of that of the eigenvector."""
        f = self.f

        def row(i: Value, total: Value) -> Value:
            def add(j: Value, product: Value) -> Value:
                x = self._element(start, i, j) / scale
                return f.fma(x, f.load(f.gep(w, j, 8), f64), product)

            [product] = f.loop(0, self.m, 1, [self.zero], add)
            return f.fma(product, f.load(f.gep(w, i, 8), f64), total)

        [quotient] = f.loop(0, self.n, 1, [self.zero], row)
        return quotient

    def _find_values(self, start: Value, scale: Value) -> None:
        """The values, and keys of which the greatest comes first; rows of g are normalised."""
        f = self.f
        for i in f.range(0, self.n):
            row = self._row_g(i)
            if self.spec.kind == "eigh":
                value = self._quotient(start, scale, self._row_w(i))
                f.store(-value, f.gep(self.keys, i, 8))
            else:
                square = self._dots(row, row)[0]
                value = f.select(square <= _NOTHING, 0.0, f.sqrt(square))
                f.store(value, f.gep(self.keys, i, 8))
                divisor = f.splat(f.select(value.eq(0.0), float("inf"), value), self.lanes)
                for j in f.range(0, self.pitch_g, self.lanes):
                    at = f.gep(row, j, 8)
                    f.store(f.load(at, self.vector) / divisor, at)
            f.store(value * scale, f.gep(self.values, i, 8))

    def _complete(self) -> None:
        """Rows of zeros become unit vectors that are orthogonal to all others."""
        f = self.f
        for i in f.range(0, self.n):
            zero = f.load(f.gep(self.keys, i, 8), f64).eq(0.0)
            for _ in f.when(zero):
                axis = self._farthest_axis()
                row = self._row_g(i)
                f.store(f.const(1.0, f64), f.gep(row, axis, 8))
                for _ in range(2):  # the second time for what the first leaves by rounding
                    for j in f.range(0, self.n):
                        self._subtract_projection(row, self._row_g(j), i.ne(j))
                size = f.splat(f.sqrt(self._dots(row, row)[0]), self.lanes)
                for j in f.range(0, self.pitch_g, self.lanes):
                    f.store(f.load(f.gep(row, j, 8), self.vector) / size, f.gep(row, j, 8))

    def _farthest_axis(self) -> Value:
        """The axis of which the rows of g hold the least."""
        f = self.f

        def axis(t: Value, best: Value, least: Value) -> list[Value]:
            def add(j: Value, total: Value) -> Value:
                x = f.load(f.gep(self._row_g(j), t, 8), f64)
                return f.fma(x, x, total)

            [held] = f.loop(0, self.n, 1, [self.zero], add)
            less = held < least
            return [f.select(less, t, best), f.select(less, held, least)]

        best, _ = f.loop(0, self.m, 1, [f.i64(0), f.const(2.0, f64)], axis)
        return best

    def _subtract_projection(self, a: Value, b: Value, wanted: Value) -> None:
        f = self.f
        share = f.splat(f.select(wanted, self._dots(a, b)[2], 0.0), self.lanes)
        for j in f.range(0, self.pitch_g, self.lanes):
            at = f.gep(a, j, 8)
            f.store(f.fma(-share, f.load(f.gep(b, j, 8), self.vector), f.load(at, self.vector)), at)

    def _next(self) -> Value:
        """The row of the greatest key, which is taken."""
        f, none = self.f, self.f.const(float("-inf"), f64)

        def better(i: Value, best: Value, most: Value) -> list[Value]:
            key = f.load(f.gep(self.keys, i, 8), f64)
            more = key > most
            return [f.select(more, i, best), f.select(more, key, most)]

        best, _ = f.loop(0, self.n, 1, [f.i64(0), none], better)
        f.store(none, f.gep(self.keys, best, 8))
        return best

    def _store(self, matrix: Value, rank: Value, i: Value) -> None:
        f, spec = self.f, self.spec
        value = f.load(f.gep(self.values, i, 8), f64)
        self._put("values", matrix * self.n + rank, value)
        if not spec.vectors:
            return
        by_column = {"eigh": ("short",), "tall": ("long",), "wide": ("short",)}[spec.kind]
        for name, row, size in (
            ("long", self._row_g(i), self.m), ("short", self._row_w(i), self.n),
        ):  # fmt: skip
            if name == "long" and spec.kind == "eigh":
                continue
            for j in f.range(0, size):
                at = j * self.n + rank if name in by_column else rank * size + j
                self._put(name, matrix * (size * self.n) + at, f.load(f.gep(row, j, 8), f64))

    def _put(self, name: str, at: Value, value: Value) -> None:
        store(self.f, value, self.f.gep(self.o[name], at, self.dtype.bytes), self.dtype)


def _bounds(node: Node) -> tuple[int, int]:
    rows, columns = node.inputs[0].shape.dims[-2:]
    return upper_bound(rows, node.graph.live), upper_bound(columns, node.graph.live)


def _scratch(node: Node, target: Target, threads: int) -> int:
    return threads * max(Jacobi.scratch(target, *_bounds(node)), 64)


@lowers("eigh", "svd", scratch=_scratch)
def lower_jacobi(node: Node, ctx: Context) -> list[KernelLaunch]:
    op: Any = node.op
    x, bounds = node.inputs[0], _bounds(node)
    rows, columns = x.shape.dims[-2:]
    completes = op.name == "svd" and op.vectors and op.full and rows != columns
    if x.dtype.is_complex or max(bounds) > _LARGE or completes or 0 in (rows, columns):
        return lower_custom(node, ctx)
    kind = "eigh" if op.name == "eigh" else "tall" if op.tall else "wide"
    outputs = [Pointer(v) for v in node.outputs]
    values = outputs[0]
    long = short = values  # not written
    if op.vectors:
        if kind == "eigh":
            short = outputs[1]
        else:
            left, values, right = outputs
            long, short = (left, right) if kind == "tall" else (right, left)
    args: list[KernelArg] = [Pointer(x), values, long, short, Scratch(node)]
    args += [_scratch(node, ctx.target, 1), prod(x.shape.dims[:-2], start=1), rows, columns]
    cost = node.op.cost([x.shape], [v.shape for v in node.outputs])
    spec = Jacobi(x.dtype, kind, op.vectors)
    return [
        KernelLaunch(
            spec, args, [x], node.outputs, uses_scratch=True, flops=cost.flops, bytes=cost.bytes
        )
    ]
