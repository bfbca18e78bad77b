"""Functions of `rlx.numpy` beside NumPy, each at once and inside `rlx.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rlx
import rlx.numpy as rnp

rng = np.random.default_rng(0)
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "float16", "float32",
          "float64", "complex64", "complex128"]  # fmt: skip
A = rng.standard_normal((3, 4, 5)).astype(np.float32)
V = rng.standard_normal(6).astype(np.float32)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


def draw(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return (rng.standard_normal(shape) * 3).astype(dtype)


def same(got: Any, expected: np.ndarray) -> None:
    """Equal bits: nothing is computed, or with integers."""
    assert got.shape == expected.shape and np.asarray(got).dtype == expected.dtype
    assert np.array_equal(np.asarray(got), expected, equal_nan=expected.dtype.kind in "fc")


def both(f: Callable[..., Any], *arrays: np.ndarray) -> list[Any]:
    """`f` applied at once, and jitted."""
    return [f(*[rnp.asarray(a) for a in arrays]), rlx.jit(f)(*arrays)]


LAYOUT: list[tuple[Callable[[Any, Any], Any], np.ndarray]] = [
    (lambda xp, x: xp.reshape(x, (5, -1)), A),
    (lambda xp, x: xp.permute_dims(x, (2, 0, 1)), A),
    (lambda xp, x: xp.matrix_transpose(x), A),
    (lambda xp, x: xp.moveaxis(x, (0, -1), (1, 0)), A),
    (lambda xp, x: xp.expand_dims(x, axis=(0, -1)), A),
    (lambda xp, x: xp.squeeze(xp.expand_dims(x, axis=1), axis=1), A),
    (lambda xp, x: xp.broadcast_to(x, (2, 3, 4, 5)), A),
    (lambda xp, x: xp.broadcast_arrays(x, x[:1, :, :1])[1], A),
    (lambda xp, x: xp.concat([x, x[:, :1]], axis=1), A),
    (lambda xp, x: xp.concat([x, x], axis=None), A),
    (lambda xp, x: xp.stack([x, x + x], axis=-2), A),
    (lambda xp, x: xp.unstack(x, axis=1)[2], A),
    (lambda xp, x: xp.flip(x), A),
    (lambda xp, x: xp.flip(x, axis=(0, -1)), A),
    (lambda xp, x: xp.roll(x, 7), A),
    (lambda xp, x: xp.roll(x, (-2, 9), axis=(0, 2)), A),
    (lambda xp, x: xp.roll(x, 1, axis=-1), A),
    (lambda xp, x: xp.tile(x, (2, 1, 3)), A),
    (lambda xp, x: xp.tile(x, (2, 1, 1, 3)), A),
    (lambda xp, x: xp.tile(x, (2,)), A),
    (lambda xp, x: xp.repeat(x, 3), A),
    (lambda xp, x: xp.repeat(x, 2, axis=1), A),
    (lambda xp, x: xp.repeat(x, xp.asarray([2, 0, 3]), axis=0), A),
    (lambda xp, x: xp.tril(x, k=1), A),
    (lambda xp, x: xp.triu(x, k=-1), A),
    (lambda xp, x: xp.diff(x, axis=1), A),
    (lambda xp, x: xp.diff(x, n=2, axis=0, prepend=x[:1], append=x[:2]), A),
    (lambda xp, x: xp.meshgrid(x, x[:2])[0], V),
    (lambda xp, x: xp.meshgrid(x, x[:2], indexing="ij")[1], V),
    (lambda xp, x: xp.zeros_like(x), A),
    (lambda xp, x: xp.full_like(x, 2.5), A),
    (lambda xp, x: xp.where(x > 0, x, -x), A),
    (lambda xp, x: xp.clip(x, -0.5, x[0]), A),
    (lambda xp, x: xp.count_nonzero(x > 0, axis=1), A),
    (lambda xp, x: xp.argmax(x, axis=1, keepdims=True), A),
    (lambda xp, x: xp.argmin(x), A),
    (lambda xp, x: xp.all(x > -1, axis=(0, 2)), A),
    (lambda xp, x: xp.any(x > 2), A),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(LAYOUT)))
def test_functions_that_only_move_elements(number: int) -> None:
    function, x = LAYOUT[number]
    expected = np.asarray(function(np, x))
    for got in both(lambda x: function(rnp, x), x):
        same(got, expected)


@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), data=st.data())
def test_layout_of_drawn_shapes_and_types(
    shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    x = draw(shape, dtype)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    shift = data.draw(st.integers(-7, 7))
    x = x[::-1] if data.draw(st.booleans()) else np.moveaxis(x, 0, -1)
    for f, g in (
        (lambda x: rnp.roll(x, shift, axis=axis), lambda x: np.roll(x, shift, axis=axis)),
        (lambda x: rnp.flip(x, axis=axis), lambda x: np.flip(x, axis=axis)),
        (lambda x: rnp.repeat(x, 2, axis=axis), lambda x: np.repeat(x, 2, axis=axis)),
        (lambda x: rnp.stack([x, x], axis=axis), lambda x: np.stack([x, x], axis=axis)),
    ):
        for got in both(f, x):
            same(got, g(x))


@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(["bool", "int8", "int32", "uint8"]), data=st.data())
def test_integer_reductions_are_exact(
    shape: tuple[int, ...], dtype: str, data: st.DataObject
) -> None:
    x = draw(shape, dtype)
    axis = data.draw(st.none() | st.integers(0, len(shape) - 1))
    keep = data.draw(st.booleans())
    for name in ("sum", "prod", "all", "any"):
        expected = np.asarray(getattr(np, name)(x, axis=axis, keepdims=keep))
        for got in both(lambda x, n=name: getattr(rnp, n)(x, axis=axis, keepdims=keep), x):
            same(got, expected)
    flat = x.reshape(-1)
    for got in both(lambda x: rnp.cumulative_sum(x, include_initial=True), flat):
        same(got, np.concatenate([[0], np.cumsum(flat)]).astype(np.cumsum(flat).dtype))


def test_sums_in_another_type() -> None:
    x = np.full(1000, 0.1, np.float16)
    for got in both(lambda x: rnp.sum(x, dtype=rnp.float64), x):
        assert np.asarray(got) == np.sum(x, dtype=np.float64)
    for got in both(lambda x: rnp.sum(x, dtype="int64"), np.ones(5, np.int8)):
        same(got, np.asarray(5))


EINSUMS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)), ("ii", (4, 4)), ("ii->i", (4, 4)),
    ("iij->j", (4, 4, 3)), ("...ij,...jk->...ik", (2, 3, 4), (4, 5)), ("i...->...", (3, 4, 5)),
    ("ij,kj,lk->il", (2, 3), (4, 3), (5, 4)), ("ij->ji", (2, 3)), ("i,j", (2,), (3,)),
    ("ij,ij->", (2, 3), (2, 3)), ("...,...", (2, 1), (3,)), ("ijk,k->ij", (2, 1, 3), (3,)),
    ("iji,j->i", (3, 2, 3), (2,)), ("ij,jk->", (2, 3), (3, 4)), ("a b , b -> a", (2, 3), (3,)),
]  # fmt: skip


@pytest.mark.parametrize("case", EINSUMS, ids=str)
def test_einsum(case: tuple[Any, ...]) -> None:
    subscripts, *shapes = case
    arrays = [draw(shape, "float64") for shape in shapes]
    expected = np.asarray(np.einsum(subscripts, *arrays))
    for got in both(lambda *xs: rnp.einsum(subscripts, *xs), *arrays):
        # sums of at most 20 products in f64
        np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12, atol=1e-12)
        assert got.shape == expected.shape


def test_products() -> None:
    a, b = draw((3, 4, 5), "float64"), draw((4, 5, 2), "float64")
    for axes in (0, 1, 2, ((1, 2), (0, 1)), ((-1,), (1,))):
        x = a if axes != 1 else a[..., :4]
        expected = np.tensordot(x, b, axes=axes)
        for got in both(lambda x, y, n=axes: rnp.tensordot(x, y, axes=n), x, b):
            np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12, atol=1e-12)
    d = draw((4, 1), "float64")
    for got in both(lambda x, y: rnp.vecdot(x, y, axis=-2), a, d):
        np.testing.assert_allclose(np.asarray(got), (a * d).sum(-2), rtol=1e-12, atol=1e-12)
    c = draw((4,), "complex64")
    np.testing.assert_allclose(np.asarray(rnp.vecdot(c, c)), np.vdot(c, c), rtol=1e-6)


def test_sizes_stay_symbolic_where_arrays_are_made() -> None:
    @rlx.jit
    def f(x: rlx.Array) -> tuple[rlx.Array, ...]:
        n = x.shape[0]
        return (
            rnp.zeros((n, 2)), rnp.arange(n), rnp.arange(1, n + 1, 2), rnp.arange(n, 0, -1),
            rnp.eye(n, k=1), rnp.full(n, 3), rnp.tile(x, (2,)), rnp.linspace(0.0, 1.0, n),
            rnp.arange(n, dtype=rnp.float32) / n, rnp.asarray([n, n + 1]), rnp.roll(x, n - 1),
        )  # fmt: skip

    for n in (4, 7, 10):
        x = draw((n,), "float32")
        expected = (
            np.zeros((n, 2), np.float32), np.arange(n), np.arange(1, n + 1, 2), np.arange(n, 0, -1),
            np.eye(n, k=1, dtype=np.float32), np.full(n, 3), np.tile(x, 2),
            np.linspace(0, 1, n, dtype=np.float32), np.arange(n, dtype=np.float32) / np.float32(n),
            np.array([n, n + 1]), np.roll(x, n - 1),
        )  # fmt: skip
        for got, wanted in zip(f(x), expected, strict=True):
            assert np.asarray(got).dtype == wanted.dtype
            # linspace multiplies by a rounded step: 2 roundings
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=3e-7)
    assert len(f.variants()) == 1


FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


@pytest.mark.parametrize("dtype", FLOATS)
def test_nextafter_is_exact(dtype: str) -> None:
    info = np.finfo(dtype)
    tiny, least = info.tiny, info.smallest_subnormal
    special = [0.0, -0.0, 1.0, -1.0, info.max, info.min, tiny, -tiny, least, -least]
    special += [np.inf, -np.inf, np.nan, 0.1, 2.0, 65504.0]
    with np.errstate(all="ignore"):
        spread = np.ldexp(rng.uniform(1, 2, 300), rng.integers(info.minexp - 12, info.maxexp, 300))
        x = np.concatenate([special, spread, -spread]).astype(dtype)
        for y in (np.inf, -np.inf, 0.0, np.nan):
            towards = np.full_like(x, y)
            expected = np.nextafter(x, towards)
            for got in both(rnp.nextafter, x, towards):
                same(got, expected)
                signs = np.signbit(np.asarray(got)) == np.signbit(expected)
                assert np.all(signs | (x == towards) | np.isnan(expected))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "float32"])
def test_clip(dtype: str) -> None:
    x = draw((4, 5), dtype)
    low, high = np.asarray(-1 if dtype != "uint8" else 1, dtype), draw((5,), dtype)
    for got in both(lambda x, a, b: rnp.clip(x, a, b), x, low, high):
        same(got, np.clip(x, low, high))
    if dtype.endswith("int8"):  # a number beyond the type is no bound
        same(rnp.clip(rnp.asarray(x), -1000, 1000), x)


def test_types_of_functions() -> None:
    assert rnp.result_type(rnp.int8, rnp.uint8) is rnp.int16
    assert rnp.result_type(rnp.float32, 1j) is rnp.complex64
    assert rnp.result_type(rnp.zeros(2, dtype=rnp.int32), 2.0) is rnp.float32
    assert rnp.result_type(1, 2.0) is rnp.float32
    assert rnp.can_cast(rnp.int8, rnp.int16) and not rnp.can_cast(rnp.int16, rnp.int8)
    assert rnp.isdtype(rnp.bfloat16, "real floating") and rnp.isdtype("int8", ("bool", "integral"))
    assert not rnp.isdtype(rnp.bool, "numeric") and rnp.isdtype(rnp.int8, rnp.int8)
    assert rnp.finfo(rnp.bfloat16).eps == 2**-7 and rnp.finfo(rnp.complex64).dtype is rnp.float32
    assert rnp.iinfo("uint16").max == 65535 and rnp.finfo(rnp.zeros(1)).bits == 32
    with pytest.raises(rlx.ArrayValueError, match="no such kind"):
        rnp.isdtype(rnp.int8, "integer")
    info = rnp.__array_namespace_info__()
    assert info.dtypes(kind="bool") == {"bool": rnp.bool} and info.devices() == ("cpu",)
    assert info.default_dtypes()["real floating"] is rnp.float32


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: rnp.reshape(rnp.zeros(6), (4, 2)), ValueError, "do not fit"),
    (lambda: rnp.squeeze(rnp.zeros((2, 1)), axis=0), ValueError, "another size than 1"),
    (lambda: rnp.expand_dims(rnp.zeros(2), axis=5), IndexError, "no such axis"),
    (lambda: rnp.concat([rnp.zeros((2, 3)), rnp.zeros((2, 4))]), ValueError, "do not join"),
    (lambda: rnp.concat([]), ValueError, "no arrays"),
    (lambda: rnp.stack([rnp.zeros(2), rnp.zeros((2, 2))]), ValueError, "shapes differ"),
    (lambda: rnp.permute_dims(rnp.zeros((2, 2)), (0, 0)), ValueError, "axis twice"),
    (lambda: rnp.broadcast_to(rnp.zeros(3), (4,)), ValueError, "does not broadcast"),
    (lambda: rnp.broadcast_shapes((2,), (3,)), ValueError, "do not broadcast"),
    (lambda: rnp.roll(rnp.zeros((2, 2)), (1, 1)), ValueError, "which axes"),
    (lambda: rnp.repeat(rnp.zeros(3), [1, 2]), ValueError, "not a count"),
    (lambda: rnp.tril(rnp.zeros(3)), ValueError, "not matrices"),
    (lambda: rnp.sum(rnp.zeros(3), axis=1), IndexError, "no such axis"),
    (lambda: rnp.max(rnp.zeros((0, 3)), axis=0), ValueError, "no elements"),
    (lambda: rnp.max(rnp.zeros(3, dtype=rnp.complex64)), TypeError, "no order"),
    (lambda: rnp.cumulative_sum(rnp.zeros((2, 2))), ValueError, "which axis"),
    (lambda: rnp.matmul(rnp.zeros((2, 3)), rnp.zeros((2, 3))), ValueError, "sizes differ"),
    (lambda: rnp.matmul(rnp.zeros(()), rnp.zeros(3)), ValueError, "at least one axis"),
    (lambda: rnp.tensordot(rnp.zeros(3), rnp.zeros(3), axes=2), ValueError, "not as many axes"),
    (lambda: rnp.einsum("ij,jk", rnp.zeros((2, 3)), rnp.zeros((4, 5))), ValueError, "two sizes"),
    (lambda: rnp.einsum("ij->k", rnp.zeros((2, 3))), ValueError, "subscripts"),
    (lambda: rnp.where(rnp.zeros(3), 1.0, 2.0), TypeError, "not a condition"),
    (lambda: rnp.imag(rnp.zeros(3)), TypeError, "imaginary part"),
    (lambda: rnp.astype(rnp.zeros(2, dtype=rnp.complex64), rnp.float32), TypeError, "complex"),
    (lambda: rnp.zeros(3, dtype="quaternion"), TypeError, "unknown element type"),
    (lambda: rnp.zeros(-1), ValueError, "negative size"),
    (lambda: rnp.arange(3, dtype=rnp.int8, device="mars"), ValueError, "no such device"),
    (lambda: rnp.arange(0, 5, 0), ValueError, "step of 0"),
    (lambda: rnp.arange(300, dtype=rnp.int8), ValueError, "out of range"),
    (lambda: rnp.asarray([1, 300], dtype=rnp.int8), ValueError, "not numbers of"),
    (lambda: rnp.asarray([[1, 2], [3]]), ValueError, "not an array of numbers"),
    (lambda: rnp.asarray("text"), TypeError, "not an array"),
    (lambda: rnp.asarray([1.0], copy=False), ValueError, "are copied"),
    (lambda: rnp.asarray(rnp.zeros(2, dtype=rnp.int8) + 300), ValueError, "out of range"),
    (lambda: rnp.meshgrid(rnp.zeros(2), indexing="yx"), ValueError, "order of axes"),
    (lambda: rnp.nextafter(rnp.zeros(2), rnp.zeros(2, dtype=rnp.float64)), TypeError, "one type"),
    (lambda: rnp.from_dlpack([1.0]), TypeError, "not an array with DLPack"),
    (lambda: rnp.linspace(0, 1, -1), ValueError, "negative count"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_errors_are_typed_and_of_the_standards_kinds(number: int) -> None:
    call, kind, text = WRONG[number]
    with pytest.raises(rlx.RlxError, match=text) as caught:
        call()
    assert isinstance(caught.value, kind)


def test_what_depends_on_elements_is_an_error_in_a_trace() -> None:
    with pytest.raises(rlx.UnsupportedError, match="depends on the elements") as caught:
        rlx.jit(lambda x, n: rnp.repeat(x, n))(A[0, 0], np.ones(5, np.int64))
    assert "take" in caught.value.hint
