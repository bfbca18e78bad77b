"""Functions of complex numbers: special values of C99 and identities, in c64 and c128."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rlx
from rlx.ir.ops.complex_functions import COMPLEX

INF, NAN, PI = math.inf, math.nan, math.pi
z = complex
DEVICES = ("cpu", "reference")


def apply(name: str, values: list[complex], element: str = "c128", device: str = "cpu"):
    g = rlx.Graph(name)
    g.set_outputs(g.apply(name, g.input("x", ["n"], element)))
    x = np.array(values, rlx.DType.of(element).numpy)
    return rlx.Session(device).compile(g).run(x=x)[0]


def same(found: complex, wanted: complex) -> bool:
    """Equal parts; NaN is NaN, and zeros have equal signs."""

    def part(a: float, b: float) -> bool:
        if math.isnan(b) or b == 0.0:
            return math.isnan(a) == math.isnan(b) and (b != b or str(a) == str(b))
        return math.isclose(a, b, rel_tol=1e-15)  # constants such as 3π/4, a rounding apart

    return part(found.real, wanted.real) and part(found.imag, wanted.imag)


# annex G of C99, where the sign of a zero or infinity is given
SPECIAL = {
    "exp": [(0j, 1 + 0j), (z(-INF, 2.0), z(-0.0, 0.0)), (z(INF, 0.0), z(INF, 0.0)),
            (z(INF, NAN), z(INF, NAN)), (z(NAN, 0.0), z(NAN, 0.0)),
            (z(1.0, INF), z(NAN, NAN)), (z(-INF, NAN), z(0.0, 0.0))],
    "log": [(z(-0.0, 0.0), z(-INF, PI)), (0j, z(-INF, 0.0)),
            (z(-INF, INF), z(INF, 3 * PI / 4)), (z(NAN, INF), z(INF, NAN)),
            (z(-INF, 1.0), z(INF, PI)), (z(INF, NAN), z(INF, NAN))],
    "sqrt": [(z(-0.0, 0.0), 0j), (z(1.0, INF), z(INF, INF)),
             (z(-INF, 1.0), z(0.0, INF)), (z(INF, 1.0), z(INF, 0.0)),
             (z(NAN, INF), z(INF, INF)), (z(-4.0, -0.0), z(0.0, -2.0))],
    "cosh": [(0j, 1 + 0j), (z(INF, 0.0), z(INF, 0.0)), (z(INF, NAN), z(INF, NAN)),
             (z(1.0, INF), z(NAN, NAN))],
    "sinh": [(z(-0.0, 0.0), z(-0.0, 0.0)), (z(INF, 0.0), z(INF, 0.0)),
             (z(NAN, 0.0), z(NAN, 0.0)), (z(1.0, INF), z(NAN, NAN))],
    "tanh": [(z(INF, 1.0), z(1.0, 0.0)), (z(NAN, 0.0), z(NAN, 0.0)),
             (z(1.0, INF), z(NAN, NAN)), (z(30.0, INF), z(NAN, NAN)),
             (z(INF, 2.0), z(1.0, 0.0)), (z(INF, -2.0), z(1.0, -0.0)),  # sin 4 < 0
             (z(-INF, 2.0), z(-1.0, 0.0)), (z(INF, INF), z(1.0, 0.0))],
    "acos": [(z(1.0, INF), z(PI / 2, -INF)), (z(-INF, 1.0), z(PI, -INF)),
             (z(INF, INF), z(PI / 4, -INF)), (z(0.0, NAN), z(PI / 2, NAN)),
             (z(NAN, INF), z(NAN, -INF))],
    "asinh": [(z(1.0, INF), z(INF, PI / 2)), (z(NAN, 0.0), z(NAN, 0.0)),
              (z(INF, INF), z(INF, PI / 4)), (z(INF, NAN), z(INF, NAN))],
    "acosh": [(z(-INF, INF), z(INF, 3 * PI / 4)), (z(NAN, INF), z(INF, NAN))],
    "atanh": [(z(1.0, 0.0), z(INF, 0.0)), (z(1.0, INF), z(0.0, PI / 2)),
              (z(INF, NAN), z(0.0, NAN)), (z(0.0, NAN), z(0.0, NAN))],
    "sign": [(0j, 0j), (z(INF, 2.0), z(1.0, 0.0)), (z(3.0, 4.0), z(0.6, 0.8))],
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_values_at_infinities_and_zeros(name: str) -> None:
    given, wanted = zip(*SPECIAL[name], strict=True)
    for x, found, value in zip(given, apply(name, list(given)), wanted, strict=True):
        if name == "exp" and x.real == -INF:
            assert abs(found) == 0.0  # the signs of its zeros are not specified
        else:
            assert same(found, value), (x, found, value)


def test_conjugates() -> None:
    """f(x̄) = f(x)̄ for every function of the table."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=40) * 5 + 1j * rng.normal(size=40) * 5
    for name in COMPLEX:
        assert np.array_equal(apply(name, list(x.conj())), apply(name, list(x)).conj()), name


def test_no_overflow_where_the_result_is_finite() -> None:
    tiny, huge = 1e-200, 1e300
    np.testing.assert_allclose(
        apply("sqrt", [z(huge, huge)]), np.sqrt(huge) * np.sqrt(1 + 1j), rtol=1e-15
    )
    np.testing.assert_allclose(apply("log", [z(huge, huge)]).real, math.log(huge) + math.log(2) / 2)
    np.testing.assert_allclose(
        apply("exp", [z(710.0, PI / 2)]).imag, math.exp(709) * math.e, rtol=1e-13
    )
    np.testing.assert_allclose(apply("abs", [z(3 * huge, 4 * huge)]), 5 * huge, rtol=1e-15)
    np.testing.assert_allclose(apply("abs", [z(3 * tiny, 4 * tiny)]), 5 * tiny, rtol=1e-15)
    np.testing.assert_allclose(apply("log1p", [z(tiny, tiny)]), [z(tiny, tiny)], rtol=1e-15)
    np.testing.assert_allclose(
        apply("atanh", [z(1.0, tiny)]).real, (math.log(2) - math.log(tiny)) / 2
    )


@pytest.mark.parametrize("device", DEVICES)
def test_powers(device: str) -> None:
    g = rlx.Graph("power")
    g.set_outputs(g.pow(g.input("a", ["n"], "c128"), g.input("b", ["n"], "c128")))
    a = np.array([0, 0, 2j, 1 + 2j, -1, 5], np.complex128)
    b = np.array([0, 2, 0, 2, 0.5, 1], np.complex128)
    (found,) = rlx.Session(device).compile(g).run(a=a, b=b)
    wanted = np.array([1, 0, 1, -3 + 4j, 1j, 5])
    # e^(b·ln a) of a unit number is off by a rounding of π/2
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-16)


def test_mixed_types_meet_in_the_wider_one() -> None:
    g = rlx.Graph("mixed")
    a, b = g.input("a", ["n"], "c64"), g.input("b", ["n"], "f64")
    g.set_outputs(a * b, g.where(g.gt(b, 1.0), a, b), g.sum(a * b, axis=0))
    x, y = np.array([1 + 2j, 3j], np.complex64), np.array([0.1, 2.0])
    product, chosen, total = rlx.Session("cpu").compile(g).run(a=x, b=y)
    assert product.dtype == chosen.dtype == total.dtype == np.complex128
    np.testing.assert_array_equal(product, x * y)
    np.testing.assert_array_equal(chosen, [0.1, 3j])
    np.testing.assert_allclose(total, (x * y).sum(), rtol=1e-15)
