"""Functions that regions compute by their formulas, over numbers of every size, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, Native
from region_support import named
from test_math import errors, samples, worst

from rlx.ir.graph import Graph

# name: reference, bound in ulp (of the table of cases), the same for f32 and f64
FUNCTIONS = {
    "asin": (np.arcsin, 5),
    "acos": (np.arccos, 5),
    "atan": (np.arctan, 3),
    "sinh": (np.sinh, 4),
    "cosh": (np.cosh, 4),
    "asinh": (np.arcsinh, 4),
    "acosh": (np.arccosh, 5),
    "atanh": (np.arctanh, 4),
    "exp2": (np.exp2, 2),
    "log2": (np.log2, 3),
    "log10": (np.log10, 3),
    "hypot": (np.hypot, 2),
    "copysign": (np.copysign, 0),
}


def operands(name: str, dtype: type) -> list[np.ndarray]:
    x = samples(dtype)
    near_one = 1 + np.random.default_rng(3).uniform(-1, 1, 9999) ** 9
    x = np.concatenate([x, near_one.astype(dtype), -near_one.astype(dtype)])
    if name not in ("hypot", "copysign"):
        return [x]
    with np.errstate(all="ignore"):
        near = x * dtype(0.7)  # of like size, where both operands matter
    return [np.concatenate([x, x]), np.concatenate([near, x[::-1]])]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_error_and_signs(name: str, dtype: type) -> None:
    reference, bound = FUNCTIONS[name]
    arrays = operands(name, dtype)
    g = Graph()
    xs = [g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)]
    (got,) = Native(g.set_outputs(g.apply(name, *xs)), HOST, 1, {}).run(named(arrays), None)
    wider = np.float64 if dtype is np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        expected = reference(*[a.astype(wider) for a in arrays])
    error = errors(got, expected)
    assert error.max() <= bound, worst(error, arrays[0])
    signs = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[signs]), np.signbit(expected[signs]))


def test_logarithm_of_powers_of_two_is_exact() -> None:
    exponents = np.arange(-149, 128)
    x = np.ldexp(np.float64(1), exponents).astype(np.float32)
    g = Graph()
    graph = g.set_outputs(g.log2(g.input("x0", x.shape)))
    np.testing.assert_array_equal(Native(graph, HOST, 1, {}).run(named([x]), None)[0], exponents)
