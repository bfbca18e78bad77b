"""Transforms against the sums that define them, systems against their residuals."""

from __future__ import annotations

import numpy as np
import pytest
from applied import apply, inferred, normal

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.op import lookup
from rlx.ir.shape import Shape


def dft(x: np.ndarray, sign: int = -1) -> np.ndarray:
    """Σ_j x[j]·exp(±2πi·jk/n) along the last axis, in float64."""
    n = x.shape[-1]
    out = np.zeros(x.shape, np.complex128)
    for k in range(n):
        for j in range(n):
            out[..., k] += x[..., j] * np.exp(sign * 2j * np.pi * j * k / n)
    return out


def complex_normal(seed: int, *shape: int) -> np.ndarray:
    return (normal(seed, *shape) + 1j * normal(seed + 100, *shape)).astype(np.complex64)


# results are below 32 and rounded once to c64 (the reference sums in f64): 32 · 2⁻²⁴
ROUNDING = 2e-6


@pytest.mark.parametrize("n", [1, 2, 7, 8, 12])
def test_fft_is_the_sum(n: int) -> None:
    x = complex_normal(0, 3, n)
    assert np.abs(apply("fft", [x]) - dft(x)).max() < ROUNDING
    assert np.abs(apply("fft", [x], inverse=True) - dft(x, 1) / n).max() < ROUNDING
    columns = apply("fft", [x.T.copy()], axis=0)
    assert np.array_equal(columns, apply("fft", [x]).T)


def test_fft_of_real_and_half_precision_tensors() -> None:
    x = normal(1, 2, 6)
    assert np.abs(apply("fft", [x]) - dft(x)).max() < ROUNDING
    half = x.astype(np.float16)
    assert np.abs(apply("fft", [half]) - dft(half.astype(np.float64))).max() < ROUNDING


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_rfft_is_the_first_half_and_irfft_undoes_it(n: int) -> None:
    x = normal(2, 3, n)
    terms = apply("rfft", [x], dims=[["b", "n"]])
    assert terms.shape == (3, n // 2 + 1)
    assert np.abs(terms - dft(x)[..., : n // 2 + 1]).max() < ROUNDING
    assert np.abs(apply("irfft", [terms], n=n) - x).max() < ROUNDING


@pytest.mark.parametrize("n", [4, 5])
def test_irfft_is_the_sum_over_the_mirrored_terms(n: int) -> None:
    terms = complex_normal(3, 2, n // 2 + 1)
    whole = np.zeros((2, n), np.complex128)
    whole[:, 0] = terms[:, 0].real
    for k in range(1, n // 2 + 1):
        value = terms[:, k].real if 2 * k == n else terms[:, k]
        whole[:, k] = value
        whole[:, n - k] = np.conj(value)
    assert np.abs(apply("irfft", [terms], n=n) - (dft(whole, 1) / n).real).max() < ROUNDING


def test_symbolic_lengths() -> None:
    assert str(inferred("rfft", ["b", "n"])) == "[b, ((n) // 2) + 1] c64"
    assert str(inferred("rfft", ["n", 4], axis=0)) == "[((n) // 2) + 1, 4] c64"
    assert str(inferred("irfft", Shape(["n + 1"], "c64"), n="2 * n")) == "[2 * n] f32"
    x = normal(0, 6)
    terms = np.fft.rfft(x).astype(np.complex64)
    back = apply("irfft", [terms], dims=[["n + 1"]], n="2 * n")
    assert np.abs(back - x).max() < ROUNDING


def test_parts_of_complex_numbers() -> None:
    re, im = normal(0, 3, 1), normal(1, 4)
    z = apply("complex", [re, im])
    assert z.dtype == np.complex64
    assert np.array_equal(apply("real", [z]), np.broadcast_to(re, (3, 4)))
    assert np.array_equal(apply("imag", [z]), np.broadcast_to(im, (3, 4)))
    edge = apply("complex", [np.float32([np.inf]), np.float32([np.inf])])
    assert np.isposinf(edge.real[0])
    assert np.isposinf(edge.imag[0])


def test_solve_against_cramer() -> None:
    a, b = normal(0, 5, 2, 2), normal(1, 5, 2, 3)
    x = apply("solve", [a, b], dims=[["n", 2, 2], ["n", 2, 3]])
    wide = a.astype(np.float64)
    det = wide[:, 0, 0] * wide[:, 1, 1] - wide[:, 0, 1] * wide[:, 1, 0]
    first = (b[:, 0] * wide[:, 1, 1, None] - b[:, 1] * wide[:, 0, 1, None]) / det[:, None]
    second = (b[:, 1] * wide[:, 0, 0, None] - b[:, 0] * wide[:, 1, 0, None]) / det[:, None]
    for got, exact in ((x[:, 0], first), (x[:, 1], second)):
        # solved in f64, rounded once
        assert np.all(np.abs(got - exact) <= np.abs(exact) * 2.0**-23)


def test_solve_larger_broadcast_and_permuted() -> None:
    a, b = normal(2, 1, 6, 6), normal(3, 4, 6, 2)
    a[0, 0, 0] = 0.0  # needs a row exchange
    x = apply("solve", [a, b])
    assert x.shape == (4, 6, 2)
    residual = a.astype(np.float64) @ x - b
    # x is rounded to f32: each row of the residual has 6 products off by at most |a|·|x|·2⁻²⁴
    bound = np.abs(a.astype(np.float64)) @ np.abs(x) * 2.0**-23
    assert np.all(np.abs(residual) <= bound)


def test_a_singular_system_is_nan_and_leaves_the_others_alone() -> None:
    a = np.float32([[[1, 2], [2, 4]], [[2, 0], [0, 4]]])
    b = np.float32([[[1], [1]], [[2], [4]]])
    x = apply("solve", [a, b])
    assert np.isnan(x[0]).all()
    assert x[1].ravel().tolist() == [1, 1]
    assert apply("solve", [np.zeros((0, 0), np.float32), np.zeros((0, 2), np.float32)]).size == 0


def test_errors() -> None:
    with pytest.raises(DTypeError, match="has no transform"):
        inferred("rfft", Shape([4], "c64"))
    with pytest.raises(DTypeError, match="has no transform"):
        inferred("fft", Shape([4], "i32"))
    with pytest.raises(ShapeError, match="at least one element"):
        inferred("fft", [2, 0])
    with pytest.raises(ShapeError, match="axis out of range"):
        inferred("fft", [4], axis=1)
    with pytest.raises(ShapeError, match="terms for 8 points"):
        inferred("irfft", Shape([4], "c64"), n=8)
    with pytest.raises(DTypeError, match="must be complex"):
        inferred("irfft", [5], n=8)
    with pytest.raises(AttributeValueError, match=r"\[irfft.n\] out of range"):
        inferred("irfft", Shape([1], "c64"), n=0)
    with pytest.raises(DTypeError, match="must be complex"):
        inferred("real", [5])
    with pytest.raises(DTypeError, match="im has the wrong type"):
        inferred("complex", [5], Shape([5], "f16"))
    with pytest.raises(ShapeError, match="columns and rows of a"):
        inferred("solve", [3, 4], [4, 1])
    with pytest.raises(ShapeError, match="rows of b"):
        inferred("solve", [3, 3], [4, 1])
    with pytest.raises(ShapeError, match="not matrices"):
        inferred("solve", [3, 3], [3])
    with pytest.raises(DTypeError, match="a: unsupported element type"):
        inferred("solve", Shape([3, 3], "i32"), [3, 1])


def test_costs() -> None:
    assert lookup("fft")().cost([Shape([8])], [Shape([8], "c64")]).flops == 5 * 8 * 3
    solve = lookup("solve")()
    a, b = Shape([2, 3, 3]), Shape([2, 3, 4])
    assert solve.cost([a, b], [solve.infer(a, b)]).flops == 2 * (18 + 72)
