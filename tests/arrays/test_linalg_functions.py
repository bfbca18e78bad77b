"""rlx.numpy.linalg against NumPy: at once and inside rlx.jit, batches, empty matrices, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.numpy import linalg

TYPES = [np.float32, np.float64, np.complex64, np.complex128]
BATCHES = [(), (2,), (0,), (2, 3)]


def draw(seed: int, *shape: int, dtype: type = np.float64) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x, dtype)


def mirrored(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2).conj()


def close(found: object, wanted: np.ndarray, n: int = 1) -> None:
    """Backward stable algorithms: some n roundings of the largest element."""
    got = np.asarray(found)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if got.size:
        scale = max(float(np.abs(wanted).max()), 1e-30)
        assert np.abs(got - wanted).max() <= 40 * (n + 1) * np.finfo(got.dtype).eps * scale


def both(function: Callable[..., object]) -> list[Callable[..., object]]:
    """The function itself, and compiled with symbolic sizes."""
    return [function, rlx.jit(function)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("batch", BATCHES)
def test_factorisations(dtype: type, batch: tuple[int, ...]) -> None:
    ways = both if batch == (2,) else lambda function: [function]
    for m, n in ((4, 4), (6, 3), (3, 6), (1, 1), (0, 3)):
        x = draw(m * n, *batch, m, n, dtype=dtype)
        k = min(m, n)
        for mode in ("reduced", "complete"):
            for run in ways(lambda x, mode=mode: linalg.qr(x, mode=mode)):
                q, r = run(x)
                assert q.shape == (*batch, m, m if mode == "complete" else k)
                close(q @ r, x, n)
                close(np.asarray(r), np.triu(np.asarray(r)))
        for full in (False, True):
            for run in ways(lambda x, full=full: linalg.svd(x, full_matrices=full)):
                u, s, vh = (np.asarray(part) for part in run(x))
                close(s, np.linalg.svd(x, compute_uv=False), n)
                close((u[..., :, :k] * s[..., None, :]) @ vh[..., :k, :], x, n)
                unit = np.broadcast_to(
                    np.eye(u.shape[-1], dtype=dtype), mirrored(u).shape[:-1] + u.shape[-1:]
                )
                close(mirrored(u) @ u, unit, m)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_square_matrices(dtype: type, n: int) -> None:
    x = draw(n, 3, n, n, dtype=dtype)
    definite = x @ mirrored(x) + np.eye(n, dtype=dtype)
    for upper in (False, True):
        for run in both(lambda x, upper=upper: linalg.cholesky(x, upper=upper)):
            found = np.asarray(run(definite))
            close(mirrored(found) @ found if upper else found @ mirrored(found), definite, n)
            close(found, np.triu(found) if upper else np.tril(found))
    hermitian = x + mirrored(x)
    for run in both(linalg.eigh):
        values, vectors = (np.asarray(part) for part in run(hermitian))
        close(values, np.linalg.eigvalsh(hermitian), n)
        close(hermitian @ vectors, vectors * values[..., None, :], 2 * n)
    for run in both(linalg.eig):
        values, vectors = (np.asarray(part) for part in run(x))
        close((x @ vectors).astype(vectors.dtype), vectors * values[..., None, :], 4 * n)
    for run in both(linalg.eigvalsh):
        close(run(hermitian), np.linalg.eigvalsh(hermitian), n)
    for run in both(linalg.eigvals):
        found, wanted = np.sort_complex(np.asarray(run(x))), np.sort_complex(np.linalg.eigvals(x))
        np.testing.assert_allclose(found, wanted, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", TYPES)
def test_systems_and_determinants(dtype: type) -> None:
    a = draw(1, 2, 4, 4, dtype=dtype) + 4 * np.eye(4, dtype=dtype)
    b, v = draw(2, 2, 4, 3, dtype=dtype), draw(3, 4, dtype=dtype)
    for run in both(linalg.solve):
        close(run(a, b), np.linalg.solve(a, b), 4)
        close(run(a[0], v), np.linalg.solve(a[0], v), 4)
    for name in ("inv", "det", "pinv"):
        for run in both(getattr(linalg, name)):
            close(run(a), getattr(np.linalg, name)(a), 8)
    for run in both(linalg.slogdet):
        sign, size = run(a)
        wanted = np.linalg.slogdet(a)
        close(sign, np.asarray(wanted.sign), 4)
        close(size, np.asarray(wanted.logabsdet), 4)
    for n in (0, 1, 3, -2):
        for run in both(lambda x, n=n: linalg.matrix_power(x, n)):
            close(run(a), np.linalg.matrix_power(a, n), 16)
    assert np.isnan(np.asarray(linalg.inv(np.zeros((2, 2), dtype)))).all()
    assert np.asarray(linalg.det(np.zeros((2, 2), dtype))) == 0


def test_a_matrix_without_a_factorisation_gives_nan() -> None:
    x = np.stack([np.eye(2), -np.eye(2)])
    found = np.asarray(linalg.cholesky(x))
    np.testing.assert_array_equal(found[0], np.eye(2))
    assert np.isnan(found[1]).any()


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_rank(dtype: type) -> None:
    x = draw(5, 2, 4, 3, dtype=dtype)
    x[1, :, 2] = x[1, :, 0]
    part = np.finfo(dtype).dtype
    for order in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf):
        for keep in (False, True):
            wanted = np.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=keep)
            close(linalg.matrix_norm(x, ord=order, keepdims=keep), wanted.astype(part), 8)
    for order in (0, 1, 2, 3.5, -1, math.inf, -math.inf):
        for axis in (None, 0, (1, 2)):
            wanted = np.asarray(np.linalg.vector_norm(x, ord=order, axis=axis), part)
            close(linalg.vector_norm(x, ord=order, axis=axis), wanted, 16)
    traced = rlx.jit(lambda x: (linalg.matrix_norm(x, ord="nuc"), linalg.vector_norm(x, ord=3)))
    nuclear, third = traced(x)
    close(nuclear, np.linalg.norm(x, ord="nuc", axis=(-2, -1)).astype(part), 8)
    close(third, np.asarray(np.linalg.vector_norm(x, ord=3), part), 16)
    for run in both(linalg.matrix_rank):
        assert np.asarray(run(x)).tolist() == [3, 2]
    assert np.asarray(linalg.matrix_rank(x, rtol=np.array([10.0, 0.0]))).tolist() == [0, 3]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.integers(-5, 5), st.integers(0, 2**32 - 1))
def test_diagonals(rows: int, columns: int, offset: int, seed: int) -> None:
    x = np.random.default_rng(seed).integers(-9, 9, (2, rows, columns))
    for run in both(lambda x: (linalg.diagonal(x, offset=offset), linalg.trace(x, offset=offset))):
        found, total = run(x)
        wanted = np.linalg.diagonal(x, offset=offset)
        np.testing.assert_array_equal(np.asarray(found), wanted)
        np.testing.assert_array_equal(np.asarray(total), wanted.sum(-1))


def test_products() -> None:
    a, b = draw(1, 2, 3, 4), draw(2, 1, 3, 4)
    for run in both(lambda a, b: linalg.cross(a, b, axis=-2)):
        close(run(a, b), np.cross(a, b, axis=-2), 2)
    np.testing.assert_array_equal(
        np.asarray(linalg.outer([1, 2], [3, 4, 5])), np.outer([1, 2], [3, 4, 5])
    )
    assert linalg.vecdot(a, b).shape == (2, 3)
    assert linalg.tensordot(a, b, axes=((1, 2), (1, 2))).shape == (2, 1)


def test_one_trace_serves_all_sizes() -> None:
    @rlx.jit
    def whitened(x):
        _, s, vh = linalg.svd(x - x.mean(0, keepdims=True), full_matrices=False)
        return (x @ vh.mT) / s

    for rows in (5, 9, 30):
        assert whitened(draw(rows, rows, 3, dtype=np.float32)).shape == (rows, 3)
    assert len(whitened.variants()) == 1
    assert whitened(draw(0, 2, 7, dtype=np.float32)).shape == (2, 2)  # wide: another trace
    assert len(whitened.variants()) == 2


def test_errors_are_typed() -> None:
    x = np.zeros((2, 3))
    for function in (linalg.inv, linalg.det, linalg.cholesky, linalg.eigh, linalg.eig):
        with pytest.raises(rlx.RlxError, match="not square"):
            function(x)
    with pytest.raises(ValueError, match="not matrices"):
        linalg.svd(np.zeros(3))
    with pytest.raises(ValueError, match="rows differ"):
        linalg.solve(np.eye(2), np.zeros(3))
    with pytest.raises(ValueError, match="no such norm"):
        linalg.matrix_norm(x, ord=7)
    with pytest.raises(ValueError, match="no such mode"):
        linalg.qr(x, mode="full")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bools"):
        linalg.svdvals(x > 0)
    with pytest.raises(ValueError, match="not three"):
        linalg.cross(x[:, :2], x[:, :2])
