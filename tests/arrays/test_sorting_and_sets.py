"""Sorting, searching and sets against NumPy, at once and inside rlx.jit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
import rlx.numpy as rnp

small = st.lists(st.integers(-3, 3), max_size=12)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint64, np.float64, np.bool_])
def test_sort(dtype: type) -> None:
    x = np.random.default_rng(0).integers(0, 9, (4, 30, 2)).astype(dtype)
    for axis in (0, 1, -1):
        for function in (
            rnp.sort,
            rlx.jit(lambda x, axis: rnp.sort(x, axis=axis), static=["axis"]),
        ):
            np.testing.assert_array_equal(np.asarray(function(x, axis=axis)), np.sort(x, axis))
        order = np.asarray(rnp.argsort(x, axis=axis))
        np.testing.assert_array_equal(order, np.argsort(x, axis, stable=True))
        down = np.asarray(rnp.sort(x, axis=axis, descending=True))
        np.testing.assert_array_equal(down, np.flip(np.sort(x, axis), axis))


@settings(max_examples=25, deadline=None)
@given(small, small, st.sampled_from(["left", "right"]))
def test_search(table: list[int], wanted: list[int], side: str) -> None:
    x, order = np.array(table, np.int64), np.argsort(table, stable=True)
    found = rnp.searchsorted(x, np.array(wanted, np.int32), side=side, sorter=order)
    assert np.asarray(found).tolist() == np.searchsorted(sorted(table), wanted, side).tolist()


@settings(max_examples=25, deadline=None)
@given(small, small, st.booleans())
def test_isin(x: list[int], table: list[int], invert: bool) -> None:
    a, b = np.array(x, np.int64), np.array(table, np.int64)
    for run in (rnp.isin, rlx.jit(rnp.isin, static=["invert"])):
        np.testing.assert_array_equal(
            np.asarray(run(a, b, invert=invert)), np.isin(a, b, invert=invert)
        )


def test_nan_is_in_no_set() -> None:
    x = np.array([np.nan, 1.0])
    assert np.asarray(rnp.isin(x, x)).tolist() == [False, True]
    assert np.asarray(rnp.isin([1j, 2j], [2j])).tolist() == [False, True]
    assert rnp.unique_values(np.array([np.nan, 1, np.nan, 1])).shape == (3,)


@settings(max_examples=20, deadline=None)
@given(small, st.integers(1, 9))
def test_results_of_a_given_size(values: list[int], size: int) -> None:
    x = np.array(values, np.int64)

    @rlx.jit
    def traced(x):
        return rnp.nonzero(x, size=size, fill_value=-1)[0], rnp.unique_all(
            x, size=size, fill_value=7
        )

    places, unique = traced(x)
    wanted = np.nonzero(x)[0][:size]
    assert np.asarray(places).tolist() == [*wanted, *[-1] * (size - len(wanted))]
    known = np.unique_all(x)
    n = min(size, len(known.values))
    assert np.asarray(unique.values).tolist() == [*known.values[:n], *[7] * (size - n)]
    assert np.asarray(unique.counts).tolist() == [*known.counts[:n], *[0] * (size - n)]
    assert np.asarray(unique.indices).tolist() == [*known.indices[:n], *[0] * (size - n)]
    np.testing.assert_array_equal(np.asarray(unique.inverse_indices), known.inverse_indices)


def test_positions_of_several_axes() -> None:
    x = np.array([[0, 3, 0], [5, 0, 6]], np.float32)
    found = rlx.jit(lambda x: rnp.nonzero(x, size=4))(x)
    assert [np.asarray(i).tolist() for i in found] == [[0, 1, 1, 0], [1, 0, 2, 0]]
    assert [np.asarray(i).tolist() for i in rnp.nonzero(x)] == [[0, 1, 1], [1, 0, 2]]


def test_sizes_that_depend_on_elements_are_an_error_in_a_trace() -> None:
    for name in ("nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"):
        with pytest.raises(rlx.UnsupportedError, match="depends on the elements") as caught:
            rlx.jit(getattr(rnp, name))(np.zeros(3))
        assert "size=" in caught.value.hint


def test_errors_are_typed() -> None:
    with pytest.raises(TypeError, match="no order"):
        rnp.sort(np.zeros(3, np.complex64))
    with pytest.raises(ValueError, match="no such axis"):
        rnp.argsort(np.zeros(3), axis=1)
    with pytest.raises(ValueError, match="no such side"):
        rnp.searchsorted(np.zeros(3), 1.0, side="middle")
    with pytest.raises(ValueError, match="without axes"):
        rnp.nonzero(1.0)
