"""Gather, scatter and the ops that make indices, against loops."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from op_support import array, cost_of, run, same, shape, shape_of

from rlx import Graph, Session
from rlx.errors import (
    AttributeValueError,
    BindingError,
    DTypeError,
    InputError,
    RlxError,
    ShapeError,
)
from rlx.ir.op import make_op

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_gather_rows_and_columns() -> None:
    ids = np.int64([[3, 0, 3], [1, -1, 2]])
    rows = run("gather", TABLE, ids)
    columns = run("gather", TABLE, np.uint8([2, 0]), axis=-1)
    for i, j in np.ndindex(2, 3):
        assert rows[i, j].tolist() == TABLE[ids[i, j]].tolist()
    assert columns.tolist() == [[row[2], row[0]] for row in TABLE.tolist()]
    assert run("gather", TABLE[0], np.array(1, np.int32)).tolist() == 1
    assert run("gather", TABLE, np.zeros((0,), np.int32)).shape == (0, 3)
    assert run("gather", np.zeros((0, 3), np.int8), np.zeros((2, 0), np.int32)).shape == (2, 0, 3)
    assert run("gather", array([1, 2], "f8e5m2"), np.int32([1])).tolist() == [2.0]
    assert shape_of("gather", "[1000, 64] f16", "[batch, seq] i32") == "[batch, seq, 64] f16"
    assert shape_of("gather", "[n, m]", "[] i32", axis=1) == "[n] f32"


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along(axis: int) -> None:
    x = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    n = x.shape[axis]
    index = np.random.default_rng(7).integers(-n, n, (2, 3, 4))
    index = index.take(range(2), axis)
    found = run("take_along", x, index, axis=axis)
    for at in np.ndindex(*found.shape):
        source = list(at)
        source[axis] = int(index[at])
        assert found[at] == x[tuple(source)]


def test_take_along_broadcasts_other_axes() -> None:
    found = run("take_along", TABLE, np.int32([[2, 0]]), axis=1)
    assert found.tolist() == [[row[2], row[0]] for row in TABLE.tolist()]
    wide = run("take_along", TABLE[:1], np.int32([[0], [2]]), axis=1)
    assert wide.tolist() == [[0], [2]]
    assert shape_of("take_along", "[batch, 9] f16", "[batch, k] i32") == "[batch, k] f16"
    with pytest.raises(ShapeError, match="cannot be shown equal"):
        shape_of("take_along", "[n, 9]", "[m, 2] i32")
    with pytest.raises(ShapeError, match="wrong rank"):
        shape_of("take_along", "[n, 9]", "[n] i32")


def test_scatter_writes_and_the_last_wins() -> None:
    updates = array([[-1, -1, -1], [-2, -2, -2], [-3, -3, -3]])
    found = run("scatter", TABLE, np.int32([1, -1, 1]), updates)
    same(found, [TABLE[0], [-3] * 3, TABLE[2], [-2] * 3])
    assert TABLE[1, 0] == 3  # the operand is untouched
    columns = run("scatter", TABLE, np.int64([2]), np.zeros((4, 1), np.float32), axis=1)
    same(columns, [[a, b, 0] for a, b, _ in TABLE.tolist()])
    same(run("scatter", TABLE, np.zeros((0,), np.int32), np.zeros((0, 3), np.float32)), TABLE)


def test_scatter_add_accumulates() -> None:
    found = run("scatter_add", TABLE, np.int32([1, 1, -1]), np.ones((3, 3), np.float32))
    same(found, TABLE + np.array([[0], [2], [0], [1]]))
    columns = run("scatter_add", TABLE, np.int32([0, 0]), np.ones((4, 2), np.float32), axis=1)
    same(columns, TABLE + np.array([2, 0, 0]))
    wrapped = run("scatter_add", np.uint8([250]), np.int32([0, 0]), np.uint8([5, 5]))
    assert wrapped.tolist() == [4]
    # each of 4096 ones would vanish beside 2048 if the sum were kept in f16
    ones = np.ones(4096, np.float16)
    assert run("scatter_add", np.zeros(1, np.float16), np.zeros(4096, np.int32), ones).tolist() == [
        4096
    ]
    bf16 = run("scatter_add", array([1], "bf16"), np.int32([0]), array([0.5], "bf16"))
    assert bf16.dtype == ml_dtypes.bfloat16 and bf16.tolist() == [1.5]


def test_scatter_reduce_combines_in_turn() -> None:
    ids, updates = np.int32([1, 1, -1]), array([[2, 0, -1], [3, 5, 1], [9, -9, 9]])
    for how, combine in (("mul", np.multiply), ("minimum", np.minimum), ("maximum", np.maximum)):
        expected = TABLE.copy()
        expected[1] = combine(combine(TABLE[1], updates[0]), updates[1])
        expected[3] = combine(TABLE[3], updates[2])
        same(run("scatter_reduce", TABLE, ids, updates, how=how), expected)
    columns = run("scatter_reduce", TABLE, np.int32([0]), np.zeros((4, 1), np.float32), axis=1)
    same(columns, TABLE * np.array([0, 1, 1]))
    nan = run("scatter_reduce", array([1]), np.int32([0]), array([np.nan]), how="maximum")
    assert np.isnan(nan).all()
    # 256 · 256 is infinite in f16, though a later factor would bring it back
    halves = np.array([256, 2**-10], np.float16)
    found = run("scatter_reduce", np.array([256], np.float16), np.int32([0, 0]), halves)
    assert found.tolist() == [np.inf]


def test_scatter_reduce_refuses() -> None:
    with pytest.raises(AttributeValueError, match="not a way to combine"):
        shape_of("scatter_reduce", "[4]", "[2] i32", "[2]", how="add")
    with pytest.raises(DTypeError, match="unsupported element type"):
        shape_of("scatter_reduce", "[4] c64", "[2] i32", "[2] c64", how="minimum")
    assert shape_of("scatter_reduce", "[4] c64", "[2] i32", "[2] c64") == "[4] c64"


@pytest.mark.parametrize("name", ["scatter", "scatter_add", "scatter_reduce"])
def test_scatter_shapes(name: str) -> None:
    text = shape_of(name, "[batch, capacity, 8] f16", "[n] i32", "[batch, n, 8] f16", axis=1)
    assert text == "[batch, capacity, 8] f16"
    wrong: list[tuple[type[Exception], tuple[str, str, str]]] = [
        (DTypeError, ("[4, 3]", "[2] f32", "[2, 3]")),
        (DTypeError, ("[4, 3]", "[2] i32", "[2, 3] f16")),
        (ShapeError, ("[4, 3]", "[2, 1] i32", "[2, 3]")),
        (ShapeError, ("[4, 3]", "[2] i32", "[3, 3]")),
        (ShapeError, ("[4, 3]", "[2] i32", "[2, 4]")),
        (ShapeError, ("[4, 3]", "[n] i32", "[m, 3]")),
        (ShapeError, ("[4, 3]", "[2] i32", "[2]")),
        (ShapeError, ("[]", "[2] i32", "[2]")),
    ]
    for error, shapes in wrong:
        with pytest.raises(error):
            shape_of(name, *shapes)


def test_scatter_add_of_bools_is_refused() -> None:
    with pytest.raises(DTypeError, match="unsupported element type"):
        shape_of("scatter_add", "[4] bool", "[2] i32", "[2] bool")
    assert shape_of("scatter", "[4] bool", "[2] i32", "[2] bool") == "[4] bool"


@pytest.mark.parametrize("name", ["gather", "take_along"])
@pytest.mark.parametrize("element", ["f32", "bool"])
def test_indices_are_integers(name: str, element: str) -> None:
    with pytest.raises(DTypeError, match="integer"):
        shape_of(name, "[4]", f"[2] {element}")
    with pytest.raises(ShapeError, match="out of range"):
        shape_of(name, "[4]", "[2] i32", axis=1)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gather", ()),
        ("take_along", ()),
        ("scatter", (array([1]),)),
        ("scatter_add", (array([1]),)),
        ("scatter_reduce", (array([1]),)),
    ],
)
def test_indices_out_of_range(name: str, more: tuple[Any, ...]) -> None:
    x = array([1, 2, 3])
    for index in (np.int32([3]), np.int64([-4]), np.uint64([2**64 - 1]), np.uint8([200])):
        with pytest.raises(InputError, match="index out of range") as caught:
            run(name, x, index, *more, axis=0)
        assert caught.value.got == int(index[0]) and caught.value.expected == "-3 … 2"


def test_iota() -> None:
    assert run("iota", shape=[4]).tolist() == [0, 1, 2, 3]
    assert run("iota", shape=[2, 3], axis=-1, start=5).tolist() == [[5, 6, 7]] * 2
    assert run("iota", shape=[2, 3], dtype="bf16").tolist() == [[0] * 3, [1] * 3]
    assert run("iota", shape=[3], dtype="u8", start=254).tolist() == [254, 255, 0]
    assert run("iota", shape=[0, 2]).shape == (0, 2)
    assert shape_of("iota", shape=["batch", "seq"], axis=1, start="past_seq") == "[batch, seq] i32"
    for attributes in ({"shape": []}, {"shape": [2], "axis": 1}):
        with pytest.raises(ShapeError, match="out of range"):
            shape_of("iota", **attributes)
    with pytest.raises(DTypeError):
        shape_of("iota", shape=[2], dtype="bool")
    with pytest.raises(BindingError):
        make_op("iota", {"shape": ["n"]}).reference()


def test_dim_value() -> None:
    assert run("dim_value", dim=7).tolist() == 7
    assert run("dim_value", dim=7, dtype="f16").dtype == np.float16
    assert shape_of("dim_value", dim="past_seq + seq", dtype="i64") == "[] i64"
    with pytest.raises(DTypeError):
        shape_of("dim_value", dim="n", dtype="bool")
    with pytest.raises(BindingError, match="unbound"):
        make_op("dim_value", {"dim": "n"}).reference()


def test_gather_counts_what_it_reads() -> None:
    n = shape("[n]").dims[0]
    # n ids of 4 bytes, n rows of 64 halves read and written; not the table of 1000 rows
    assert cost_of("gather", "[1000, 64] f16", "[n] i32") == (0, n * 4 + n * 256)
    assert cost_of("scatter_add", "[8, 2]", "[3] i32", "[3, 2]").flops == 6
    assert cost_of("scatter", "[8, 2]", "[3] i32", "[3, 2]").flops == 0


def test_gather_backward_adds_where_slices_came_from() -> None:
    dy = np.arange(24, dtype=np.float64).reshape(2, 2, 2, 3)
    ids = np.array([[1, 0], [-1, 1]])
    want = np.zeros((2, 4, 3))
    for block, (row, column) in itertools.product(range(2), np.ndindex(2, 2)):
        want[block, ids[row, column]] += dy[block, row, column]
    assert np.array_equal(run("gather_backward", dy, ids, size=4, axis=1), want)
    assert np.array_equal(run("gather_backward", dy, ids, size=4, axis=-2), want)
    found = shape_of("gather_backward", "[a, n, 5]", "[n] i32", size="v", axis=1)
    assert found == "[a, v, 5] f32"
    with pytest.raises(ShapeError, match="axis"):
        shape_of("gather_backward", "[n, 5]", "[n] i32", size=3, axis=2)
    with pytest.raises(InputError, match="out of range"):
        run("gather_backward", dy, ids, size=1, axis=1)


def test_gather_backward_reports_bad_indices_on_the_cpu() -> None:
    g = Graph("g")
    dy, ids = g.input("dy", ["n", 5]), g.input("ids", ["n"], "i32")
    f = Session("cpu").compile(g.set_outputs(g.gather_backward(dy, ids, size=3)))
    with pytest.raises(RlxError, match="index"):
        f.run(dy=np.ones((2, 5), np.float32), ids=np.array([0, 3], np.int32))
