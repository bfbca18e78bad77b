"""Native factorisations of awkward matrices: without full rank, of extreme size, with NaN; and
those that are left to LAPACK."""

from __future__ import annotations

import numpy as np
import pytest

from rlx import Graph, Session

EPS = 2.0**-52


def run(name: str, x: np.ndarray, **attributes: object) -> list[np.ndarray]:
    g = Graph(name)
    m, n = ("m", "n") if x.shape[-2] != x.shape[-1] else ("n", "n")
    made = g.apply(name, g.input("x", ["batch", m, n], x.dtype), **attributes)
    g.set_outputs(*(made if isinstance(made, tuple) else (made,)))
    return list(Session("cpu").compile(g).run(x=x))


def awkward(m: int, n: int) -> np.ndarray:
    """A batch: nothing, a constant, rank one, graded rows, huge, tiny, diagonal with ties."""
    rng = np.random.default_rng(m * 40 + n)
    x = rng.normal(size=(7, m, n))
    x[0], x[1] = 0, 3
    x[2] = rng.normal(size=(m, 1)) @ rng.normal(size=(1, n))
    x[3] *= 10.0 ** rng.uniform(-9, 9, (m, 1))
    x[4] *= 1e200
    x[5] *= 1e-200
    x[6] = np.eye(m, n) * 2
    return x


def orthonormal(columns: np.ndarray) -> None:
    unit = np.swapaxes(columns, -1, -2) @ columns
    # each rotation or reflection rounds once; there are some n² of them
    assert np.abs(unit - np.eye(columns.shape[-1])).max(initial=0.0) <= 100 * EPS


def same(found: np.ndarray, x: np.ndarray) -> None:
    scale = np.abs(x).max((-2, -1), keepdims=True)
    assert (np.abs(found - x) <= 100 * EPS * scale).all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 5), (9, 4), (4, 9), (32, 32), (32, 3)])
def test_singular_values(m: int, n: int) -> None:
    x = awkward(m, n)
    u, s, vh = run("svd", x, tall=m >= n)
    orthonormal(u)
    orthonormal(np.swapaxes(vh, -1, -2))
    assert (s >= 0).all() and (np.diff(s) <= 0).all()
    same((u * s[:, None, :]) @ vh, x)
    (alone,) = run("svd", x, tall=m >= n, vectors=False)
    same(alone[..., None], s[..., None])


@pytest.mark.parametrize("n", [1, 2, 7, 32])
def test_symmetric_eigenvalues(n: int) -> None:
    x = awkward(n, n)
    x = x + np.swapaxes(x, -1, -2)
    values, vectors = run("eigh", np.tril(x) + np.triu(np.full_like(x, np.nan), 1))
    orthonormal(vectors)
    assert (np.diff(values) >= 0).all()
    same(x @ vectors, vectors * values[:, None, :])


@pytest.mark.parametrize(("m", "n"), [(1, 1), (6, 6), (20, 5), (5, 20), (0, 4), (4, 0)])
def test_reflections(m: int, n: int) -> None:
    x = awkward(m, n)
    for complete in (False, True):
        q, r = run("qr", x, tall=m >= n, complete=complete)
        assert q.shape[-1] == r.shape[-2] == (m if complete else min(m, n))
        orthonormal(q)
        np.testing.assert_array_equal(r, np.triu(r))
        if m and n:
            same(q @ r, x)


def test_determinants() -> None:
    x = np.stack([np.eye(3)[[1, 0, 2]], np.diag([2.0, -3.0, 4.0]), np.ones((3, 3))])
    sign, size = run("slogdet", x)
    assert sign.tolist() == [-1, -1, 0]
    np.testing.assert_allclose(size, [0, np.log(24), -np.inf], rtol=1e-15)


@pytest.mark.parametrize("name", ["cholesky", "svd", "eigh", "qr", "slogdet"])
def test_large_matrices_are_left_to_lapack(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(1, 260, 260)).astype(np.float32)
    x = x @ np.swapaxes(x, -1, -2) + 260 * np.eye(260, dtype=np.float32)
    found = run(name, x)
    known = getattr(np.linalg, name)(x)
    for got, wanted in zip(found, known if isinstance(known, tuple) else [known], strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["cholesky", "svd", "eigh", "qr"])
def test_nan_gives_nan(name: str) -> None:
    x = np.full((1, 3, 3), np.nan, np.float32)
    assert all(np.isnan(part).any() for part in run(name, x))
