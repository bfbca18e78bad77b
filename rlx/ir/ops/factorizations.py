"""Factorisations of matrices [..., m, n], batched over the leading axes, and determinants.

They follow LAPACK's conventions, and compute in the precision of the operand, f32 at least. Where a
matrix has no factorisation the result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, InputError, ShapeError
from rlx.ir.dim import Dim
from rlx.ir.dtype import DType, complex_of
from rlx.ir.op import Array, Cost, Inferred, Op, op
from rlx.ir.ops._common import compute, quiet, require_same, traffic
from rlx.ir.shape import Shape


def require_matrices(x: Shape, what: str, *, square: bool = False) -> None:
    """Require matrices of floats or complex numbers of at least 32 bits a part."""
    if x.dtype.name not in ("f32", "f64", "c64", "c128"):
        raise DTypeError(f"{what}: unsupported element type", got=x, expected="f32, f64, c64, c128")
    if x.rank < 2:
        raise ShapeError(f"{what}: not matrices", got=x, expected="[..., m, n]")
    if square:
        require_same(x.dims[-2], x.dims[-1], f"rows and columns of {what}")


def each_matrix(function: Callable[[Array], Any], x: Array) -> tuple[Array, ...]:
    """NumPy's factorisation of all matrices; NaN for those that have none."""

    def results(a: Array) -> tuple[Array, ...]:
        found = function(a)
        return tuple(found) if isinstance(found, tuple) else (found,)

    x = compute(x)
    with quiet():
        try:
            return results(x)
        except np.linalg.LinAlgError:
            pass
        batch = x.shape[:-2]
        whole = results(np.broadcast_to(np.eye(*x.shape[-2:], dtype=x.dtype), x.shape))
        made = [np.full_like(part, np.nan) for part in whole]
        for i in np.ndindex(*batch):
            try:
                for to, part in zip(made, results(x[i]), strict=True):
                    to[i] = part
            except np.linalg.LinAlgError:
                continue  # stays NaN
        return tuple(made)


class _Factorization(Op):
    """Costs count some n³ operations per matrix."""

    cubes = 4

    def cost(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Cost:
        x = inputs[0]
        return Cost(x.num_elements * x.dims[-1] * self.cubes, traffic(inputs, outputs))


@op("cholesky")
class Cholesky(_Factorization):
    """The lower triangular l with x = l·lᴴ of a positive definite x, or with `upper` u and uᴴ·u.

    Only the lower triangle of x is read (with `upper` the upper one); other matrices give NaN.
    """

    upper: bool = False
    cubes = 1

    def infer(self, x: Shape) -> Shape:
        require_matrices(x, "x", square=True)
        return x

    def reference(self, x: Array) -> Array:
        def factor(a: Array) -> Array:
            lower = np.linalg.cholesky(np.swapaxes(a, -1, -2).conj() if self.upper else a)
            return np.swapaxes(lower, -1, -2).conj() if self.upper else lower

        return each_matrix(factor, x)[0]


def smaller_size(x: Shape, tall: bool) -> Dim:
    """The smaller of rows and columns, as the attribute says; sizes may be symbolic."""
    rows, columns = x.dims[-2:]
    known = isinstance(rows, int) and isinstance(columns, int) and rows != columns
    if known and (rows > columns) is not tall:  # type: ignore[operator]
        raise ShapeError("`tall` says otherwise", got=x, expected="rows ≥ columns if tall")
    return columns if tall else rows


def _check_tall(x: Array, tall: bool, where: str) -> None:
    rows, columns = x.shape[-2:]
    if rows != columns and (rows > columns) is not tall:
        raise InputError(
            "`tall` says otherwise", where=where, got=x.shape, expected="rows ≥ columns if tall"
        )


@op("qr")
class Qr(_Factorization):
    """x = q·r with orthonormal columns of q and upper triangular r.

    q has min(m, n) columns, or m if `complete`. `tall` says that m ≥ n, and if not, that m ≤ n.
    """

    complete: bool = False
    tall: bool = True

    def infer(self, x: Shape) -> tuple[Shape, Shape]:
        require_matrices(x, "x")
        k = x.dims[-2] if self.complete else smaller_size(x, self.tall)
        batch, (rows, columns) = x.dims[:-2], x.dims[-2:]
        return x.with_dims((*batch, rows, k)), x.with_dims((*batch, k, columns))

    def reference(self, x: Array) -> tuple[Array, ...]:
        _check_tall(x, self.tall, self.name)
        mode: Any = "complete" if self.complete else "reduced"
        return each_matrix(lambda a: tuple(np.linalg.qr(a, mode)), x)


@op("eigh")
class Eigh(_Factorization):
    """Eigenvalues of a symmetric or Hermitian x in ascending order, and eigenvectors as columns.

    Only the lower triangle is read. Without `vectors`, the values alone.
    """

    vectors: bool = True
    cubes = 9

    def infer(self, x: Shape) -> Inferred:
        require_matrices(x, "x", square=True)
        values = x.with_dims(x.dims[:-1]).with_dtype(x.dtype.part)
        return (values, x) if self.vectors else values

    def reference(self, x: Array) -> Any:
        if self.vectors:
            return each_matrix(lambda a: tuple(np.linalg.eigh(a)), x)
        return each_matrix(np.linalg.eigvalsh, x)[0]


@op("eig")
class Eig(_Factorization):
    """Complex eigenvalues of a square x, and eigenvectors as columns.

    Without `vectors`, the values alone.
    """

    vectors: bool = True
    cubes = 25

    def infer(self, x: Shape) -> Inferred:
        require_matrices(x, "x", square=True)
        vectors = x.with_dtype(complex_of(x.dtype))
        values = vectors.with_dims(x.dims[:-1])
        return (values, vectors) if self.vectors else values

    def reference(self, x: Array) -> Any:
        element = complex_of(DType.of(x.dtype)).numpy
        if not self.vectors:
            return each_matrix(np.linalg.eigvals, x)[0].astype(element)
        values, vectors = each_matrix(lambda a: tuple(np.linalg.eig(a)), x)
        return values.astype(element), vectors.astype(element)


@op("svd")
class Svd(_Factorization):
    """x = u·diag(s)·vh with orthonormal u and vh, and s ≥ 0 in descending order.

    With `full`, u is [m, m] and vh [n, n], else both have min(m, n) of them. `tall` says that
    m ≥ n, and if not, that m ≤ n. Without `vectors`, s alone.
    """

    full: bool = False
    tall: bool = True
    vectors: bool = True
    cubes = 22

    def infer(self, x: Shape) -> Inferred:
        require_matrices(x, "x")
        k = smaller_size(x, self.tall)
        batch, (rows, columns) = x.dims[:-2], x.dims[-2:]
        values = x.with_dims((*batch, k)).with_dtype(x.dtype.part)
        if not self.vectors:
            return values
        left, right = (rows, columns) if self.full else (k, k)
        return x.with_dims((*batch, rows, left)), values, x.with_dims((*batch, right, columns))

    def reference(self, x: Array) -> Any:
        _check_tall(x, self.tall, self.name)
        if not self.vectors:
            return each_matrix(np.linalg.svdvals, x)[0]
        return each_matrix(lambda a: tuple(np.linalg.svd(a, full_matrices=self.full)), x)


@op("slogdet")
class SlogDet(_Factorization):
    """The sign of the determinant, of a complex x a number of size 1, and ln |det x|.

    Both are such that sign · e^log is the determinant; of a singular x they are 0 and −inf.
    """

    cubes = 1

    def infer(self, x: Shape) -> tuple[Shape, Shape]:
        require_matrices(x, "x", square=True)
        sign = x.with_dims(x.dims[:-2])
        return sign, sign.with_dtype(x.dtype.part)

    def reference(self, x: Array) -> tuple[Array, ...]:
        element = DType.of(x.dtype)
        sign, size = np.linalg.slogdet(compute(x))
        return np.asarray(sign, element.numpy), np.asarray(size, element.part.numpy)
