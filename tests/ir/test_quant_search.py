"""Encoders that search for scales: nearest codes, and no more error than llama.cpp leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.errors import NumericsError
from rlx.ir.quant.scheme import QuantScheme, decode, encode

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))
from quant_tensors import TYPES, WEIGHTED, importance, tensors  # noqa: E402

SEARCHED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
PEER = json.loads((GOLDENS / "quantize.json").read_text(encoding="utf-8"))
RUN = {"Q2_K": 16, "Q3_K": 16, "Q4_K": 32, "Q5_K": 32, "Q6_K": 16}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", [*tensors()])
def test_error_against_llama_cpp(name: str, kind: str) -> None:
    """The root mean square error is at most 2 % above that of its quantiser."""
    scheme, w = QuantScheme.parse(name), tensors()[kind]
    back = decode(scheme, *encode(scheme, w)).astype(np.float64)
    assert np.sqrt(np.mean((back - w) ** 2)) <= 1.02 * PEER["plain"][name][kind]


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("kind", [*tensors()])
def test_weighted_error_against_llama_cpp(name: str, kind: str) -> None:
    """So is the weighted one, with an importance for each column."""
    scheme, w, by = QuantScheme.parse(name), tensors()[kind], importance()
    back = decode(scheme, *encode(scheme, w, importance=by)).astype(np.float64)
    assert np.sqrt(np.mean((back - w) ** 2 * by)) <= 1.02 * PEER["weighted"][name][kind]


@pytest.mark.parametrize("name", SEARCHED)
def test_codes_are_the_nearest(name: str) -> None:
    """A weight is at most half a step off, or beyond the last level of its run."""
    scheme, w = QuantScheme.parse(name), tensors()["normal"]
    back = decode(scheme, *encode(scheme, w)).astype(np.float64).reshape(-1, RUN[name])
    want = w.reshape(-1, RUN[name])
    low, high = back.min(axis=1, keepdims=True), back.max(axis=1, keepdims=True)
    # A step of the run: the least distance of two values that occur in it, some multiple of one.
    ordered = np.sort(back, axis=1)
    gaps = np.diff(ordered, axis=1)
    step = np.where(gaps > 1e-6 * (high - low), gaps, np.inf).min(axis=1, keepdims=True)
    inside = (want >= low) & (want <= high) & np.isfinite(step)
    error = np.abs(back - want)
    # codes are found with the inverse of the scale: some f32 roundings of up to 63 steps
    assert np.all(error[inside] <= (np.broadcast_to(step, want.shape)[inside]) * (0.5 + 2**-10))


@pytest.mark.parametrize("name", SEARCHED)
def test_what_a_scheme_can_hold_comes_back(name: str) -> None:
    """Weights on a grid that all runs share: exact, whatever else the search has tried."""
    bits = int(name[1])
    scheme = QuantScheme.parse(name)
    q = np.random.default_rng(3).integers(0, 1 << bits, (4, 256)).astype(np.float32)
    q[:, :: RUN[name]] = 0  # every run has both ends
    q[:, 1 :: RUN[name]] = (1 << bits) - 1
    centred = name in ("Q3_K", "Q6_K")
    w = (q - (1 << (bits - 1) if centred else 0)) * np.float32(0.25)
    back = decode(scheme, *encode(scheme, w))
    # d is 0.25 over 15, 63, 32 or 128 in f16: 2^-11 of the largest weight, and of its offset
    np.testing.assert_allclose(back, w, rtol=0, atol=2**-10 * np.abs(w).max())


@pytest.mark.parametrize("name", SEARCHED)
def test_constant_tiny_and_empty_blocks(name: str) -> None:
    scheme = QuantScheme.parse(name)
    for value in (0.0, 0.5, -0.5):
        w = np.full((1, 256), value, np.float32)
        # one level of f16 scales; negative ones are a minimum, or the lowest code
        np.testing.assert_allclose(decode(scheme, *encode(scheme, w)), w, rtol=2**-9)
    tiny = np.full((1, 256), 1e-45, np.float32)
    assert np.all(decode(scheme, *encode(scheme, tiny)) <= 1e-7)
    assert encode(scheme, np.zeros((0, 256), np.float32)).data.shape == (0, scheme.row_bytes(256))


@pytest.mark.parametrize("name", SEARCHED)
def test_what_cannot_be_held(name: str) -> None:
    scheme = QuantScheme.parse(name)
    w = np.ones((1, 256), np.float32)
    w[0, 3] = np.nan
    with pytest.raises(NumericsError, match="1 such weights of 256"):
        encode(scheme, w)
    with pytest.raises(NumericsError, match="does not fit f16"):
        encode(scheme, np.linspace(-3e38, 3e38, 256, dtype=np.float32)[None])


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "int8", "int8_b32_asym", "fp8_e4m3"])
def test_threads_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w = QuantScheme.parse(name), tensors()["heavy"]
    want = encode(scheme, w)
    monkeypatch.setattr("rlx.ir.quant.scheme._WEIGHTS_PER_TASK", 5000)  # pieces of 4 rows
    for got, part in zip(encode(scheme, w, threads=3), want, strict=True):
        np.testing.assert_array_equal(got, part)
