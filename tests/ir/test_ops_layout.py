"""Layout ops: sizes shown equal over symbols, views, and values against Python indexing."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_support import array, cost_of, run, same, shape_of

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dim import evaluate
from rlx.ir.op import lookup, make_op
from rlx.ir.shape import Shape

COUNT = np.arange(24, dtype=np.int32).reshape(2, 3, 4)


# -- reshape ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "dims", "expected"),
    [
        ("[batch, seq, 64]", ["rows", 64], "[rows, 64]"),
        ("[batch, seq, 64]", ["batch * seq", 64], "[batch * seq, 64]"),
        ("[rows, 64]", ["batch", "seq", 4, 16], "[batch, seq, 4, 16]"),
        ("[rows, 64]", ["batch", -1, 64], "[batch, seq, 64]"),
        ("[rows, 64]", [-1, 32], "[2 * rows, 32]"),
        ("[rows, 64]", [-1, 64], "[rows, 64]"),
        ("[batch, seq, 64]", [-1, 64], "[batch * seq, 64]"),
        ("[batch, seq, 64]", ["batch", "seq", -1, 16], "[batch, seq, 4, 16]"),
        ("[batch, past_seq + seq, 8]", [-1, 8], "[batch * past_seq + batch * seq, 8]"),
        ("[batch, past_seq + seq, 8]", ["past_seq + seq", -1], "[past_seq + seq, 8 * batch]"),
        ("[2 * n + 4, n]", ["n + 2", -1], "[n + 2, 2 * n]"),
        ("[n, 6]", [2, "3 * n"], "[2, 3 * n]"),
        ("[n // 2, 4]", [4, -1], "[4, ((n) // 2)]"),
        ("[24]", [2, -1, 4], "[2, 3, 4]"),
        ("[1]", [], "[]"),
        ("[]", [1, 1], "[1, 1]"),
        ("[]", [-1], "[1]"),
        ("[0, 4]", [-1, 2], "[0, 2]"),
        ("[0, 5, 64]", [0, -1], "[0, 320]"),
        ("[4, 0]", [0, 9], "[0, 9]"),
    ],
)
def test_reshape_shows_counts_equal(start: str, dims: list[Any], expected: str) -> None:
    assert shape_of("reshape", start, shape=dims) == f"{expected} f32"


@pytest.mark.parametrize(
    ("start", "dims"),
    [
        ("[n, 4]", ["m", 4]), ("[n, 4]", [8, 4]), ("[2, 3]", [4]), ("[batch, seq]", ["batch"]),
        ("[n]", [-1, 4]), ("[10]", [-1, 4]), ("[n + 1]", [-1, "n"]), ("[n, 4]", ["m", -1]),
        ("[6]", [0, -1]), ("[n, n + 1]", [-1, "n + 2"]), ("[]", [2]),
    ],
)  # fmt: skip
def test_reshape_that_cannot_be_shown(start: str, dims: list[Any]) -> None:
    with pytest.raises(ShapeError, match=r"cannot be (shown|found)"):
        shape_of("reshape", start, shape=dims)


@pytest.mark.parametrize("dims", [[-1, -1], [-2, 3]])
def test_reshape_attributes(dims: list[int]) -> None:
    with pytest.raises(AttributeValueError, match="not dims"):
        make_op("reshape", {"shape": dims})


def test_reshape_keeps_the_order() -> None:
    found = run("reshape", COUNT, shape=[4, -1])
    assert found.tolist() == [list(range(6 * i, 6 * i + 6)) for i in range(4)]
    across = run("reshape", COUNT.transpose(2, 0, 1), shape=[24])
    assert across.tolist() == [4 * i + j for j in range(4) for i in range(6)]
    assert run("reshape", np.zeros((0, 5, 2), np.int8), shape=[0, -1]).shape == (0, 10)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_symbolic_and_bound_reshapes_agree(a: int, b: int, past: int, k: int) -> None:
    """What is inferred for symbols is, once they are bound, what NumPy finds."""
    start = Shape(["batch", f"past_seq + {k} * seq", 6])
    sizes = {"batch": a, "seq": b, "past_seq": past}
    bound = start.bind(sizes)
    for dims in ([-1, 2], ["batch", -1], [f"past_seq + {k} * seq", -1, 3], ["6 * batch", -1]):
        symbolic = make_op("reshape", {"shape": dims}).infer(start)
        concrete = [-1 if d == -1 else Shape([d]).bind(sizes).dims[0] for d in dims]
        expected = np.empty(bound.static_dims).reshape(concrete).shape  # type: ignore[arg-type]
        assert tuple(evaluate(d, sizes) for d in symbolic.dims) == expected


# -- strides ----------------------------------------------------------------------------------


def test_transpose() -> None:
    found = run("transpose", COUNT, axes=[2, 0, 1])
    assert all(
        found[k, i, j] == COUNT[i, j, k] for i in range(2) for j in range(3) for k in range(4)
    )
    assert shape_of("transpose", "[batch, seq, 8]", axes=[0, -1, 1]) == "[batch, 8, seq] f32"
    assert make_op("transpose", {"axes": [0, -1]}) == make_op("transpose", {"axes": (0, 1)})
    assert run("transpose", np.array(3), axes=[]).tolist() == 3
    for perm in ([0, 0], [0, 2], [1], [-3, 0]):
        with pytest.raises(AttributeValueError, match="permutation"):
            make_op("transpose", {"axes": perm})
    with pytest.raises(ShapeError, match="wrong rank"):
        shape_of("transpose", "[2, 3, 4]", axes=[1, 0])


def test_narrow() -> None:
    assert run("narrow", COUNT, axis=-1, start=1, length=2).tolist() == COUNT[..., 1:3].tolist()
    assert run("narrow", COUNT, axis=1, start=3, length=0).shape == (2, 0, 4)
    assert shape_of("narrow", "[2, 9]", axis=1, start=0, length=9) == "[2, 9] f32"
    cache = "[batch, capacity, 8] f16"
    assert (
        shape_of("narrow", cache, axis=1, start="past_seq", length="seq") == "[batch, seq, 8] f16"
    )
    assert shape_of("narrow", "[n + 1]", axis=0, start=1, length="n") == "[n] f32"
    assert shape_of("narrow", "[rows]", axis=0, start="batch * seq - 1", length=1) == "[1] f32"


@pytest.mark.parametrize(
    ("start", "first", "length"),
    [
        ("[4]", 0, 5), ("[4]", 4, 1), ("[4]", 3, "n + 2"), ("[n]", 0, "n + 1"), ("[n]", 1, "n"),
        ("[rows]", 1, "batch * seq"), ("[n]", "n", "m + 1"),
    ],
)  # fmt: skip
def test_narrow_past_the_end(start: str, first: Any, length: Any) -> None:
    with pytest.raises(ShapeError, match="past the end"):
        shape_of("narrow", start, axis=0, start=first, length=length)


def test_narrow_errors() -> None:
    for start, length in ((-1, 1), (0, -1), ("-n - 1", 1)):
        with pytest.raises(AttributeValueError, match="negative"):
            make_op("narrow", {"axis": 0, "start": start, "length": length})
    with pytest.raises(ShapeError, match="axis out of range"):
        shape_of("narrow", "[4]", axis=1, start=0, length=1)
    with pytest.raises(ShapeError, match="past the end"):  # sizes known only when it runs
        make_op("narrow", {"axis": 0, "start": 3, "length": 2}).reference(np.zeros(4))


BOUNDS = st.one_of(st.none(), st.integers(-6, 6))


@given(st.integers(0, 6), BOUNDS, BOUNDS, st.sampled_from([-3, -2, -1, 1, 2, 3]))
@settings(max_examples=300, deadline=None)
def test_slice_is_pythons_inside_the_axis(
    n: int, start: int | None, stop: int | None, step: int
) -> None:
    """A range inside the axis gives what Python gives; any other is refused, never clamped."""
    x = np.arange(n, dtype=np.int32)
    low = start if start is None or start >= 0 else start + n
    high = stop if stop is None or stop >= 0 else stop + n
    if step > 0:
        low, high = 0 if low is None else low, n if high is None else high
        inside = 0 <= low <= high <= n
    else:
        low, high = n - 1 if low is None else low, -1 if high is None else high
        inside = -1 <= high <= low <= n - 1
    attributes = {"starts": [start], "stops": [stop], "steps": [step]}
    if not inside:
        with pytest.raises(ShapeError, match="not a range"):
            run("slice", x, **attributes)
        return
    expected = list(range(low, high, step))
    assert run("slice", x, **attributes).tolist() == expected
    if start is None and stop is None:  # the same from a symbolic size
        length = make_op("slice", attributes).infer(Shape(["n"])).dims[0]
        assert evaluate(length, {"n": n}) == len(expected)


def test_slice_of_symbolic_axes() -> None:
    found = shape_of("slice", "[batch, seq, 8]", starts=[None, 1, 0], stops=[None, -1, 8])
    assert found == "[batch, seq - 2, 8] f32"
    assert (
        shape_of("slice", "[n]", starts=[None], stops=[None], steps=[2]) == "[((n + 1) // 2)] f32"
    )
    assert shape_of("slice", "[n]", starts=[-3], stops=[None]) == "[3] f32"
    assert shape_of("slice", "[n]", starts=[0], stops=[5]) == "[5] f32"
    values = run("slice", COUNT, starts=[1, None, -1], stops=[2, None, None], steps=[1, 2, -2])
    assert values.tolist() == COUNT[1:2, ::2, -1::-2].tolist()
    cut: Any = make_op("slice", {"starts": [1, -1], "stops": [4, None], "steps": [2, -1]})
    assert cut.bounds((5, 6)) == ((1, 2, 2), (5, 6, -1))


def test_slice_errors() -> None:
    for starts, stops, steps in (([0], [1, 2], None), ([0], [1], [0]), ([0], [1], [1, 1])):
        with pytest.raises(AttributeValueError, match="slice per axis"):
            make_op("slice", {"starts": starts, "stops": stops, "steps": steps})
    with pytest.raises(ShapeError, match="slice per axis"):
        shape_of("slice", "[2, 3]", starts=[0], stops=[1])
    with pytest.raises(ShapeError, match="not a range"):
        shape_of("slice", "[n]", starts=[2], stops=[1])


def test_expand() -> None:
    found = run("expand", array([[1], [2]]), shape=[3, 2, 4])
    same(found, [[[1] * 4, [2] * 4]] * 3)
    assert shape_of("expand", "[1, 8] i8", shape=["batch", "seq", 8]) == "[batch, seq, 8] i8"
    assert shape_of("expand", "[rows]", shape=["batch * seq"]) == "[batch * seq] f32"
    assert run("expand", np.float32(2), shape=[0, 2]).shape == (0, 2)
    for start, dims in (
        ("[3]", [4]),
        ("[n]", ["m"]),
        ("[2, 3]", [3]),
        ("[n]", [1]),
        ("[4]", [4, 1]),
    ):
        with pytest.raises(ShapeError, match="cannot be broadcast"):
            shape_of("expand", start, shape=dims)
    with pytest.raises(AttributeValueError, match="negative"):
        make_op("expand", {"shape": [-1]})


def test_views_cost_nothing() -> None:
    cases: dict[str, dict[str, Any]] = {
        "reshape": {"shape": [-1]}, "transpose": {"axes": [1, 0]}, "expand": {"shape": [5, 4, 6]},
        "narrow": {"axis": 0, "start": 1, "length": 2},
        "slice": {"starts": [0, 0], "stops": [2, 6]},
    }  # fmt: skip
    for name, attributes in cases.items():
        assert lookup(name).is_view
        assert cost_of(name, "[4, 6]", **attributes) == (0, 0)
        x = np.zeros((4, 6), np.float32)
        assert np.shares_memory(run(name, x, **attributes), x), name


# -- copies -----------------------------------------------------------------------------------


def test_concat() -> None:
    x, y = array([[1], [2]]), array([[3, 4], [5, 6]])
    same(run("concat", x, y, axis=1), [[1, 3, 4], [2, 5, 6]])
    same(run("concat", x, axis=-1), x)
    same(run("concat", x, np.zeros((2, 0), np.float32), axis=1), x)
    mixed = run("concat", array([1.5], "bf16"), array([2.5], "f16"))
    assert mixed.dtype == np.float32 and mixed.tolist() == [1.5, 2.5]
    three = shape_of("concat", "[batch, past_seq, 8]", "[batch, seq, 8]", "[batch, 1, 8]", axis=1)
    assert three == "[batch, past_seq + seq + 1, 8] f32"
    assert cost_of("concat", "[2, 3]", "[2, 5]", axis=1) == (0, 128)


def test_concat_errors() -> None:
    with pytest.raises(ShapeError, match="number of operands"):
        shape_of("concat", axis=0)
    for other in ("[3, 4]", "[2]", "[m, 4]"):
        with pytest.raises(ShapeError, match="cannot be shown equal"):
            shape_of("concat", "[n, 4]", other, axis=1)
    with pytest.raises(ShapeError, match="out of range"):
        shape_of("concat", "[]", "[]")
    with pytest.raises(DTypeError):
        shape_of("concat", "[2] u64", "[2] i64")


@pytest.mark.parametrize("element", ["f32", "bf16", "f8e4m3", "i16", "u8", "bool", "c64"])
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect"])
def test_pad(mode: str, element: str) -> None:
    x = array(np.arange(12).reshape(3, 4) % 2, element)

    def source(i: int, n: int) -> int | None:
        if 0 <= i < n:
            return i
        return {"constant": None, "edge": 0 if i < 0 else n - 1}.get(
            mode, abs(i) if i < 0 else 2 * n - 2 - i
        )

    found = run("pad", x, low=[1, 0], high=[2, 3], value=1.0, mode=mode)
    assert found.shape == (6, 7)
    for i, j in np.ndindex(6, 7):
        row, column = source(i - 1, 3), source(j, 4)
        expected = 1 if row is None or column is None else x[row, column]
        assert found[i, j] == expected, (i, j)


def test_pad_shapes_and_values() -> None:
    assert shape_of("pad", "[batch, n] f16", low=[0, 1], high=[0, 2]) == "[batch, n + 3] f16"
    same(run("pad", array([1], "f16"), low=[1], high=[0], value=-math.inf), [-math.inf, 1])
    same(run("pad", np.zeros((0,), np.float32), low=[1], high=[1], value=2), [2, 2])
    assert run(
        "pad", np.zeros((0, 2), np.float32), low=[0, 1], high=[0, 0], mode="reflect"
    ).shape == (0, 3)
    assert cost_of("pad", "[4]", low=[2], high=[2]) == (0, 16 + 32)


def test_pad_errors() -> None:
    for low, high in (([1], [1, 2]), ([-1], [0])):
        with pytest.raises(AttributeValueError, match="padding per axis"):
            make_op("pad", {"low": low, "high": high})
    with pytest.raises(AttributeValueError, match="unknown mode"):
        make_op("pad", {"low": [0], "high": [0], "mode": "wrap"})
    with pytest.raises(ShapeError, match="padding per axis"):
        shape_of("pad", "[2, 3]", low=[1], high=[1])
    with pytest.raises(ShapeError, match="too short for reflect"):
        shape_of("pad", "[3]", low=[3], high=[0], mode="reflect")
    with pytest.raises(ShapeError, match="too short for edge"):
        shape_of("pad", "[0]", low=[1], high=[0], mode="edge")
    with pytest.raises(ShapeError, match="too short"):
        make_op("pad", {"low": [3], "high": [0], "mode": "reflect"}).reference(np.zeros(3))
    for element, value in (("u8", -1), ("i8", 128), ("i32", 0.5), ("bool", 2), ("i32", math.nan)):
        with pytest.raises(AttributeValueError, match="no value of the element type"):
            shape_of("pad", f"[3] {element}", low=[1], high=[0], value=value)


def test_flip() -> None:
    assert run("flip", COUNT, axis=[-1]).tolist() == COUNT[:, :, ::-1].tolist()
    assert run("flip", COUNT, axis=[0, 1]).tolist() == COUNT[::-1, ::-1].tolist()
    assert run("flip", array([1, 2], "bf16"), axis=[0]).dtype == ml_dtypes.bfloat16
    assert shape_of("flip", "[n, 2]", axis=[0]) == "[n, 2] f32"
    for axes in ([2], [0, 0], [0, -2]):
        with pytest.raises(ShapeError):
            shape_of("flip", "[n, 2]", axis=axes)
