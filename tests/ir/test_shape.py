"""Shapes, promotion and broadcasting."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.errors import DTypeError, OptionError, ShapeError
from rlx.ir import dtype as dt
from rlx.ir.dim import sym
from rlx.ir.dtype import DType, promote
from rlx.ir.shape import Shape, broadcast_dims, normalize_axis


def test_printing_and_sizes() -> None:
    shape = Shape(["batch", sym.SEQ, 384])
    assert str(shape) == "[batch, seq, 384] f32"
    assert shape.num_elements == sym.BATCH * sym.SEQ * 384
    assert shape.size_bytes == sym.BATCH * sym.SEQ * 1536
    assert shape.symbols == {"batch", "seq"}
    assert not shape.is_static
    bound = shape.bind({"batch": 2, "seq": 3})
    assert bound.static_dims == (2, 3, 384)
    assert bound.size_bytes == 2 * 3 * 384 * 4
    assert shape.upper_bytes({"batch": 2, "seq": 8}) == 2 * 8 * 384 * 4


def test_equal_shapes_are_one_object() -> None:
    a, b = Shape([sym.BATCH * 2, 3], "f16"), Shape(["2 * batch", 3], dt.f16)
    assert a is b
    assert pickle.loads(pickle.dumps(a)) is a
    assert Shape([1]) is not Shape([1], "i32")


def test_a_list_does_for_a_shape() -> None:
    assert Shape.of(["batch", 64]) is Shape(["batch", 64], "f32")
    assert Shape.of([2], "i8").dtype is dt.i8
    with pytest.raises(ShapeError, match=r"list of dimensions"):
        Shape.of(64)


@pytest.mark.parametrize("dims", [[-1], [None], [True], ["a b"], [1.5]])
def test_bad_dimensions(dims: list[object]) -> None:
    with pytest.raises(ShapeError):
        Shape(dims)


def test_unknown_element_type_lists_the_known() -> None:
    with pytest.raises(OptionError, match="f8e4m3"):
        Shape([1], "float99")


@given(st.lists(st.integers(1, 3), max_size=4), st.lists(st.integers(1, 3), max_size=4))
def test_broadcasting_is_numpys(a: list[int], b: list[int]) -> None:
    try:
        expected = np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        with pytest.raises(ShapeError):
            broadcast_dims(a, b)
    else:
        assert broadcast_dims(a, b) == expected


def test_symbols_must_be_shown_equal() -> None:
    b, s = sym.BATCH, sym.SEQ
    assert broadcast_dims((b, 1), (1, s)) == (b, s)
    assert broadcast_dims((sym.ROWS,), (b * s,)) == (sym.ROWS,)
    for other in (s, 4, b + 1):
        with pytest.raises(ShapeError, match="cannot be shown equal"):
            broadcast_dims((b,), (other,))


def test_axis_is_checked() -> None:
    assert normalize_axis(-1, 3) == 2
    for axis in (3, -4):
        with pytest.raises(ShapeError, match="out of range"):
            normalize_axis(axis, 3)


def test_promotion_is_symmetric_and_keeps_equal_types() -> None:
    for a in dt.ALL:
        assert promote(a, a) is a
        for b in dt.ALL:
            assert dt.PROMOTION[a, b] is dt.PROMOTION[b, a]


@pytest.mark.parametrize(
    ("a", "b", "met"),
    [
        ("f16", "bf16", "f32"),
        ("f16", "f32", "f32"),
        ("i64", "f16", "f16"),
        ("u8", "i8", "i16"),
        ("u32", "i8", "i64"),
        ("bool", "u8", "u8"),
        ("f8e4m3", "f8e5m2", "f32"),
        ("f8e4m3", "f16", "f16"),
        ("f32", "c64", "c64"),
        ("f64", "c64", "c128"),
        ("f32", "c128", "c128"),
        ("i64", "c64", "c64"),
        ("f32", "f64", "f64"),
    ],
)
def test_promotion_table(a: str, b: str, met: str) -> None:
    assert promote(DType.of(a), DType.of(b)).name == met


def test_types_without_a_common_one() -> None:
    with pytest.raises(DTypeError, match="cast one"):
        promote(dt.u64, dt.i8)
