"""Encoders of the IQ, TQ and FP4 types, and the importance that every searching encoder takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import gguf.quants as gq
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.errors import NumericsError, OptionError, ShapeError
from rlx.ir.quant.scheme import QuantScheme, decode, encode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "goldens"))
from quant_tensors import importance, tensors

CALIBRATED = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"]
FREE = ["IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
TYPES = CALIBRATED + FREE


def packed(name: str, w: np.ndarray, by: Any = None) -> np.ndarray:
    """The rows of a type; where it needs an importance, equal ones for all."""
    if by is None and name in CALIBRATED:
        by = np.ones(w.shape[-1])
    return encode(QuantScheme.parse(name), w, importance=by).data


@pytest.mark.parametrize("name", TYPES)
def test_other_readers_decode_the_same(name: str) -> None:
    scheme, w = QuantScheme.parse(name), tensors()["heavy"][:8]
    rows = packed(name, w, importance())
    theirs = gq.dequantize(rows, gguf.GGMLQuantizationType(scheme.ggml_type))
    np.testing.assert_array_equal(decode(scheme, rows), theirs)
    # and they are those weights: even at 1.56 bits the error is below half of what zeros leave
    assert np.mean((theirs - w) ** 2 * importance()) < 0.5 * np.mean(w**2 * importance())


def _unpacked_scales(name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales of groups of eight, and their sign bytes, by the layout of the two types."""
    blocks = rows.reshape(-1, 82 if name == "IQ2_S" else 110)
    d = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    if name == "IQ2_S":  # d, qs 32, signs 32, qh 8, scales 8
        nibbles, signs = blocks[:, 74:], blocks[:, 34:66]
    else:  # d, qs 64, qh 8, signs 32, scales 4
        nibbles, signs = blocks[:, 106:], blocks[:, 74:106]
    whole = np.stack([nibbles & 15, nibbles >> 4], axis=2).reshape(len(blocks), -1)
    scale = d * (0.5 + whole) * 0.25 if name == "IQ2_S" else d * (1 + 2 * whole)
    return np.repeat(scale, 32 // whole.shape[1], axis=1), signs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["IQ2_S", "IQ3_S"])
def test_points_are_the_best_of_the_codebook(name: str, weighted: bool) -> None:
    """Every group of weights has the point that loses least, of all that there are."""
    w, by = tensors()["normal"][:4], importance() if weighted else np.ones(1024)
    rows = packed(name, w, by if weighted else None)
    kind = getattr(gq, name)
    kind.init_grid()
    dims = kind.grid_shape[1]
    points = kind.grid.reshape(-1, dims).astype(np.float64)
    scale, _ = _unpacked_scales(name, rows)
    scale = np.repeat(scale.reshape(-1), 8 // dims)[:, None]
    x = np.abs(w).reshape(-1, dims).astype(np.float64)
    g = np.broadcast_to(by, w.shape).reshape(-1, dims)
    back = np.abs(decode(QuantScheme.parse(name), rows)).reshape(-1, dims)
    loss = (g * (x - back) ** 2).sum(axis=1)
    least = np.full(len(x), np.inf)
    for point in points:
        least = np.minimum(least, (g * (x - scale * point) ** 2).sum(axis=1))
    # the losses of all points are sums of f32: some 1e-6 of the weights' own squares
    assert np.all(loss <= least + 1e-5 * (g * x**2).sum(axis=1))


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_ternary_weights_come_back(name: str) -> None:
    q = np.random.default_rng(2).integers(-1, 2, (3, 512))
    w = (q * 0.0375).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decode(QuantScheme.parse(name), packed(name, w)), w)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_the_best_ternary_scale(name: str) -> None:
    """No scale, however many weights it rounds away, leaves less error."""
    w, by = tensors()["heavy"][:2, :256], importance()[:256].astype(np.float64)
    back = decode(QuantScheme.parse(name), packed(name, w, by))
    for row, got in zip(w.astype(np.float64), back, strict=True):
        least = np.inf
        for d in np.linspace(0.01, 1, 400) * np.abs(row).max():
            q = np.clip(np.rint(row / d), -1, 1)
            fitted = (by * row * q).sum() / max((by * q * q).sum(), 1e-30)
            least = min(least, (by * (row - fitted * q) ** 2).sum())
        # d is an f16: 2^-11 of it, in the error to second order
        assert (by * (row - got) ** 2).sum() <= least * (1 + 1e-5)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_fp4_values_come_back(name: str) -> None:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rng = np.random.default_rng(4)
    w = rng.choice(np.concatenate([values, -values]), (4, 256)).astype(np.float32)
    w[:, ::16] = 6  # every block has the peak
    w[1] *= 8
    w[2] *= np.float32(2**-6)
    np.testing.assert_array_equal(decode(QuantScheme.parse(name), packed(name, w)), w)


def test_nvfp4_cannot_hold_what_e4m3_cannot() -> None:
    with pytest.raises(NumericsError, match=r"NVFP4 does not fit e4m3.*got 3000.*2688"):
        packed("NVFP4", np.full((1, 64), 3000, np.float32))


# -- any weights ----------------------------------------------------------------------------------


@st.composite
def rows_of_weights(draw: st.DrawFn) -> np.ndarray:
    """Rows of 256: zeros, constants, one weight, noise of any size that f16 scales hold."""
    kind = draw(st.sampled_from(["zero", "constant", "single", "normal", "heavy", "one sign"]))
    size = np.float32(10.0 ** draw(st.integers(-45, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    row = np.zeros(256)
    if kind == "constant":
        row[:] = draw(st.sampled_from([-1, 1]))
    elif kind == "single":
        row[draw(st.integers(0, 255))] = draw(st.sampled_from([-1, 1]))
    elif kind != "zero":
        row = rng.standard_normal(256) if kind != "heavy" else rng.standard_t(2, 256).clip(-50, 50)
        row = np.abs(row) if kind == "one sign" else row
    return (row * size).astype(np.float32)[None]


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=12, deadline=None)
@given(w=rows_of_weights(), weighted=st.booleans())
def test_any_weights(name: str, w: np.ndarray, weighted: bool) -> None:
    """Finite, of no more error than zeros would leave, and zeros stay near zero."""
    if name == "NVFP4":  # whose scales end at 448: greater weights are refused
        w = w.clip(-6 * 448, 6 * 448)
    by = np.resize(importance(), 256) if weighted else np.ones(256)
    by = by / by.mean()
    back = decode(QuantScheme.parse(name), packed(name, w, by)).astype(np.float64)
    assert np.isfinite(back).all()
    lost, whole = (by * (back - w) ** 2).sum(), (by * w.astype(np.float64) ** 2).sum()
    # an f16 scale that vanishes, or is subnormal, loses what it holds: 127 · 6e-8 at most
    assert lost <= whole * 1.001 + (by * 1e-5**2).sum()
    if not w.any():
        assert not back.any()


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("sign", [-1, 1])
def test_weights_near_the_least_normal_number(name: str, sign: int) -> None:
    """One weight among zeros, whose inverse f32 holds, but not every multiple of it."""
    w = np.zeros((12, 256), np.float32)
    w[:, 17] = sign * 2.0 ** np.arange(-132.0, -120.0)
    back = decode(QuantScheme.parse(name), packed(name, w))
    if name == "MXFP4":  # its scale is a power of two down to 2^-127
        assert (np.abs(back - w) <= np.abs(w)).all()
    else:
        assert not back.any()


@pytest.mark.parametrize("name", TYPES)
def test_what_cannot_be_held(name: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        w = np.ones((2, 256), np.float32)
        w[1, 3] = bad
        with pytest.raises(NumericsError, match="1 such weights of 512"):
            packed(name, w)
    for size in (3e38, 1e20, 1e9):
        huge = np.linspace(-size, size, 256, dtype=np.float32)[None]
        if name == "MXFP4":  # a step of 2/6 at most, up to the peak
            np.testing.assert_allclose(decode(QuantScheme.parse(name), packed(name, huge)), huge,
                                       rtol=1 / 3, atol=size / 12)  # fmt: skip
            continue
        with pytest.raises(NumericsError, match="does not fit"):
            packed(name, huge)


@pytest.mark.parametrize("name", [*TYPES, "Q2_K"])
def test_threads_and_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w = QuantScheme.parse(name), tensors()["heavy"][:20]
    want = encode(scheme, w, importance=importance()).data
    monkeypatch.setattr("rlx.ir.quant.scheme._WEIGHTS_PER_TASK", 3000)  # two rows a task
    got = encode(scheme, w, importance=importance(), threads=2).data
    np.testing.assert_array_equal(got, want)


# -- the importance -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALIBRATED)
def test_types_that_need_an_importance(name: str) -> None:
    with pytest.raises(OptionError, match=rf"{name} needs an importance matrix(.|\n)*--calibrate"):
        encode(QuantScheme.parse(name), np.ones((1, 256), np.float32))


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q2_K", "Q6_K", "IQ4_XS", "IQ3_XXS"])
def test_important_columns_are_more_exact(name: str) -> None:
    """A factor for all columns changes nothing; a large one for a few makes them exact."""
    scheme, w = QuantScheme.parse(name), tensors()["normal"][:8]
    by = np.ones(1024)
    by[::32] = 200
    plain, even, uneven = (
        decode(scheme, encode(scheme, w, importance=i).data)
        for i in (None if name[0] != "Q" else np.ones(1024), np.full(1024, 7.5), by)
    )
    if name[0] == "Q":
        np.testing.assert_array_equal(even, plain)

    def lost(back: np.ndarray) -> float:
        return float(np.mean((back - w)[:, ::32].astype(np.float64) ** 2))

    assert lost(uneven) < 0.5 * lost(even)


def test_experts_have_importances_of_their_own() -> None:
    scheme, w = QuantScheme.parse("IQ3_S"), tensors()["normal"].reshape(2, 32, 1024)
    by = np.stack([importance(), importance()[::-1]])
    both = encode(scheme, w, importance=by).data
    for part, one, i in zip(both, w, by, strict=True):
        np.testing.assert_array_equal(part, encode(scheme, one, importance=i).data)


def test_columns_that_nothing_reaches() -> None:
    """Zeros, in some columns or in all, are no division by zero."""
    scheme, w = QuantScheme.parse("IQ2_XXS"), tensors()["normal"][:2]
    some = importance().copy()
    some[:256] = 0
    assert np.isfinite(decode(scheme, encode(scheme, w, importance=some).data)).all()
    ones = encode(scheme, w, importance=np.ones(1024)).data
    np.testing.assert_array_equal(encode(scheme, w, importance=np.zeros(1024)).data, ones)


@pytest.mark.parametrize(
    "by, error, message",
    [
        (np.ones(512), ShapeError, r"got \[512\]; expected \[1024\]"),
        (np.ones((3, 1024)), ShapeError, "leading axes"),
        (np.ones((1, 1, 1, 1024)), ShapeError, "leading axes"),
        (np.float64(1), ShapeError, r"got \[\]"),
        (np.full(1024, np.nan), NumericsError, "1024 values that are none"),
        (np.full(1024, np.inf), NumericsError, "1024 values that are none"),
        (np.full(1024, -1.0), NumericsError, "finite, 0 or more"),
    ],
)
def test_importances_that_do_not_fit(by: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        encode(QuantScheme.parse("Q4_K"), tensors()["normal"][:2], importance=by)
