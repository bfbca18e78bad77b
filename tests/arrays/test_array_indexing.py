"""Indexing and `x.at[index]` beside NumPy: every kind of index, at once, in a trace, and traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(0)
X = rng.standard_normal((5, 6, 7)).astype(np.float32)
I, J = np.array([[0, -1], [3, 2]]), np.array([1, 4])
FLAGS = X[:, 0, 0] > 0
BASIC = [
    0, -1, slice(None), slice(1, 3), slice(None, None, 2), slice(None, None, -1), slice(4, 0, -2),
    slice(-3, None), slice(None, -2), slice(10, 20), slice(3, 1), (Ellipsis, 0),
    (0, Ellipsis, None), (None, slice(1, None), None, 2),
    (slice(None), None, slice(None, None, -2)), (np.int64(2), slice(-100, 100, 3)), (), True,
]  # fmt: skip
ARRAYS = [
    I, (I, J), (slice(None), I, J), (I, slice(None), J), (0, slice(None), J), (slice(None), 0, J),
    (I, None, J), (0, J, I[0]), (slice(1, 3), I), (Ellipsis, I), (slice(None, None, -1), I, 0),
    (None, I, Ellipsis, None), (np.int64(2), I), (I, J, np.array([6, -7])), [1, 1, 0],
]  # fmt: skip
MASKS = [FLAGS, (slice(None), X[0, :, 0] > 0), X > 0, (X[:, :, 0] > 0, 2), (FLAGS, 0, slice(1, 3))]
COMBINE = {
    "set": None,
    "add": np.add,
    "multiply": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def same(got: rlx.Array, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    assert np.array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("index", BASIC + ARRAYS + MASKS, ids=str)
def test_elements_are_those_that_numpy_gives(index: Any) -> None:
    same(rnp.asarray(X)[index], X[index])
    same(rlx.jit(lambda x: x[index])(X), X[index])


@pytest.mark.parametrize("index", ARRAYS, ids=str)
def test_indices_may_be_arguments(index: Any) -> None:
    parts = index if isinstance(index, tuple) else (index,)
    given = [np.asarray(p) for p in parts if isinstance(p, (np.ndarray, list))]

    def f(x: rlx.Array, indices: list[rlx.Array]) -> rlx.Array:
        left = iter(indices)
        return x[tuple([next(left) if isinstance(p, (np.ndarray, list)) else p for p in parts])]

    same(rlx.jit(f)(X, given), X[index])


@pytest.mark.parametrize("how", COMBINE)
@pytest.mark.parametrize("index", [0, slice(None, None, -2), (1, slice(2, 4)), I, (I, J), X > 0])
def test_updates_are_those_that_numpy_makes(index: Any, how: str) -> None:
    value = rng.standard_normal(X[index].shape).astype(np.float32)
    expected, combine = X.copy(), COMBINE[how]
    if combine is None:
        expected[index] = value
    else:
        combine.at(expected, index, value)
    before = X.copy()
    same(getattr(rnp.asarray(X).at[index], how)(value), expected)
    got = rlx.jit(lambda x, v: getattr(x.at[index], how)(v))(X, value)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=3e-7)  # sums in another order
    assert np.array_equal(X, before)


@pytest.mark.parametrize("how", COMBINE)
def test_values_at_equal_indices_are_taken_in_turn(how: str) -> None:
    index, value = np.array([3, 0, 3, 3]), np.array([2.0, 5.0, -3.0, 4.0], np.float32)
    expected, combine = np.ones(5, np.float32), COMBINE[how]
    if combine is None:
        expected[index] = value
    else:
        combine.at(expected, index, value)
    x = np.ones(5, np.float32)
    same(getattr(rnp.asarray(x).at[index], how)(value), expected)
    same(rlx.jit(lambda x, i, v: getattr(x.at[i], how)(v))(x, index, value), expected)


def test_a_traced_mask_chooses() -> None:
    row = X[0, 0]
    f = rlx.jit(lambda x: (x.at[x > 0].set(0.0), x.at[x > 0].multiply(3.0)))
    for got, expected in zip(f(X), (np.where(X > 0, 0, X), np.where(X > 0, X * 3, X)), strict=True):
        same(got, expected)
    g = rlx.jit(lambda x, flags, row: x.at[flags].add(row))
    same(g(X, X[:, :, 0] > 0, row), np.where((X[:, :, 0] > 0)[..., None], X + row, X))
    with pytest.raises(rlx.UnsupportedError, match="depends on the elements"):
        rlx.jit(lambda x: x[x > 0])(X)
    with pytest.raises(rlx.UnsupportedError, match="depends on the mask"):
        rlx.jit(lambda x, v: x.at[x > 0].set(v))(X, X)


def test_one_trace_serves_symbolic_bounds() -> None:
    @rlx.jit
    def halves(x: rlx.Array) -> tuple[rlx.Array, rlx.Array]:
        half = x.shape[0] // 2
        return x[:half], x.at[half:].set(0.0)

    for n in (4, 9, 12):
        x = rng.standard_normal((n, 3)).astype(np.float32)
        first, second = halves(x)
        same(first, x[: n // 2])
        same(second, np.concatenate([x[: n // 2], 0 * x[n // 2 :]]))
    assert len(halves.variants()) == 1


def test_get_and_apply() -> None:
    x = rnp.asarray(X)
    same(x.at[1:, 0].get(), X[1:, 0])
    expected = X.copy()
    expected[0] = -expected[0]
    same(x.at[0].apply(rnp.negative), expected)
    with pytest.raises(rlx.InputError, match="no index"):
        x.at.set(1.0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_drawn_indices(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    x = rng.standard_normal(shape).astype(np.float32)
    same(rnp.asarray(x)[index], np.asarray(x[index]))
    same(rlx.jit(lambda x: x[index])(x), np.asarray(x[index]))
    expected = x.copy()
    expected[index] = 7.0
    same(rnp.asarray(x).at[index].set(7.0), expected)


@pytest.mark.parametrize(
    "index", [9, (0, 0, 0, 0), 1.5, "a", (Ellipsis, Ellipsis), (0, 6), np.array([9]), FLAGS[:3]],
    ids=str,
)  # fmt: skip
def test_wrong_indices_are_index_errors(index: Any) -> None:
    x = rnp.asarray(X)
    for call in (lambda: x[index], lambda: x.at[index].set(1.0)):
        with pytest.raises(rlx.IndexingError, match="index") as caught:
            call()
        assert isinstance(caught.value, IndexError)
    if not isinstance(index, np.ndarray):
        with pytest.raises(rlx.RlxError):
            rlx.jit(lambda x: x[index])(X)


def test_values_that_do_not_fit_are_errors() -> None:
    with pytest.raises(rlx.ArrayValueError, match="does not broadcast"):
        rnp.asarray(X).at[0].set(rnp.zeros(3))
    with pytest.raises(rlx.RlxError, match="broadcast"):
        rlx.jit(lambda x: x.at[0].set(rnp.zeros(3)))(X)


def test_take() -> None:
    x = rnp.asarray(X)
    same(rnp.take(x, J, axis=1), np.take(X, J, axis=1))
    order = np.argsort(X, axis=1)
    for f in (rnp.take_along_axis, rlx.jit(lambda x, i, axis: rnp.take_along_axis(x, i, axis=axis),
                                          static="axis")):  # fmt: skip
        same(f(x, order, axis=1), np.take_along_axis(X, order, axis=1))
    same(rlx.jit(lambda x, i: rnp.take(x, i, axis=-1))(X, J), np.take(X, J, axis=-1))
    with pytest.raises(rlx.IndexingError, match="out of bounds"):
        rnp.take(x, rnp.asarray([7]), axis=0)
    with pytest.raises(rlx.ArrayValueError, match="which axis"):
        rnp.take(x, J)


@pytest.mark.parametrize("how", ["multiply", "min", "max"])
def test_repeated_indices_with_derivatives_and_batches(how: str) -> None:
    """One kernel for all indices; its derivative and its batches agree with elements in turn."""
    combine = {"multiply": np.multiply, "min": np.minimum, "max": np.maximum}[how]
    draw = np.random.default_rng(5).standard_normal
    x, u, ids = draw((3, 4, 2)), draw((3, 6, 2)), np.array([1, -1, 0, 1, 1, 2])

    def update(x: rlx.Array, u: rlx.Array) -> rlx.Array:
        return getattr(rnp.asarray(x).at[ids], how)(u)

    found = np.asarray(rlx.jit(rlx.vmap(update))(x, u))
    expected = x.copy()
    for each, values in zip(expected, u, strict=True):
        combine.at(each, ids, values)
    np.testing.assert_array_equal(found, expected)
    assert "scan" not in rlx.jit(update).inspect(x[0], u[0], stage="lir")

    weights = draw((4, 2))
    slope = rlx.jit(rlx.grad(lambda u: rnp.sum(update(x[0], u) * weights)))
    step = 1e-6
    for at in np.ndindex(6, 2):
        pair = []
        for sign in (1, -1):
            moved, made = u[0].copy(), x[0].copy()
            moved[at] += sign * step
            combine.at(made, ids, moved)
            pair.append(np.sum(made * weights))
        # f64 sums near 1 are off by 1e-16, so their difference over 2e-6 by some 1e-10
        central = (pair[0] - pair[1]) / (2 * step)
        np.testing.assert_allclose(np.asarray(slope(u[0]))[at], central, atol=1e-8)
