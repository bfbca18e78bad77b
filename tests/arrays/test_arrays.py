"""`rlx.numpy` beside NumPy, over drawn shapes, broadcasting, strides and element types."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(0)
SIZES = st.sampled_from([0, 1, 2, 3, 5, 16])
UNARY = ["exp", "expm1", "sin", "cos", "tanh", "sinh", "asinh", "atan", "square", "negative"]
UNARY += ["abs", "floor", "ceil", "round"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum", "hypot", "copysign"]
COMPARE = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]


def draw(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


def close(got: rlx.Array, expected: np.ndarray) -> None:
    # kernels are within 5 ulp of the exact result and sums within 32 of the largest
    # (docs/ops.md), NumPy's own within a few: 1e-5 is 84 ulp of f32
    assert tuple(got.shape) == expected.shape
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(shape=st.lists(SIZES, max_size=3))
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array(name: str, shape: list[int]) -> None:
    x = draw(tuple(shape))
    theirs = {"atan": "arctan", "asinh": "arcsinh"}.get(name, name)
    close(getattr(rnp, name)(rnp.asarray(x)), np.asarray(getattr(np, theirs)(x)))


@settings(max_examples=10, deadline=None)
@given(shape=st.lists(SIZES, max_size=3), flags=st.lists(st.booleans(), min_size=3, max_size=3))
@pytest.mark.parametrize("name", BINARY + COMPARE)
def test_functions_of_two_arrays_broadcast(name: str, shape: list[int], flags: list[bool]) -> None:
    other = [1 if flag else n for n, flag in zip(shape, flags, strict=False)]
    a, b = draw(tuple(shape)), draw(tuple(other))
    got = getattr(rnp, name)(rnp.asarray(a), rnp.asarray(b))
    close(got, np.asarray(getattr(np, name)(a, b)))


@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.sampled_from([1, 2, 3, 7]), min_size=1, max_size=3), data=st.data())
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var", "std"])
def test_reductions(name: str, shape: list[int], data: st.DataObject) -> None:
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    keepdims = data.draw(st.booleans())
    x = draw(tuple(shape))
    got = getattr(rnp, name)(rnp.asarray(x), axis=axis, keepdims=keepdims)
    close(got, np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims)))


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64", "float64"])
def test_element_types(dtype: str) -> None:
    a, b = draw((3, 4), dtype), draw((3, 4), dtype) + 1
    x, y = rnp.asarray(a), rnp.asarray(b)
    with np.errstate(over="ignore"):
        for got, expected in ((x + y, a + b), (x * y, a * b), (x // y, a // b), (x % y, a % b)):
            assert np.array_equal(np.asarray(got), expected)
            assert np.asarray(got).dtype == a.dtype
    assert np.asarray(rnp.sum(x)).dtype == np.sum(a).dtype


def test_views_and_strides() -> None:
    a = draw((4, 6))
    x = rnp.asarray(a)
    assert np.shares_memory(np.asarray(x.mT), a)
    close(x.mT + 1, a.T + 1)
    close(x[::2, 1:] * x[1::2, :-1], a[::2, 1:] * a[1::2, :-1])
    close(rnp.exp(x[:, ::-1]), np.exp(a[:, ::-1]))


def test_numbers_take_the_type_of_arrays() -> None:
    assert (rnp.asarray(draw((2,), "int32")) + 1).dtype is rnp.int32
    assert (rnp.asarray(draw((2,), "float16")) * 2.5).dtype is rnp.float16
    assert (rnp.asarray(draw((2,), "int32")) * 2.5).dtype is rnp.float32
    assert (1 - rnp.asarray(draw((2,)))).dtype is rnp.float32
    assert rnp.asarray([1.0, 2.0]).dtype is rnp.float32
    with pytest.raises(rlx.InputError, match="out of range"):
        rnp.asarray(draw((2,), "int8")) + 300


def test_products() -> None:
    a, b, c = draw((3, 4, 5)), draw((3, 5, 2)), draw((4, 2))
    close(rnp.matmul(rnp.asarray(a), rnp.asarray(b)), a @ b)
    close(rnp.einsum("bij,bjk->bik", a, b), np.einsum("bij,bjk->bik", a, b))
    close(rnp.einsum("bij,bjk,ik->b", a, b, c), np.einsum("bij,bjk,ik->b", a, b, c))
    close(rnp.tensordot(a, b, axes=((2,), (1,))), np.tensordot(a, b, axes=((2,), (1,))))
    close(rnp.vecdot(a, a), np.sum(a * a, -1))
    with pytest.raises(rlx.InputError, match="subscripts"):
        rnp.einsum("ij,jk->ik", a, b)


def test_layout_and_indexing() -> None:
    a = draw((3, 4))
    x = rnp.asarray(a)
    close(rnp.concat([x, x], axis=1), np.concatenate([a, a], 1))
    close(rnp.stack([x, x], axis=-1), np.stack([a, a], -1))
    close(x[x > 0], a[a > 0])
    close(x[[2, 0]][:, None], a[[2, 0]][:, None])
    close(rnp.tril(x, k=-1), np.tril(a, -1))
    close(rnp.cumulative_sum(x, axis=0), np.cumsum(a, 0))
    close(rnp.sort(x, axis=0, descending=True), -np.sort(-a, 0))
    close(rnp.moveaxis(rnp.asarray(draw((2, 3, 4))), 0, -1)[..., 0] * 0, np.zeros((3, 4)))
    close(x.at[1].set(0.0), np.where(np.arange(3)[:, None] == 1, 0, a))
    close(rnp.zeros(3).at[rnp.asarray([0, 0, 2])].add(1.0), np.array([2.0, 0, 1]))
    with pytest.raises(rlx.InputError, match="does not change"):
        x[0] = 1.0
    with pytest.raises(IndexError, match="index"):
        x[7]


def test_arrays_go_in_and_out_through_dlpack_without_a_copy() -> None:
    a = draw((5,))
    x = rnp.from_dlpack(a)
    assert np.shares_memory(np.from_dlpack(x), a)
    assert x.__array_namespace__() is rnp


def test_errors_are_typed() -> None:
    with pytest.raises(rlx.InputError, match="no elements"):
        rnp.max(rnp.zeros((0, 3)))
    with pytest.raises(rlx.RlxError):
        rnp.add(rnp.zeros(3), rnp.zeros(4))
    with pytest.raises(rlx.InputError, match="do not fit"):
        rnp.reshape(rnp.zeros(6), (4, 2))
