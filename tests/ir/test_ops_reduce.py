"""Reductions, softmax, cumulative sums and top-k against loops over exact Python numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_support import array, cost_of, run, same, shape, shape_of

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dtype import FLOATS
from rlx.ir.op import make_op

INF, NAN = math.inf, math.nan
SUMS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": math.fsum,
    "prod": math.prod,
    "mean": lambda v: math.fsum(v) / len(v),
    "max": max,
    "min": min,
    "any": lambda v: any(v),
    "all": lambda v: all(v),
}


def folded(x: Any, axes: Sequence[int], function: Callable[[Sequence[float]], float]) -> Any:
    """`function` of the elements along `axes`, written with loops; the axes stay as size 1."""
    wide = x.astype(np.float64)
    kept = [1 if i in axes else n for i, n in enumerate(x.shape)]
    out = np.empty(kept)
    for at in itertools.product(*map(range, kept)):
        cut = tuple(slice(None) if i in axes else n for i, n in enumerate(at))
        out[at] = function(wide[cut].ravel().tolist())
    return out


@pytest.mark.parametrize("axes", [None, (0,), (1,), (-1,), (0, 2), (-1, 0), (2, 1, 0), ()])
@pytest.mark.parametrize("name", SUMS)
def test_reductions_over_any_axes(name: str, axes: tuple[int, ...] | None) -> None:
    x = np.random.default_rng(1).integers(-3, 4, (2, 3, 4)).astype(np.float32)
    normal = tuple(range(3)) if axes is None else tuple(a % 3 for a in axes)
    expected = folded(x, normal, SUMS[name])
    # sums, products and extremes of small whole numbers are exact; a mean rounds once to f32
    kept = run(name, x, axis=axes, keepdims=True)
    np.testing.assert_array_equal(kept, expected.astype(kept.dtype))
    dropped = run(name, x, axis=axes)
    np.testing.assert_array_equal(dropped, kept.reshape(dropped.shape))
    assert dropped.ndim == 3 - len(normal)


@pytest.mark.parametrize("element", [t.name for t in FLOATS])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod"])
def test_floats_round_once(name: str, element: str) -> None:
    x = array(np.random.default_rng(2).uniform(0.5, 1.5, (3, 40)), element)
    expected = array(folded(x, (1,), SUMS[name]), element)
    # f64 accumulation is off by at most 40 · 1.1e-16, so only a tie of rounding could differ
    rtol = 1e-14 if element == "f64" else 0
    np.testing.assert_allclose(
        run(name, x, axis=[1], keepdims=True).astype(np.float64),
        expected.astype(np.float64),
        rtol=rtol,
    )


def test_half_sums_do_not_stall() -> None:
    # 4096 ones summed in f16 would stop at 2048, and the square sum would overflow on the way
    assert float(run("sum", np.ones(4096, np.float16))) == 4096
    assert float(run("mean", np.full(4096, 100, np.float16))) == 100
    assert float(run("sum", array([6e4, 6e4, -6e4], "f16"))) == float(np.float16(6e4))


def test_integers_wrap_in_their_own_type() -> None:
    x = np.int8([100, 100, 3])
    assert run("sum", x).tolist() == 203 - 256
    assert run("prod", np.uint8([16, 17])).tolist() == 16
    assert run("cumsum", x).tolist() == [100, 200 - 256, 203 - 256]
    assert run("mean", x).tolist() == float(np.float32(203 / 3))
    assert run("max", np.int64([-(2**63), 5])).tolist() == 5
    assert run("min", np.uint64([2**64 - 1, 2**63])).tolist() == 2**63


def test_bools_are_counted() -> None:
    x = np.array([[True, True, False], [False, False, False]])
    assert run("sum", x, axis=1).tolist() == [2, 0]
    assert run("prod", x, axis=1).tolist() == [0, 0]
    assert run("cumsum", x).tolist() == [[1, 2, 2], [0, 0, 0]]
    same(run("mean", x, axis=[0]), [0.5, 0.5, 0])
    assert run("any", x, axis=1).tolist() == [True, False]
    assert run("all", x, axis=1).tolist() == [False, False]
    assert shape_of("sum", "[n, 4] bool", axis=0) == "[4] i32"


def test_nan_and_infinity() -> None:
    x = array([[1, NAN, 3], [-INF, 2, INF]])
    for name in ("max", "min"):
        assert math.isnan(run(name, x, axis=1)[0])
    assert run("max", x, axis=1)[1] == INF and run("min", x, axis=1)[1] == -INF
    assert all(math.isnan(v) for v in run("sum", x, axis=1))
    assert run("argmax", x).tolist() == [1, 2] and run("argmin", x).tolist() == [1, 0]
    assert run("any", array([NAN])).tolist() is True


def test_complex_sums() -> None:
    z = np.array([1 + 2j, 3 - 1j], np.complex64)
    assert run("sum", z).tolist() == 4 + 1j
    assert run("mean", z).tolist() == 2 + 0.5j
    assert run("prod", z).tolist() == 5 + 5j
    assert run("cumsum", z).tolist() == [1 + 2j, 4 + 1j]


def test_empty_axes() -> None:
    x = np.zeros((2, 0), np.float32)
    same(run("sum", x, axis=1), [0, 0])
    same(run("prod", x, axis=1), [1, 1])
    same(run("mean", x, axis=1), [NAN, NAN])
    assert run("any", x, axis=1).tolist() == [False, False]
    assert run("all", x, axis=1).tolist() == [True, True]
    assert run("max", x, axis=0).shape == (0,)
    for name in ("max", "min"):
        with pytest.raises(ShapeError, match="empty axis"):
            shape_of(name, "[2, 0]", axis=1)
        with pytest.raises(ShapeError, match="empty axis"):
            make_op(name, {}).reference(x)  # a size that was symbolic when the op was built
    for name in ("argmax", "argmin"):
        with pytest.raises(ShapeError, match="empty axis"):
            shape_of(name, "[2, 0]")
        with pytest.raises(ShapeError, match="empty axis"):
            make_op(name, {}).reference(x)
    assert (
        run("softmax", x).shape == run("log_softmax", x).shape == run("cumsum", x).shape == (2, 0)
    )
    assert run("argmax", x, axis=0).shape == (0,)


def test_positions_take_the_first_of_equal_ones() -> None:
    x = np.int32([[3, 7, 7], [7, 3, 3]])
    assert run("argmax", x).tolist() == [1, 0]
    assert run("argmin", x).tolist() == [0, 1]
    assert run("argmax", x, axis=0, keepdims=True).tolist() == [[1, 0, 0]]
    assert run("argmax", np.array([False, True, True])).tolist() == 1
    assert run("argmax", array([1, 1.001], "f16")).tolist() == 1
    assert shape_of("argmax", "[batch, seq, 9] bf16") == "[batch, seq] i32"


# -- softmax and cumsum -----------------------------------------------------------------------


@pytest.mark.parametrize("element", [t.name for t in FLOATS])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_of_any_axis(axis: int, element: str) -> None:
    x = array(np.random.default_rng(3).uniform(-8, 8, (3, 4, 5)), element)
    wide = x.astype(np.float64)
    total = np.exp(wide).sum(axis, keepdims=True)
    # The sums of f64 are off by an ulp or two, x − log(total) by an ulp of |x| < 8: below f64 that
    # can only turn one rounding.
    tolerance = {"rtol": 8 * float(ml_dtypes.finfo(x.dtype).eps), "atol": 4e-15}
    if element != "f64":
        tolerance["rtol"] /= 8
    expected = array(np.exp(wide) / total, element).astype(np.float64)
    found = run("softmax", x, axis=axis).astype(np.float64)
    np.testing.assert_allclose(found, expected, **tolerance)
    expected = array(wide - np.log(total), element).astype(np.float64)
    found = run("log_softmax", x, axis=axis).astype(np.float64)
    np.testing.assert_allclose(found, expected, **tolerance)


def test_softmax_edges() -> None:
    same(run("softmax", array([1e4, 1e4])), [0.5, 0.5])
    same(run("softmax", array([[-INF, 0, -INF], [-INF, -INF, -INF]])), [[0, 1, 0], [NAN] * 3])
    same(run("log_softmax", array([-INF, 0])), [-INF, 0])
    same(run("softmax", array([[5.0]])), [[1]])
    # logits far apart keep their difference in the logarithm
    same(run("log_softmax", array([0, -200])), [0, -200])
    found = run("softmax", np.int32([0, 1]))
    np.testing.assert_allclose(found, [1 / (1 + math.e), math.e / (1 + math.e)], rtol=1e-7)


def test_cumsum() -> None:
    x = array([[1, 2, 3], [10, 20, 30]])
    same(run("cumsum", x), [[1, 3, 6], [10, 30, 60]])
    same(run("cumsum", x, axis=0), [[1, 2, 3], [11, 22, 33]])
    same(run("cumsum", x, exclusive=True), [[0, 1, 3], [0, 10, 30]])
    same(run("cumsum", x, reverse=True), [[6, 5, 3], [60, 50, 30]])
    same(run("cumsum", x, exclusive=True, reverse=True), [[5, 3, 0], [50, 30, 0]])
    same(run("cumsum", array([1, INF, 2]), exclusive=True), [0, 1, INF])
    same(run("cumsum", np.zeros((0,), np.float32), exclusive=True), [])
    assert run("cumsum", np.ones(4096, np.float16))[-1] == 4096
    assert shape_of("cumsum", "[batch, n] i8", axis=0) == "[batch, n] i8"


# -- top_k ------------------------------------------------------------------------------------


def by_rank(row: list[float], k: int, largest: bool) -> list[int]:
    """NaN first, then by value, then by index."""
    sign = -1 if largest else 1
    return sorted(range(len(row)), key=lambda i: (row[i] == row[i], sign * row[i], i))[:k]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("element", ["f32", "f16", "f8e4m3", "i8", "u8", "i64", "u64"])
def test_top_k_in_order_with_ties(element: str, largest: bool) -> None:
    x = array(np.random.default_rng(4).integers(0, 6, (4, 11)), element)
    values, indices = run("top_k", x, k=7, largest=largest)
    for row, value, index in zip(x, values, indices, strict=True):
        expected = by_rank([float(v) for v in row], 7, largest)
        assert index.tolist() == expected
        same(value, [float(row[i]) for i in expected])


def test_top_k_edges() -> None:
    x = array([0, NAN, INF, -INF, NAN, 0.0])
    assert run("top_k", x, k=6)[1].tolist() == [1, 4, 2, 0, 5, 3]
    assert run("top_k", x, k=6, largest=False)[1].tolist() == [1, 4, 3, 0, 5, 2]
    least = np.int64([-(2**63), 2**63 - 1, 0])
    assert run("top_k", least, k=2)[0].tolist() == [2**63 - 1, 0]
    assert run("top_k", least, k=2, largest=False)[0].tolist() == [-(2**63), 0]
    columns = run("top_k", array([[1, 5], [4, 2], [3, 9]]), k=2, axis=0)
    same(columns[0], [[4, 9], [3, 5]])
    assert columns[1].tolist() == [[1, 2], [2, 0]]
    assert run("top_k", np.zeros((0, 3), np.float32), k=3)[1].shape == (0, 3)
    assert shape_of("top_k", "[batch, n] f16", k=4) == ["[batch, 4] f16", "[batch, 4] i32"]


def test_top_k_errors() -> None:
    with pytest.raises(AttributeValueError, match="at least 1"):
        shape_of("top_k", "[4]", k=0)
    with pytest.raises(ShapeError, match="fewer elements"):
        shape_of("top_k", "[2, 4]", k=5)
    with pytest.raises(ShapeError, match="fewer elements"):
        make_op("top_k", {"k": 5}).reference(np.zeros(4, np.float32))
    with pytest.raises(ShapeError, match="axis out of range"):
        shape_of("top_k", "[]", k=1)


# -- shapes and errors ------------------------------------------------------------------------


def test_symbolic_reductions() -> None:
    assert shape_of("sum", "[batch, seq, 64] f16", axis=-1) == "[batch, seq] f16"
    assert shape_of("mean", "[batch, seq] i32", axis=[0], keepdims=True) == "[1, seq] f32"
    assert shape_of("max", "[batch, seq]") == "[] f32"
    assert shape_of("all", "[n] f32", axis=[]) == "[n] bool"
    assert shape_of("softmax", "[n, m] i8", axis=0) == "[n, m] f32"


@pytest.mark.parametrize("name", ["sum", "max", "any"])
def test_axes_out_of_range_or_twice(name: str) -> None:
    for axes in ((2,), (-3,), (0, 5)):
        with pytest.raises(ShapeError, match="out of range"):
            shape_of(name, "[n, 3]", axis=axes)
    with pytest.raises(ShapeError, match="twice"):
        shape_of(name, "[n, 3]", axis=(1, -1))
    with pytest.raises(AttributeValueError, match="not an int"):
        shape_of(name, "[n, 3]", axis=(1.0,))


@pytest.mark.parametrize("name", ["argmax", "argmin", "softmax", "log_softmax", "cumsum"])
def test_axis_out_of_range(name: str) -> None:
    for text, axis in (("[n, 3]", 2), ("[n, 3]", -3), ("[]", -1)):
        with pytest.raises(ShapeError, match="out of range"):
            shape_of(name, text, axis=axis)


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("max", "bool"),
        ("min", "c64"),
        ("argmax", "c64"),
        ("softmax", "c64"),
        ("log_softmax", "c64"),
    ],
)
def test_element_types_not_taken(name: str, element: str) -> None:
    with pytest.raises(DTypeError):
        shape_of(name, f"[3] {element}")
    with pytest.raises(DTypeError):
        shape_of("top_k", "[3] c64", k=1)


def test_cost_counts_what_is_read() -> None:
    n = shape("[n]").dims[0]
    assert cost_of("sum", "[n, 8] f16", axis=1) == (n * 8, n * 16 + n * 2)
    assert cost_of("argmax", "[2, 8]") == (16, 64 + 8)
    assert cost_of("top_k", "[2, 8]", k=2).flops == 16
    assert cost_of("softmax", "[2, 8]").flops > 16
