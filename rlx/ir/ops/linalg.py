"""Fourier transforms, complex numbers, and linear systems."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, pi
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, promote
from rlx.ir.op import Array, Cost, Op, op
from rlx.ir.ops._common import cast, compute, require_dtype, require_same, rounded, size_value, wide
from rlx.ir.shape import Shape, broadcast_dims, normalize_axis

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.ir.node import Value


def _require_transformable(x: Shape, axis: int, *, real: bool) -> int:
    """Check that `x` can be transformed along the axis; returns the axis."""
    if not (x.dtype.is_float or (x.dtype.is_complex and not real)):
        expected = "f32 or f64" if real else "f32, f64, c64 or c128"
        raise DTypeError("x has no transform", got=x, expected=expected)
    axis = normalize_axis(axis, x.rank)
    if not x.rank or x.dims[axis] == 0:
        raise ShapeError("a transform needs at least one element", got=x)
    return axis


def _fft_cost(points: Dim, elements: Dim, traffic: Dim) -> Cost:
    # 5 n log2 n is the customary count; a symbolic length counts as 4096
    steps = max(1, round(log2(points))) if isinstance(points, int) and points else 12
    return Cost(elements * (5 * steps), traffic)


def _waves(g: Graph, rows: Dim, columns: Dim, n: Dim, part: DType) -> tuple[Value, Value]:
    """cos and sin of 2π·jk/n for j in rows and k in columns; f64, rounded to `part` at the end."""
    j = g.iota(shape=(rows, columns), axis=0, dtype=dt.i64)
    k = g.iota(shape=(rows, columns), axis=1, dtype=dt.i64)
    phase = cast(g, g.mod(g.mul(j, k), size_value(g, n, j)), dt.f64)
    angle = g.mul(phase, g.div(g.constant(2 * pi, dt.f64), size_value(g, n, phase)))
    return cast(g, g.cos(angle), part), cast(g, g.sin(angle), part)


def _axis_last(g: Graph, x: Value, axis: int) -> Value:
    """`axis` swapped with the last one; an involution."""
    rank = x.shape.rank
    axis = normalize_axis(axis, rank)
    perm = list(range(rank))
    perm[axis], perm[-1] = perm[-1], perm[axis]
    return g.transpose(x, axes=tuple(perm)) if axis != rank - 1 else x


def _spectrum(g: Graph, x: Value, axis: int, terms: Dim, sign: float) -> tuple[Value, Value]:
    """(re, im) of Σ x·exp(sign·2πi·jk/n) as matmuls with the DFT matrix, axis last"""
    parts = [g.real(x), g.imag(x)] if x.shape.dtype.is_complex else [wide(g, x)]
    parts = [_axis_last(g, p, axis) for p in parts]
    n = parts[0].shape.dims[-1]
    cos, sin = _waves(g, n, terms, n, parts[0].shape.dtype)
    re, im = g.matmul(parts[0], cos), g.mul(g.matmul(parts[0], sin), sign)
    if len(parts) == 2:
        re = g.sub(re, g.mul(g.matmul(parts[1], sin), sign))
        im = g.add(im, g.matmul(parts[1], cos))
    return re, im


class _Transform(Op):
    axis: int

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """Counted on the longer, complete side."""
        whole = inputs[0] if self.name != "irfft" else outputs[0]
        traffic = inputs[0].size_bytes + outputs[0].size_bytes
        return _fft_cost(whole.dims[self.axis], whole.num_elements, traffic)


@op("fft")
class Fft(_Transform):
    """X[k] = Σ_j x[j]·exp(−2πi·jk/n) along `axis`; the inverse has +2πi and the factor 1/n."""

    axis: int = -1
    inverse: bool = False

    def infer(self, x: Shape) -> Shape:
        _require_transformable(x, self.axis, real=False)
        return x.with_dtype(dt.complex_of(x.dtype))

    def reference(self, x: Array) -> Array:
        wide = compute(x).astype(np.complex128)
        transform = np.fft.ifft if self.inverse else np.fft.fft
        return rounded(transform(wide, axis=self.axis), dt.complex_of(DType.of(x.dtype)))

    def decompose(self, g: Graph, x: Value) -> Any:
        n = x.shape.dims[self.axis]
        re, im = _spectrum(g, x, self.axis, n, 1.0 if self.inverse else -1.0)
        if self.inverse:
            re, im = (g.div(v, size_value(g, n, v)) for v in (re, im))
        return _axis_last(g, g.complex(re, im), self.axis)


@op("rfft")
class Rfft(_Transform):
    """The first n // 2 + 1 terms of the transform of a real x; the others mirror them."""

    axis: int = -1

    def infer(self, x: Shape) -> Shape:
        axis = _require_transformable(x, self.axis, real=True)
        dims = list(x.dims)
        dims[axis] = dims[axis] // 2 + 1
        return Shape(dims, dt.complex_of(x.dtype))

    def reference(self, x: Array) -> Array:
        found = np.fft.rfft(compute(x).astype(np.float64), axis=self.axis)
        return rounded(found, dt.complex_of(DType.of(x.dtype)))

    def decompose(self, g: Graph, x: Value) -> Any:
        re, im = _spectrum(g, x, self.axis, x.shape.dims[self.axis] // 2 + 1, -1.0)
        return _axis_last(g, g.complex(re, im), self.axis)


@op("irfft")
class Irfft(_Transform):
    """The real x of length `n` whose `rfft` is given; the factor 1/n is in here.

    Imaginary parts of the first term, and for an even n of the last, do not count.
    """

    n: Dim
    axis: int = -1

    def check(self) -> None:
        if isinstance(self.n, int) and self.n < 1:
            raise AttributeValueError("out of range", where="irfft.n", got=self.n, expected="1 up")

    def infer(self, x: Shape) -> Shape:
        if not x.dtype.is_complex:
            raise DTypeError("x must be complex", got=x, expected="c64 or c128")
        axis = normalize_axis(self.axis, x.rank)
        dims = list(x.dims)
        require_same(dims[axis], self.n // 2 + 1, f"terms for {self.n} points")
        dims[axis] = self.n
        return Shape(dims, x.dtype.part)

    def reference(self, x: Array) -> Array:
        n: Any = self.n
        found = np.fft.irfft(x.astype(np.complex128), n, axis=self.axis)
        return rounded(found, DType.of(x.dtype).part)

    def decompose(self, g: Graph, x: Value) -> Any:
        """x[j] = (Σ_k w_k (re_k·cos − im_k·sin)) / n, w = 2 for terms that have a mirror image."""
        re, im = (_axis_last(g, part, self.axis) for part in (g.real(x), g.imag(x)))
        terms = re.shape.dims[-1]
        part = re.shape.dtype
        cos, sin = _waves(g, terms, self.n, self.n, part)
        k = g.iota(shape=(terms,), dtype=dt.i64)
        twice = g.mul(k, g.constant(2, dt.i64))
        first, last = g.eq(k, g.constant(0, dt.i64)), g.eq(twice, size_value(g, self.n, twice))
        weight = g.where(g.logical_or(first, last), g.constant(1.0, part), g.constant(2.0, part))
        y = g.sub(g.matmul(g.mul(re, weight), cos), g.matmul(g.mul(im, weight), sin))
        return _axis_last(g, g.div(y, size_value(g, self.n, y)), self.axis)


@op("real", is_elementwise=True)
class Real(Op):
    """The real part of a complex x."""

    def infer(self, x: Shape) -> Shape:
        return _part(x)

    def reference(self, x: Array) -> Array:
        return x.real.copy()


@op("imag", is_elementwise=True)
class Imag(Op):
    """The imaginary part of a complex x."""

    def infer(self, x: Shape) -> Shape:
        return _part(x)

    def reference(self, x: Array) -> Array:
        return x.imag.copy()


def _part(x: Shape) -> Shape:
    if not x.dtype.is_complex:
        raise DTypeError("x must be complex", got=x, expected="c64 or c128")
    return x.with_dtype(x.dtype.part)


@op("complex", is_elementwise=True)
class Complex(Op):
    """re + i·im, from f32 or f64 parts."""

    def infer(self, re: Shape, im: Shape) -> Shape:
        if re.dtype not in (dt.f32, dt.f64):
            raise DTypeError("re has the wrong type", got=re, expected="f32 or f64")
        if im.dtype is not re.dtype:
            raise DTypeError("im has the wrong type", got=im, expected=f"{re.dtype}, as re")
        return Shape(broadcast_dims(re.dims, im.dims), dt.complex_of(re.dtype))

    def reference(self, re: Array, im: Array) -> Array:
        re, im = np.broadcast_arrays(re, im)
        made = np.empty(re.shape, dt.complex_of(DType.of(re.dtype)).numpy)
        made.real, made.imag = re, im  # re + 1j·im would make NaN of an infinity
        return made


@op("solve")
class Solve(Op):
    """x with a·x = b, for `a [..., n, n]` and `b [..., n, m]`; batch axes broadcast.

    Elimination with row pivoting, in f64. The result for a singular matrix is NaN.
    """

    def infer(self, a: Shape, b: Shape) -> Shape:
        require_dtype(a, ("float", "complex"), "a")
        require_dtype(b, ("float", "complex"), "b")
        if a.rank < 2 or b.rank < 2:
            low = a if a.rank < 2 else b
            raise ShapeError("not matrices", got=low, expected="[..., n, n] and [..., n, m]")
        require_same(a.dims[-1], a.dims[-2], "columns and rows of a")
        require_same(b.dims[-2], a.dims[-1], "rows of b")
        batch = broadcast_dims(a.dims[:-2], b.dims[:-2])
        return Shape((*batch, *b.dims[-2:]), promote(a.dtype, b.dtype))

    def reference(self, a: Array, b: Array) -> Array:
        dtype = promote(DType.of(a.dtype), DType.of(b.dtype))
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        wide = np.complex128 if dtype.is_complex else np.float64
        left = np.broadcast_to(a, (*batch, *a.shape[-2:])).astype(wide)
        right = np.broadcast_to(b, (*batch, *b.shape[-2:])).astype(wide)
        result = np.full(right.shape, np.nan, wide)
        for i in np.ndindex(*batch):
            try:
                result[i] = np.linalg.solve(left[i], right[i])
            except np.linalg.LinAlgError:
                continue  # stays NaN, as documented
        return rounded(result, dtype)

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        """2/3·n³ for the elimination, 2·n² per right-hand side."""
        a, x = inputs[0], outputs[0]
        matrices: Dim = 1
        for d in x.dims[:-2]:
            matrices = matrices * d
        n, m = x.dims[-2:]
        flops = matrices * ((n * n * n * 2) // 3 + n * n * m * 2)
        return Cost(flops, a.size_bytes + inputs[1].size_bytes + x.size_bytes)
