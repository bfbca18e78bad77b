"""The extension `linalg` of the array API standard.

    from rlx.numpy import linalg

    q, r = linalg.qr(x)

Functions are batched over the leading axes. Integers become `float32`, and 16-bit floats are
computed in it. A matrix without a factorisation or an inverse gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from rlx.errors import ArrayTypeError, ArrayValueError
from rlx.ir.dtype import f32, i64
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.numpy.array import Array, Tracer
from rlx.numpy.data_types import astype
from rlx.numpy.dispatch import apply, apply_many, as_array, with_scalars
from rlx.numpy.elementwise import abs as _abs
from rlx.numpy.elementwise import conj, exp, sqrt, square, where
from rlx.numpy.elementwise import imag as _imag
from rlx.numpy.elementwise import pow as _power
from rlx.numpy.elementwise import real as _real
from rlx.numpy.manipulation import (
    axes_of,
    axis_of,
    broadcast_arrays,
    expand_dims,
    matrix_transpose,
    moveaxis,
    squeeze,
    stack,
)
from rlx.numpy.products import matmul, tensordot, vecdot
from rlx.numpy.products import outer as _outer
from rlx.numpy.reductions import max as _max
from rlx.numpy.reductions import min as _min
from rlx.numpy.reductions import sum as _sum
from rlx.numpy.trace import dim_of
from rlx.numpy.typing import ArrayLike, Axis, DTypeLike

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matmul",
    "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "outer", "pinv", "qr",
    "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip

Order = int | float | Literal["fro", "nuc"]


class EigResult(NamedTuple):
    """Eigenvalues, and eigenvectors as columns."""

    eigenvalues: Array
    eigenvectors: Array


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """x = Q·R."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """det x = sign · e^logabsdet."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """x = U·diag(S)·Vh."""

    U: Array
    S: Array
    Vh: Array


# -- operands -------------------------------------------------------------------------------------


def _matrices(x: ArrayLike, name: str, *, floats: bool = True, square_: bool = False) -> Array:
    array = as_array(x)
    if array.ndim < 2:
        raise ArrayValueError(
            "not matrices", where=name, got=f"shape {array.shape}", expected="two axes or more"
        )
    if square_ and array.shape[-1] != array.shape[-2]:  # a guard where sizes are symbolic
        raise ArrayValueError("not square", where=name, got=f"shape {array.shape}")
    return _floats(array, name) if floats else array


def _floats(x: Array, name: str) -> Array:
    """Integers as `float32`."""
    if x.dtype.kind == "bool":
        raise ArrayTypeError("bools are no numbers", where=name, got=x.dtype)
    return astype(x, f32) if x.dtype.is_integer else x


def _factored(build: Any, x: Array, *options: Any) -> tuple[Array, ...]:
    """The results of a factorisation, of 16-bit floats by way of `float32`."""
    if x.dtype.is_float and x.dtype.bits < 32:
        wide = apply_many(build, [astype(x, f32)], *options)
        return tuple([astype(part, x.dtype) if part.dtype is f32 else part for part in wide])
    return apply_many(build, [x], *options)


def _is_tall(x: Array) -> bool:
    """Whether there are at least as many rows as columns: a guard where sizes are symbolic."""
    return bool(x.shape[-2] >= x.shape[-1])


# -- factorisations -------------------------------------------------------------------------------


def _op(name: str) -> Callable[..., Any]:
    def build(g: Graph, x: Value, options: tuple[tuple[str, bool], ...]) -> Any:
        return g.apply(name, x, **dict(options))

    build.__name__ = name
    return build


_CHOLESKY, _QR, _EIGH, _EIG, _SVD = map(_op, ("cholesky", "qr", "eigh", "eig", "svd"))
_SLOGDET = _op("slogdet")


def cholesky(x: ArrayLike, /, *, upper: bool = False) -> Array:
    """The lower triangular L with x = L·Lᴴ of positive definite matrices, or the upper Lᴴ."""
    array = _matrices(x, "cholesky", square_=True)
    return _factored(_CHOLESKY, array, (("upper", bool(upper)),))[0]


def qr(x: ArrayLike, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """Orthonormal columns Q and an upper triangular R with x = Q·R."""
    if mode not in ("reduced", "complete"):
        raise ArrayValueError(
            "no such mode", where="qr", got=repr(mode), expected="'reduced' or 'complete'"
        )
    array = _matrices(x, "qr")
    options = (("complete", mode == "complete"), ("tall", _is_tall(array)))
    return QRResult(*_factored(_QR, array, options))


def eigh(x: ArrayLike, /) -> EighResult:
    """Eigenvalues and eigenvectors of symmetric or Hermitian matrices, by the lower triangle."""
    return EighResult(*_factored(_EIGH, _matrices(x, "eigh", square_=True), ()))


def eigvalsh(x: ArrayLike, /) -> Array:
    """Eigenvalues of symmetric or Hermitian matrices, in ascending order."""
    array = _matrices(x, "eigvalsh", square_=True)
    return _factored(_EIGH, array, (("vectors", False),))[0]


def eig(x: ArrayLike, /) -> EigResult:
    """Complex eigenvalues and eigenvectors of square matrices."""
    return EigResult(*_factored(_EIG, _matrices(x, "eig", square_=True), ()))


def eigvals(x: ArrayLike, /) -> Array:
    """Complex eigenvalues of square matrices."""
    array = _matrices(x, "eigvals", square_=True)
    return _factored(_EIG, array, (("vectors", False),))[0]


def svd(x: ArrayLike, /, *, full_matrices: bool = True) -> SVDResult:
    """Orthonormal U and Vh and singular values S in descending order, with x = U·diag(S)·Vh."""
    array = _matrices(x, "svd")
    options = (("full", bool(full_matrices)), ("tall", _is_tall(array)))
    return SVDResult(*_factored(_SVD, array, options))


def svdvals(x: ArrayLike, /) -> Array:
    """Singular values, in descending order."""
    array = _matrices(x, "svdvals")
    return _factored(_SVD, array, (("tall", _is_tall(array)), ("vectors", False)))[0]


def slogdet(x: ArrayLike, /) -> SlogdetResult:
    """The sign of the determinant and the logarithm of its magnitude."""
    return SlogdetResult(*_factored(_SLOGDET, _matrices(x, "slogdet", square_=True), ()))


def det(x: ArrayLike, /) -> Array:
    """The determinant of square matrices."""
    sign, size = _factored(_SLOGDET, _matrices(x, "det", square_=True), ())
    return sign * exp(size)


# -- linear systems -------------------------------------------------------------------------------


def _solve(g: Graph, a: Value, b: Value) -> Any:
    return g.solve(a, b)


def solve(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """x with x1·x = x2, for square matrices x1 and a vector or matrices x2."""
    a, b = _matrices(x1, "solve", square_=True), _floats(as_array(x2), "solve")
    if not b.ndim:
        raise ArrayValueError("not a vector or matrices", where="solve", got=repr(b))
    is_vector = b.ndim == 1
    if b.shape[0 if is_vector else -2] != a.shape[-1]:
        raise ArrayValueError("rows differ", where="solve", got=f"{a.shape} and {b.shape}")
    found = apply(_solve, [a, expand_dims(b, -1) if is_vector else b])
    return squeeze(found, -1) if is_vector else found


def _identity(g: Graph, x: Value) -> Value:
    n = x.shape.dims[-1]
    return g.eq(g.iota([n, n], 0), g.iota([n, n], 1)).astype(x.shape.dtype)


def _inverse(g: Graph, x: Value) -> Any:
    return g.solve(x, _identity(g, x))


def inv(x: ArrayLike, /) -> Array:
    """The inverse of square matrices."""
    return apply(_inverse, [_matrices(x, "inv", square_=True)])


def _ones(g: Graph, x: Value) -> Any:
    return g.expand(_identity(g, x), list(x.shape.dims))


def matrix_power(x: ArrayLike, n: int, /) -> Array:
    """Square matrices multiplied n times; negative n takes the inverse."""
    array = _matrices(x, "matrix_power", floats=n < 0, square_=True)
    if n == 0:
        return apply(_ones, [array])
    if n < 0:
        array, n = inv(array), -n
    result: Array | None = None
    while True:  # by repeated squaring
        if n & 1:
            result = array if result is None else matmul(result, array)
        n >>= 1
        if not n:
            assert result is not None
            return result
        array = matmul(array, array)


def _cutoff(x: Array, s: Array, rtol: ArrayLike | None) -> Array:
    """The singular value from which on a matrix has a direction, as a column."""
    largest = _max(s, axis=-1, keepdims=True)
    if rtol is None:
        sizes = x.shape[-2] if _is_tall(x) else x.shape[-1]
        return largest * astype(as_array(sizes), s.dtype) * float(np.finfo(s.dtype.numpy).eps)
    given = with_scalars(s, rtol)[1]
    return largest * (expand_dims(given, -1) if given.ndim else given)


def _is_empty(x: Array) -> bool:
    """Whether matrices have no rows or no columns."""
    return bool(x.shape[-1] == 0) or bool(x.shape[-2] == 0)


def matrix_rank(x: ArrayLike, /, *, rtol: ArrayLike | None = None) -> Array:
    """How many singular values are greater than `rtol` times the largest."""
    array = _matrices(x, "matrix_rank")
    s = svdvals(array)
    if _is_empty(array):
        return _sum(astype(s, i64), axis=-1)
    return _sum(astype(s > _cutoff(array, s, rtol), i64), axis=-1)


def pinv(x: ArrayLike, /, *, rtol: ArrayLike | None = None) -> Array:
    """The Moore–Penrose inverse; singular values up to `rtol` times the largest count as 0."""
    array = _matrices(x, "pinv")
    if _is_empty(array):
        return matrix_transpose(array)
    u, s, vh = svd(array, full_matrices=False)
    kept = s > _cutoff(array, s, rtol)
    inverse = where(kept, 1.0 / where(kept, s, 1.0), 0.0)
    left = conj(matrix_transpose(vh)) * expand_dims(inverse, -2)
    return matmul(left, conj(matrix_transpose(u)))


# -- norms ----------------------------------------------------------------------------------------


def _squares(x: Array) -> Array:
    """|x|²"""
    return square(_real(x)) + square(_imag(x)) if x.dtype.is_complex else square(x)


def matrix_norm(x: ArrayLike, /, *, keepdims: bool = False, ord: Order | None = "fro") -> Array:
    """The Frobenius norm of matrices, or the norm of that order: 1, 2, inf, their negatives, or
    "nuc", the sum of singular values."""
    array = _matrices(x, "matrix_norm")
    if ord in ("fro", None):
        return sqrt(_sum(_squares(array), axis=(-2, -1), keepdims=keepdims))
    if ord in ("nuc", 2, -2):
        s = svdvals(array)
        found = _sum(s, axis=-1) if ord == "nuc" else (_max if ord == 2 else _min)(s, axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        along = -2 if ord in (1, -1) else -1
        sums = _sum(_abs(array), axis=along)
        found = _max(sums, axis=-1) if ord in (1, math.inf) else _min(sums, axis=-1)
    else:
        raise ArrayValueError(
            "no such norm", where="matrix_norm", got=repr(ord),
            expected="'fro', 'nuc', 1, −1, 2, −2, inf or −inf",
        )  # fmt: skip
    return expand_dims(expand_dims(found, -1), -1) if keepdims else found


def vector_norm(
    x: ArrayLike, /, *, axis: Axis = None, keepdims: bool = False, ord: int | float = 2
) -> Array:
    """The norm of order `ord` along axes, of all elements where none are named; inf is the greatest
    magnitude, 0 counts what is not 0."""
    array = _floats(as_array(x), "vector_norm")
    how: dict[str, Any] = {"axis": axes_of(axis, array.ndim, "vector_norm"), "keepdims": keepdims}
    if ord == 2:
        return sqrt(_sum(_squares(array), **how))
    size = _abs(array)
    if ord in (math.inf, -math.inf):
        return (_max if ord > 0 else _min)(size, **how)
    if ord == 0:
        return _sum(astype(size != 0, size.dtype), **how)
    if ord == 1:
        return _sum(size, **how)
    return _power(_sum(_power(size, float(ord)), **how), 1.0 / float(ord))


# -- parts and products ---------------------------------------------------------------------------


def _diagonal(g: Graph, x: Value, offset: int, length: Any) -> Any:
    *outer, rows, columns = x.shape.dims
    flat = g.reshape(x, [*outer, rows * columns])
    width = g.constant(columns, i64) if isinstance(columns, int) else g.dim_value(columns, i64)
    first = g.constant(offset, i64) if offset >= 0 else width * -offset
    return g.gather(flat, g.iota([length], 0, i64) * (width + 1) + first, len(outer))


def diagonal(x: ArrayLike, /, *, offset: int = 0) -> Array:
    """The elements of a diagonal of matrices; `offset` counts to the right of the main one."""
    array = _matrices(x, "diagonal", floats=False)
    if not isinstance(array, Tracer):
        return Array(np.diagonal(array.data, offset, -2, -1))
    rows, columns = array.shape[-2:]
    below, right = (rows + offset, columns) if offset < 0 else (rows, columns - offset)
    length = below if below <= right else right  # a guard where sizes are symbolic
    return apply(_diagonal, [array], int(offset), dim_of(length if length >= 0 else 0))


def trace(x: ArrayLike, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Array:
    """The sum of a diagonal of matrices."""
    return _sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def cross(x1: ArrayLike, x2: ArrayLike, /, *, axis: int = -1) -> Array:
    """The cross product of vectors of three elements along an axis; the others broadcast."""
    pair = with_scalars(x1, x2)
    for x in pair:
        if x.dtype.kind == "bool":
            raise ArrayTypeError("bools are no numbers", where="cross", got=x.dtype)
        if x.shape[axis_of(axis, x.ndim, "cross")] != 3:
            raise ArrayValueError("not three elements", where="cross", got=f"shape {x.shape}")
    wide = broadcast_arrays(*pair)
    at = axis_of(axis, wide[0].ndim, "cross")
    a, b = ([moveaxis(x, at, 0)[i] for i in range(3)] for x in wide)
    parts = [a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return stack(parts, axis=at)


def outer(x1: ArrayLike, x2: ArrayLike, /) -> Array:
    """Every product of an element of the vector x1 and one of x2."""
    for x in (as_array(x1), as_array(x2)):
        if x.ndim != 1:
            raise ArrayValueError("not a vector", where="outer", got=f"shape {x.shape}")
    return _outer(x1, x2)
