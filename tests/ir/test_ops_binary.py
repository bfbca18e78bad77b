"""Binary ops, comparisons and where: values against Python arithmetic, promotion, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from op_support import array, cost_of, run, same, shape, shape_of

from rlx.errors import DTypeError, ShapeError
from rlx.ir.dtype import FLOATS, DType
from rlx.ir.graph import Graph
from rlx.ir.node import Value
from rlx.ir.op import lookup, make_op
from rlx.ir.ops.binary import Binary

INF, NAN = math.inf, math.nan

ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "maximum": max,
    "minimum": min,
    "mod": lambda a, b: a % b,
    "floor_div": lambda a, b: a // b,
    "atan2": math.atan2,
    "hypot": math.hypot,
    "copysign": math.copysign,
}


@pytest.mark.parametrize("element", [t.name for t in FLOATS])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_binary_rounds_the_exact_value_once(name: str, element: str) -> None:
    left = array([[7.0], [-7.0], [0.75], [-0.25], [6.0]], element)
    right = array([2.0, -2.0, 0.5, -1.5], element)
    formula = ARITHMETIC[name]
    expected = [
        [formula(a, b) for b in right.astype(np.float64).tolist()]
        for a in left[:, 0].astype(np.float64).tolist()
    ]
    eps = 1e-16 if element == "f64" else float(ml_dtypes.finfo(right.dtype).eps) / 2
    found = run(name, left, right)
    # half an ulp of rounding, and what f32 arithmetic adds before it for the narrow types
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=eps * 1.001 + 2**-52)


def test_pow() -> None:
    same(run("pow", array([2, 9, -8, 0, 0, INF]), array([10, 0.5, 3, 0, -1, -1])),
         [1024, 3, -512, 1, INF, 0])  # fmt: skip
    same(run("pow", array([-8]), array([1 / 3])), [NAN])
    base = np.int8([2, -3, 2, 1, -1, -1, 0, 5])
    exponent = np.int8([3, 3, 8, -5, -5, -4, -1, -2])
    assert run("pow", base, exponent).tolist() == [8, -27, 0, 1, -1, 1, 0, 0]
    assert run("pow", np.uint8([255]), np.uint8([2])).tolist() == [1]


@pytest.mark.parametrize("element", ["i8", "i16", "i32", "i64", "u8", "u64"])
def test_integer_division_follows_python_and_gives_0_by_zero(element: str) -> None:
    values = [0, 1, 2, 7, 100] + ([-1, -7, -100] if element[0] == "i" else [])
    x = np.array(values, DType.of(element).numpy)
    a, b = x[:, None], x[None, :]
    quotient = [[p // q if q else 0 for q in values] for p in values]
    remainder = [[p % q if q else 0 for q in values] for p in values]
    assert run("floor_div", a, b).tolist() == quotient
    assert run("mod", a, b).tolist() == remainder


def test_integer_edges() -> None:
    least = np.int32([-(2**31)])
    assert run("floor_div", least, np.int32([-1])).tolist() == [-(2**31)]  # 2^31 wraps
    assert run("mod", least, np.int32([-1])).tolist() == [0]
    assert run("add", np.int32([2**31 - 1]), np.int32([1])).tolist() == [-(2**31)]
    assert run("mul", np.uint8([16]), np.uint8([17])).tolist() == [16]
    assert run("sub", np.array(0, np.uint64), np.array(1, np.uint64)).tolist() == 2**64 - 1
    assert run("maximum", np.int32([3]), np.int32([-3])).tolist() == [3]


def test_float_division_edges() -> None:
    a, b = array([1, -1, 0, INF, 5, -1]), array([0, 0, 0, INF, INF, INF])
    same(run("div", a, b), [INF, -INF, NAN, NAN, 0, 0])
    same(run("mod", a[:3], b[:3]), [NAN, NAN, NAN])
    same(run("mod", array([-1.0]), array([INF])), [INF])  # Python: -1.0 % inf
    same(run("maximum", array([NAN, 1]), array([1, NAN])), [NAN, NAN])
    same(run("minimum", array([NAN, -INF]), array([1, 2])), [NAN, -INF])
    assert math.copysign(1, run("atan2", array([0]), array([-0.0]))[0]) == 1


def test_hypot_and_logaddexp_do_not_overflow() -> None:
    a, b = array([3e38, 3e-45, INF, NAN, 0]), array([1e38, 4e-45, NAN, -INF, -0.0])
    expected = [math.hypot(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    same(run("hypot", a, b), np.float32(expected))
    same(run("hypot", np.int32([3]), np.int64([-4])), np.float32([5]))
    for a, b in ((0.3, 1.2), (2.0, 2.0), (-5.0, 7.0)):
        expected = [math.log(math.exp(a) + math.exp(b))]
        np.testing.assert_allclose(run("logaddexp", np.float64([a]), np.float64([b])), expected)
    a, b = array([1000, -1000, INF, -INF, -INF, INF, NAN]), array([1000, 0, INF, -INF, 2, -INF, 1])
    same(run("logaddexp", a, b), np.float32([1000 + math.log(2), 0, INF, -INF, 2, INF, NAN]))


def test_copysign_sees_the_sign_of_zero() -> None:
    found = run("copysign", array([1, -1, 0, INF, 2]), array([-0.0, 0.0, -5, -INF, -2]))
    same(found, [-1, 1, -0.0, -INF, -2])
    assert np.signbit(found).tolist() == [True, False, True, True, True]
    assert np.isnan(run("copysign", array([NAN]), array([-1])))[0]
    same(run("copysign", np.int32([3]), np.int32([-2])), np.float32([-3]))


def test_division_of_integers_is_f32() -> None:
    found = run("div", np.int64([1, 7, -7, 1]), np.int64([3, 2, 2, 0]))
    same(found, np.float32([1 / 3, 3.5, -3.5, INF]))
    same(run("div", np.array([True]), np.array([False])), [INF])
    # operands meet in f32 first: 2^24 + 1 is 2^24 there
    assert run("div", np.int32([2**24 + 1]), np.int32([1])).tolist() == [2.0**24]


@pytest.mark.parametrize(
    ("a", "b", "met"),
    [
        ("f16", "f16", "f16"), ("f16", "bf16", "f32"), ("bf16", "f32", "f32"),
        ("i64", "f16", "f16"),
        ("f32", "f64", "f64"), ("u8", "i8", "i16"), ("u8", "i32", "i32"), ("bool", "i8", "i8"),
        ("f8e4m3", "f16", "f16"), ("f8e4m3", "f8e5m2", "f32"), ("f32", "c64", "c64"),
    ],
)  # fmt: skip
def test_binary_result_is_the_promoted_type(a: str, b: str, met: str) -> None:
    for name in ("add", "mul"):
        assert shape_of(name, f"[n] {a}", f"[n] {b}") == f"[n] {met}"
        one, two = array([1], a), array([1], b)
        assert run(name, one, two).tolist() == [{"add": 2, "mul": 1}[name]]


def test_wide_integers_meet_half_floats_in_f32() -> None:
    # 70000 is beyond f16, its half is not
    assert run("mul", np.int32([70000]), array([0.5], "f16")).tolist() == [35008.0]
    assert run("gt", np.int32([70000]), array([65504], "f16")).tolist() == [True]


def test_bits_and_shifts() -> None:
    a, b = np.uint8([0b1100, 255]), np.uint8([0b1010, 1])
    assert run("bitwise_and", a, b).tolist() == [0b1000, 1]
    assert run("bitwise_or", a, b).tolist() == [0b1110, 255]
    assert run("bitwise_xor", a, b).tolist() == [0b0110, 254]
    t, f = np.array([True, False]), np.array([True, True])
    assert run("bitwise_xor", t, f).tolist() == [False, True]
    left = run("shift_left", np.int8([1, 1, 64, 1, 1]), np.int8([3, 7, 1, 8, -1]))
    assert left.tolist() == [8, -128, -128, 0, 0]
    right = run("shift_right", np.int8([-128, 127, -1, 5, -5]), np.int8([3, 7, 100, 8, -1]))
    assert right.tolist() == [-16, 0, -1, 0, -1]
    assert run("shift_right", np.uint8([128]), np.uint8([7])).tolist() == [1]


def test_comparisons() -> None:
    a, b = array([1, 2, NAN, -0.0]), array([2, 2, NAN, 0.0])
    expected = {
        "eq": [False, True, False, True], "ne": [True, False, True, False],
        "lt": [True, False, False, False], "le": [True, True, False, True],
        "gt": [False, False, False, False], "ge": [False, True, False, True],
    }  # fmt: skip
    for name, values in expected.items():
        assert run(name, a, b).tolist() == values, name
    assert run("lt", np.uint8([200]), np.int8([-1])).tolist() == [False]
    assert run("lt", np.array([False]), np.array([True])).tolist() == [True]
    assert run("eq", array([0.1], "f16"), array([0.1])).tolist() == [False]


def test_logic() -> None:
    a, b = array([0, 0, 2, NAN]), np.uint64([0, 3, 0, 1])
    assert run("logical_and", a, b).tolist() == [False, False, False, True]
    assert run("logical_or", a, b).tolist() == [False, True, True, True]
    assert run("logical_xor", a, b).tolist() == [False, True, True, False]
    assert run("logical_and", np.int64([1]), b[:1]).tolist() == [False]  # no promotion needed


def test_where() -> None:
    condition = np.array([[True], [False]])
    found = run("where", condition, array([1, NAN], "bf16"), array(7, "f16"))
    same(found, [[1, NAN], [7, 7]])
    assert shape_of("where", "[batch, 1] bool", "[4] f16", "[] f16") == "[batch, 4] f16"
    g = Graph("g")
    flag, half = g.input("flag", [4], "bool"), g.input("half", [4], "f16")
    assert str(g.where(flag, half, 0.0).shape) == "[4] f16"  # a number takes the type beside it
    with pytest.raises(DTypeError, match="must be bool"):
        run("where", np.int32([1]), array([1]), array([1]))


# -- shapes and errors ------------------------------------------------------------------------


def test_broadcasting_over_symbols() -> None:
    assert shape_of("add", "[batch, seq, 64]", "[64]") == "[batch, seq, 64] f32"
    assert shape_of("add", "[rows, 1]", "[batch * seq, 8]") == "[rows, 8] f32"
    assert shape_of("lt", "[1, n]", "[m, 1]") == "[m, n] bool"
    for a, b in (("[n]", "[m]"), ("[n]", "[4]"), ("[3]", "[4]"), ("[batch, n]", "[batch, n + 1]")):
        with pytest.raises(ShapeError, match="cannot be shown equal"):
            shape_of("mul", a, b)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("erf", ["c64"]), ("relu", ["c64"]), ("neg", ["bool"]), ("floor", ["bool"]),
        ("bitwise_not", ["f32"]), ("add", ["bool", "bool"]), ("maximum", ["c64", "f32"]),
        ("mod", ["f32", "c64"]), ("bitwise_and", ["i32", "f32"]), ("shift_left", ["i32", "f16"]),
        ("shift_left", ["bool", "bool"]), ("lt", ["c64", "c64"]), ("atan2", ["c64", "f32"]),
        ("add", ["u64", "i64"]), ("floor", ["c64"]), ("clamp", ["bool"]), ("is_nan", ["bool"]),
    ],
)  # fmt: skip
def test_element_types_not_taken(name: str, elements: list[str]) -> None:
    with pytest.raises(DTypeError):
        shape_of(name, *[f"[2] {e}" for e in elements])


def test_errors_name_the_op_and_its_place() -> None:
    g = Graph("g")
    a, b = g.input("a", ["batch", 3]), g.input("b", ["seq", 3])
    with pytest.raises(ShapeError) as caught:
        g.add(a, b)
    assert caught.value.where == "add"
    message = str(caught.value)
    assert "test_ops_binary.py" in message and "batch against seq" in message
    with pytest.raises(ShapeError, match="number of operands"):
        g.append(make_op("exp", {}), [a, b])


def test_cost_counts_elements_and_bytes() -> None:
    assert cost_of("add", "[4, 1] f16", "[4, 8] f16") == (32, 8 + 64 + 64)
    plain, heavy = cost_of("neg", "[n, 2]"), cost_of("exp", "[n, 2]")
    n = shape("[n]").dims[0]
    assert plain == (n * 2, n * 16)
    assert heavy.bytes == plain.bytes and heavy.flops == plain.flops * 8


def test_a_formula_must_be_elementwise() -> None:
    class Wrong(Binary):
        name = "wrong"

        def formula(self, g: Graph, a: Value, b: Value) -> Value:
            return g.sum(a * b, axis=-1)

    g = Graph("g")
    x = g.input("x", ["n", 3])
    assert Wrong.has_decomposition() and not lookup("add").has_decomposition()
    with pytest.raises(ShapeError, match="not elementwise"):
        Wrong().decompose(g, x, x)
