"""rlx.numpy.fft against NumPy, in f64, at once and inside rlx.jit."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.numpy import fft

NORMS = ("backward", "ortho", "forward")


def close(found: object, wanted: np.ndarray, eps: float) -> None:
    """log n roundings of the norm, three transforms where a length has a large prime factor."""
    got = np.asarray(found)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert np.linalg.norm(got - wanted) <= 24 * eps * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@pytest.mark.parametrize("part", [np.float32, np.float64])
def test_one_axis(name: str, part: type) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 9, 3)).astype(part)
    if name not in ("rfft", "ihfft"):
        x = x + np.asarray(1j * rng.normal(size=x.shape), np.result_type(part, np.complex64))
    for norm in NORMS:
        for n in (None, 1, 4, 7, 12, 67):
            how = {"n": n, "axis": 1, "norm": norm}
            wanted = getattr(np.fft, name)(x, **how)
            function = lambda x, how=how: getattr(fft, name)(x, **how)  # noqa: E731
            for run in (function, rlx.jit(function)):
                close(run(x), wanted, float(np.finfo(part).eps))


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_several_axes(name: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 4, 5))
    x = x if name == "rfftn" else x + 1j * rng.normal(size=x.shape)
    for how in ({}, {"axes": (0, 2)}, {"s": (4, 6), "axes": (1, 0)}, {"norm": "ortho"}):
        close(getattr(fft, name)(x, **how), getattr(np.fft, name)(x, **how), 2.0**-52)
    shorter = {"s": (3, 5)}
    last = {"axes": (1, 2)}
    close(getattr(fft, name)(x, **shorter), getattr(np.fft, name)(x, **shorter, **last), 2.0**-52)


def test_lengths_stay_symbolic() -> None:
    @rlx.jit
    def low_pass(x):
        spectrum = fft.rfft(x)
        return fft.irfft(spectrum * (fft.rfftfreq(x.shape[-1]) < 0.2), n=x.shape[-1])

    for n in (8, 10, 30):
        x = np.random.default_rng(n).normal(size=(2, n))
        wanted = np.fft.irfft(np.fft.rfft(x) * (np.fft.rfftfreq(n) < 0.2), n=n)
        close(low_pass(x), wanted, 2.0**-52)
    assert len(low_pass.variants()) == 1


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_frequencies(n: int) -> None:
    for name in ("fftfreq", "rfftfreq"):
        wanted = getattr(np.fft, name)(n, 0.5)
        np.testing.assert_array_equal(
            np.asarray(getattr(fft, name)(n, d=0.5, dtype="float64")), wanted
        )
        traced = rlx.jit(
            lambda x, name=name: getattr(fft, name)(x.shape[0], d=0.5, dtype="float64")
        )
        np.testing.assert_allclose(np.asarray(traced(np.zeros(n))), wanted, rtol=1e-15)
    x = np.arange(3 * n).reshape(3, n)
    for axes in (None, 0, (0, 1)):
        for name in ("fftshift", "ifftshift"):
            function = lambda x, name=name, axes=axes: getattr(fft, name)(x, axes=axes)  # noqa: E731
            for run in (function, rlx.jit(function)):
                np.testing.assert_array_equal(
                    np.asarray(run(x)), getattr(np.fft, name)(x, axes=axes)
                )


def test_errors_are_typed() -> None:
    with pytest.raises(TypeError, match="no transform"):
        fft.rfft(np.zeros(3, np.complex64))
    with pytest.raises(ValueError, match="no elements"):
        fft.fft(np.zeros(0))
    with pytest.raises(ValueError, match="normalisation"):
        fft.fft(np.zeros(3), norm="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as many sizes"):
        fft.fftn(np.zeros((3, 3)), s=(2,), axes=(0, 1))
