"""Elementwise ops: values against Python's `math` and plain loops, element types, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from op_support import array, run, same, shape_of

from rlx.errors import AttributeValueError, DTypeError
from rlx.ir.dtype import FLOATS, DType

INF, NAN = math.inf, math.nan


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if not x < -700 else 0.0


def in_math(function: Callable[[float], float]) -> Callable[[float], float]:
    """`function` with the limits IEEE arithmetic has where Python raises."""

    def safe(x: float) -> float:
        try:
            return function(x)
        except ValueError:
            return NAN
        except OverflowError:
            return INF

    return safe


def odd(function: Callable[[float], float], pole: float = INF) -> Callable[[float], float]:
    """An odd function in math, infinite at ±pole."""
    return lambda x: math.copysign(INF if abs(x) == pole else in_math(function)(abs(x)), x)


UNARY: dict[str, Callable[[float], float]] = {
    "exp": in_math(math.exp),
    "expm1": in_math(math.expm1),
    "log": in_math(lambda x: -INF if x == 0 else math.log(x)),
    "log1p": in_math(lambda x: -INF if x == -1 else math.log1p(x)),
    "exp2": in_math(lambda x: 2.0**x),
    "log2": in_math(lambda x: -INF if x == 0 else math.log2(x)),
    "log10": in_math(lambda x: -INF if x == 0 else math.log10(x)),
    "sqrt": in_math(math.sqrt),
    "rsqrt": in_math(lambda x: math.copysign(INF, x) if x == 0 else 1 / math.sqrt(x)),
    "reciprocal": lambda x: math.copysign(INF, x) if x == 0 else 1 / x,
    "sin": in_math(math.sin),
    "cos": in_math(math.cos),
    "tan": in_math(math.tan),
    "asin": in_math(math.asin),
    "acos": in_math(math.acos),
    "atan": math.atan,
    "sinh": odd(math.sinh),
    "cosh": in_math(math.cosh),
    "asinh": math.asinh,
    "acosh": in_math(math.acosh),
    "atanh": lambda x: odd(math.atanh, 1.0)(x) if abs(x) <= 1 else NAN,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * math.erfc(-x / math.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "gelu_quick": lambda x: x * sigmoid(1.702 * x),
    "normal_cdf": lambda x: math.erfc(-x / math.sqrt(2)) / 2,
    "softplus": lambda x: x if x > 40 else math.log1p(math.exp(x)),
    "leaky_relu": lambda x: x if x >= 0 else 0.01 * x,
    "elu": lambda x: x if x >= 0 else math.expm1(x),
    "neg": lambda x: -x,
    "abs": abs,
    "square": in_math(lambda x: x * x),
    "sign": lambda x: NAN if x != x else float((x > 0) - (x < 0)),
    "relu": lambda x: x if x > 0 or x != x else 0.0,
    "relu6": lambda x: x if x != x else min(max(x, 0.0), 6.0),
    "hard_sigmoid": lambda x: x if x != x else min(max(x / 6 + 0.5, 0.0), 1.0),
    "hard_swish": lambda x: x if x != x else x * min(max(x / 6 + 0.5, 0.0), 1.0),
    "floor": lambda x: float(math.floor(x)) if math.isfinite(x) else x,
    "ceil": lambda x: float(math.ceil(x)) if math.isfinite(x) else x,
    "round": lambda x: float(round(x)) if math.isfinite(x) else x,
    "trunc": lambda x: float(math.trunc(x)) if math.isfinite(x) else x,
}
FINITE = [0.0, -0.0, 1e-5, -1e-5, 0.3, -0.3, 0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.7, -3.7, 7.0, 100.0]
DEEP = [-4.0, -9.0, -30.0, -100.0, 89.0, -1e4, 6e4]


@pytest.mark.parametrize("element", [t.name for t in FLOATS])
@pytest.mark.parametrize("name", UNARY)
def test_unary_is_the_nearest_value(name: str, element: str) -> None:
    x = array([*FINITE, *DEEP, INF, NAN], element)
    with np.errstate(all="ignore"):
        expected = array([UNARY[name](v) for v in x.astype(np.float64).tolist()], element)
    found = run(name, x)
    # Both sides evaluate in f64 to about 1 ulp and round once: at most neighbours below f64.
    a, b = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    np.testing.assert_array_equal(a[~np.isfinite(a)], b[~np.isfinite(b)])
    # In f64 the last digits differ; erfc turns an error of ε at x into 2x²ε, 4e-13 at x = −30.
    f64 = 4e-13 if name in ("gelu", "normal_cdf") else 4e-15
    ulp = f64 if element == "f64" else float(ml_dtypes.finfo(x.dtype).eps)
    tiny = float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
    ok = np.isfinite(a)
    assert np.all(np.abs(a[ok] - b[ok]) <= ulp * np.abs(b[ok]) + tiny)


def test_unary_of_infinities_follows_the_formula() -> None:
    x = array([-INF, INF, NAN])
    same(run("exp", x), [0, INF, NAN])
    same(run("sigmoid", x), [0, 1, NAN])
    same(run("tanh", x), [-1, 1, NAN])
    same(run("erf", x), [-1, 1, NAN])
    same(run("softplus", x), [0, INF, NAN])
    same(run("silu", x), [NAN, INF, NAN])  # −inf · 0
    same(run("gelu", x), [NAN, INF, NAN])
    same(run("elu", x, alpha=2.0), [-2, INF, NAN])
    same(run("leaky_relu", x, alpha=0.5), [-INF, INF, NAN])
    same(run("relu", x), [0, INF, NAN])
    same(run("rsqrt", x), [NAN, 0, NAN])
    same(run("sinh", x), [-INF, INF, NAN])
    same(run("cosh", x), [INF, INF, NAN])
    same(run("asinh", x), [-INF, INF, NAN])
    same(run("acosh", x), [NAN, INF, NAN])
    same(run("exp2", x), [0, INF, NAN])
    same(run("log2", x), [NAN, INF, NAN])


def test_denormals_are_kept() -> None:
    least = np.float32(1e-45)
    x = np.array([least, -least, 3 * least], np.float32)
    np.testing.assert_array_equal(run("neg", x), -x)
    np.testing.assert_array_equal(run("mul", x, np.float32(2)), x + x)
    np.testing.assert_array_equal(run("expm1", x), x)
    assert run("exp", np.float32([-103.0]))[0] == least  # e^−103 = 1.3e-45, nearest to 1.4e-45


def test_results_round_once_to_half() -> None:
    # 1 over the rounded √17 would be the neighbour, 0.24243
    assert run("rsqrt", array([17], "f16")).tolist() == [float(np.float16(1 / math.sqrt(17)))]
    assert float(1 / np.sqrt(np.float16(17))) != float(np.float16(1 / math.sqrt(17)))
    # x³ overflows f16 inside gelu_tanh, the result does not
    assert run("gelu_tanh", array([1000], "f16")).tolist() == [1000.0]


@pytest.mark.parametrize("name", ["exp", "tanh", "gelu", "sqrt", "sigmoid", "leaky_relu"])
@pytest.mark.parametrize("element", ["i8", "i64", "u16", "bool"])
def test_float_functions_of_integers_are_f32(name: str, element: str) -> None:
    x = array([0, 1, 1], element)
    expected = [UNARY[name](float(v)) for v in (0, 1, 1)]
    np.testing.assert_allclose(run(name, x), expected, rtol=1e-7)  # one rounding to f32: 6e-8
    assert shape_of(name, f"[batch, 3] {element}") == "[batch, 3] f32"


@pytest.mark.parametrize("name", ["neg", "abs", "square", "sign", "relu", "floor", "round"])
def test_integers_keep_their_type_and_wrap(name: str) -> None:
    wrapped = {"neg": [-128, -3, 3], "abs": [-128, 3, 3], "square": [0, 9, 9]}
    plain = {"sign": [-1, 1, -1], "relu": [0, 3, 0]}
    expected = {**wrapped, **plain}.get(name, [-128, 3, -3])
    np.testing.assert_array_equal(run(name, np.int8([-128, 3, -3])), np.int8(expected))
    assert run("neg", np.uint8([1]))[0] == 255
    assert run(name, np.array(5, np.int32)).shape == ()


def test_round_goes_to_even() -> None:
    same(run("round", array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4999])), [0, 2, 2, 0, -2, 2])


def test_questions() -> None:
    x = array([0, -0.0, 1, NAN, INF, -INF])
    assert run("is_nan", x).tolist() == [False, False, False, True, False, False]
    assert run("is_inf", x).tolist() == [False, False, False, False, True, True]
    assert run("is_finite", x).tolist() == [True, True, True, False, False, False]
    assert run("signbit", x).tolist() == [False, True, False, False, False, True]
    assert run("signbit", array([-1, 1, -0.0], "f8e4m3")).tolist() == [True, False, True]
    assert run("signbit", np.int8([-128, 0, 1])).tolist() == [True, False, False]
    assert run("signbit", np.uint8([255])).tolist() == [False]
    assert run("is_finite", np.int32([1])).tolist() == [True]
    assert run("logical_not", x).tolist() == [True, True, False, False, False, False]
    assert run("is_nan", np.int32([1])).tolist() == [False]
    assert run("is_inf", array([448, NAN], "f8e4m3")).tolist() == [False, False]
    assert run("logical_not", np.array([2j, 0j], np.complex64)).tolist() == [False, True]
    assert run("bitwise_not", np.uint8([0, 5])).tolist() == [255, 250]
    assert run("bitwise_not", np.array([True, False])).tolist() == [False, True]


def test_complex_arithmetic() -> None:
    z = np.array([3 + 4j, -1j], np.complex64)
    np.testing.assert_array_equal(run("abs", z), np.float32([5, 1]))
    np.testing.assert_array_equal(run("neg", z), -z)
    np.testing.assert_array_equal(run("mul", z, z), np.array([-7 + 24j, -1], np.complex64))
    np.testing.assert_array_equal(run("div", z, np.float32(2)), z / 2)
    assert run("eq", z, np.float32(0)).tolist() == [False, False]


def test_clamp() -> None:
    same(run("clamp", array([-5, 0.5, 9, NAN, INF]), low=-1.0, high=2.0), [-1, 0.5, 2, NAN, 2])
    same(run("clamp", array([-5, 9]), low=0), [0, 9])
    assert run("clamp", np.uint8([0, 7, 255]), low=-3, high=9).tolist() == [0, 7, 9]
    assert run("clamp", np.int64([-(2**63), 2**63 - 1])).tolist() == [-(2**63), 2**63 - 1]
    assert run("clamp", np.int8([3]), low=300.0).tolist() == [127]
    with pytest.raises(AttributeValueError, match="empty range"):
        run("clamp", array([1]), low=2, high=1)
    with pytest.raises(AttributeValueError, match="empty range"):
        run("clamp", array([1]), low=NAN)
    with pytest.raises(AttributeValueError, match="whole bounds"):
        run("clamp", np.int32([1]), high=6.5)


# -- cast -------------------------------------------------------------------------------------


def test_cast_to_integer_truncates_and_saturates() -> None:
    x = array([2.9, -2.9, NAN, INF, -INF, 1e30, -1e30, 255.5])
    limits = [(t, np.iinfo(DType.of(t).numpy)) for t in ("i8", "u8", "i32", "u32", "i64", "u64")]
    for element, info in limits:
        low, high = int(info.min), int(info.max)
        expected = [2, max(-2, low), 0, high, low, high, low, min(255, high)]
        assert run("cast", x, dtype=element).tolist() == expected, element
    # the greatest f64 below 2^63 fits, 2^63 does not
    edge = np.float64([2**63 - 1024, 2**63])
    assert run("cast", edge, dtype="i64").tolist() == [2**63 - 1024, 2**63 - 1]
    assert run("cast", np.array(-7.5, ml_dtypes.bfloat16), dtype="i16").tolist() == -7


def test_cast_between_other_types() -> None:
    assert run("cast", np.int32([300, -1]), dtype="u8").tolist() == [44, 255]
    assert run("cast", array([0, -0.0, NAN, 0.1]), dtype="bool").tolist() == [0, 0, 1, 1]
    assert run("cast", np.array([True, False]), dtype="f16").tolist() == [1.0, 0.0]
    same(run("cast", array([1e6, -1e6, 65519]), dtype="f16"), [INF, -INF, 65504])
    same(run("cast", array([1e6, 1e6]), dtype="f8e5m2"), [INF, INF])
    same(run("cast", array([1e6, 464]), dtype="f8e4m3"), [NAN, 448])  # no infinity in e4m3
    same(run("cast", array([1 + 2**-9, 1 + 3 * 2**-8]), dtype="bf16"), [1, 1 + 2**-6])
    assert run("cast", array([1.5]), dtype="c64").tolist() == [1.5 + 0j]
    with pytest.raises(DTypeError, match="complex"):
        run("cast", np.zeros(2, np.complex64), dtype="f32")


# -- shapes -----------------------------------------------------------------------------------


def test_empty_and_scalar_operands() -> None:
    for name in ("exp", "gelu", "erf", "neg", "is_nan", "sign"):
        assert run(name, np.zeros((0, 3), np.float32)).shape == (0, 3)
        assert run(name, np.float32(0.5)).shape == ()
    assert run("add", np.zeros((0, 1), np.float16), np.zeros((1, 3), np.float16)).shape == (0, 3)
    assert run("cast", np.zeros((0,), np.float32), dtype="i8").shape == (0,)
