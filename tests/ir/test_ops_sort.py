"""Sorting and searching ops on the reference and the CPU, against Python's sorted and bisect."""

from __future__ import annotations

import bisect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx import AttributeValueError, DTypeError, Graph, Session, ShapeError

NAN, INF = math.nan, math.inf


def run(device: str, name: str, *arrays: np.ndarray, **attributes: object) -> np.ndarray:
    g = Graph(name)
    dims = [[f"a{i}_{k}" for k in range(a.ndim)] for i, a in enumerate(arrays)]
    values = [g.input(f"x{i}", dims[i], a.dtype) for i, a in enumerate(arrays)]
    g.set_outputs(g.apply(name, *values, **attributes))
    return Session(device).compile(g).run(**{f"x{i}": a for i, a in enumerate(arrays)})[0]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_nan_is_greatest_and_equal_elements_keep_their_order(device: str) -> None:
    x = np.array([1.0, NAN, -0.0, -INF, 0.0, INF, 1.0, NAN], np.float32)
    assert run(device, "argsort", x).tolist() == [3, 2, 4, 0, 6, 5, 1, 7]
    assert run(device, "argsort", x, descending=True).tolist() == [1, 7, 5, 0, 6, 2, 4, 3]
    ordered = run(device, "sort", x)
    assert np.signbit(ordered[:3]).tolist() == [True, True, False]
    assert ordered.tolist()[:6] == [-INF, 0, 0, 1, 1, INF] and np.isnan(ordered[6:]).all()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["i8", "u16", "i32", "u64", "i64", "f32", "f64"]),
    st.integers(0, 3), st.integers(0, 90), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_row(element: str, rows: int, size: int, descending: bool, seed: int) -> None:
    dtype = rlx.DType.of(element)
    rng = np.random.default_rng(seed)
    if dtype.is_integer:
        info = np.iinfo(dtype.numpy)
        x = rng.integers(info.min, info.max, (rows, size), dtype.numpy, endpoint=True)
    else:
        x = np.round(rng.normal(size=(rows, size)) * 10).astype(dtype.numpy)
    found = run("cpu", "argsort", x, descending=descending)
    for row, order in zip(x.tolist(), found.tolist(), strict=True):
        assert order == sorted(range(size), key=row.__getitem__, reverse=descending) or (
            # Python reverses ties back into their order too
            order == sorted(range(size), key=lambda i, row=row: -row[i])
        )
    np.testing.assert_array_equal(
        run("cpu", "sort", x, descending=descending), np.take_along_axis(x, found, -1)
    )


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("element", ["f32", "i64", "u8"])
def test_search(device: str, element: str) -> None:
    dtype = rlx.DType.of(element).numpy
    table = np.array([1, 1, 3, 7, 7, 7, 9], dtype)
    x = np.arange(12).astype(dtype).reshape(3, 4)
    for side, function in (("left", bisect.bisect_left), ("right", bisect.bisect_right)):
        found = run(device, "searchsorted", table, x, side=side)
        assert found.dtype == np.int64
        assert found.ravel().tolist() == [function(table.tolist(), v) for v in x.ravel().tolist()]
    assert run(device, "searchsorted", table[:0], x).tolist() == [[0] * 4] * 3


def test_errors() -> None:
    g = Graph("g")
    x, z = g.input("x", ["n", 3]), g.input("z", ["n"], "c64")
    with pytest.raises(DTypeError):
        g.sort(z)
    with pytest.raises(ShapeError):
        g.argsort(x, axis=2)
    with pytest.raises(ShapeError, match="the table"):
        g.searchsorted(x, x)
    with pytest.raises(DTypeError, match="another type"):
        g.searchsorted(g.input("t", ["m"], "f64"), x)
    with pytest.raises(AttributeValueError, match="unknown side"):
        g.searchsorted(g.input("u", ["m"]), x, side="middle")
