"""Conversions, over every value of the small types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from kernel_support import apply

from rlx.errors import CodegenError
from rlx.llvm import storage
from rlx.llvm.builder import Module, bf16, f16, f32, f64, i1, i8, i16, i32, i64
from rlx.llvm.elf import ObjectFile
from rlx.llvm.jit import Unit
from rlx.llvm.target import Target

ALL16 = np.arange(1 << 16, dtype=np.uint16)
ALL8 = np.arange(256, dtype=np.uint8)
HALVES = {f16: np.float16, bf16: ml_dtypes.bfloat16}


def same(got, expected):
    """Equal bits, but any NaN equals any other."""
    got, expected = np.asarray(got), np.asarray(expected)
    bits = f"u{got.dtype.itemsize}"
    equal = got.view(bits) == expected.view(bits)
    with np.errstate(invalid="ignore"):
        both = np.isnan(got.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    bad = np.flatnonzero(~(equal | both))
    assert bad.size == 0, [(got[i], expected[i]) for i in bad[:5]]


def narrowing_inputs():
    """f32 around every rounding boundary of f16, bf16 and fp8, all magnitudes, special values."""
    rng = np.random.default_rng(1)
    centers = np.concatenate(
        [
            ALL16.view(np.float16).astype(np.float32),
            (ALL16.astype(np.uint32) << 16).view(np.float32),
        ]
    )
    with np.errstate(all="ignore"):
        middles = (centers[1:].astype(np.float64) + centers[:-1]).astype(np.float32) / 2
    x = np.concatenate([centers, middles])
    steps = np.array([-1, 0, 1], np.int32)
    around = (x.view(np.int32)[:, None] + steps).ravel().view(np.float32)
    return np.concatenate([around, rng.integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)])


@pytest.mark.parametrize("kind", [f16, bf16], ids=str)
def test_halves_widen_exactly(target, kind):
    expected = ALL16.view(HALVES[kind]).astype(np.float32)
    got = apply(target, lambda x: x.to(f32), f32, ALL16, types=(kind,), dtype=np.float32)
    same(got, expected)


@pytest.mark.parametrize("kind", [f16, bf16], ids=str)
def test_halves_round_to_nearest_even(target, kind):
    x = narrowing_inputs()
    with np.errstate(all="ignore"):
        expected = x.astype(HALVES[kind])
    got = apply(target, lambda v: v.to(kind), kind, x, types=(f32,), dtype=np.uint16)
    same(got.view(HALVES[kind]), expected)


@pytest.mark.parametrize("kind", [f16, bf16], ids=str)
def test_doubles_round_once(target, kind):
    """A double just beside the middle of two halves must not be rounded to the middle first."""
    with np.errstate(all="ignore"):
        centers = ALL16.view(HALVES[kind]).astype(np.float64)
        middles = (centers[1:] + centers[:-1]) / 2
        middles = middles[np.isfinite(middles) & (centers[1:] * centers[:-1] > 0)]
    x = np.concatenate([middles * (1 + e) for e in (-1e-14, 0, 1e-14)])
    got = apply(target, lambda v: v.to(kind), kind, x, types=(f64,), dtype=np.uint16).view(
        HALVES[kind]
    )
    below, exact, above = got.astype(np.float64).reshape(3, -1)
    low = np.minimum(np.abs(below), np.abs(above))
    spread = np.abs(np.abs(below) - np.abs(above))
    assert (spread > 0).all(), "both sides of a middle must go to different neighbours"
    assert (np.abs(below) < np.abs(above)).all()
    assert ((np.abs(exact) == low) | (np.abs(exact) == low + spread)).all()
    even = exact.astype(HALVES[kind]).view(np.uint16) % 2 == 0
    assert even.all()


def test_fp8_decodes_exactly(target):
    for decode, kind in (
        (storage.from_e4m3, ml_dtypes.float8_e4m3fn),
        (storage.from_e5m2, ml_dtypes.float8_e5m2),
    ):
        got = apply(target, decode, f32, ALL8, types=(i8,), dtype=np.float32, lanes=16)
        same(got, ALL8.view(kind).astype(np.float32))


def test_fp8_rounds_to_nearest_even(target):
    x = narrowing_inputs()
    for encode, kind in (
        (storage.to_e4m3, ml_dtypes.float8_e4m3fn),
        (storage.to_e5m2, ml_dtypes.float8_e5m2),
    ):
        with np.errstate(all="ignore"):
            expected = x.astype(kind)
        got = apply(target, encode, i8, x, types=(f32,), dtype=np.uint8)
        same(got.view(kind), expected)


INTS = {i8: np.int8, i16: np.int16, i32: np.int32, i64: np.int64}


@pytest.mark.parametrize("source", INTS, ids=str)
@pytest.mark.parametrize("wanted", INTS, ids=str)
def test_integers(target, source, wanted):
    rng = np.random.default_rng(2)
    info = np.iinfo(INTS[source])
    x = rng.integers(info.min, info.max, 256, INTS[source], endpoint=True)
    got = apply(target, lambda v: v.to(wanted), wanted, x, types=(source,), dtype=INTS[wanted])
    np.testing.assert_array_equal(got, x.astype(INTS[wanted]))
    unsigned = np.dtype(INTS[source]).str.replace("i", "u")
    got = apply(
        target, lambda v: v.to(wanted, signed=False), wanted, x, types=(source,), dtype=INTS[wanted]
    )
    np.testing.assert_array_equal(got, x.view(unsigned).astype(INTS[wanted]))
    for kind, dtype in ((f32, np.float32), (f64, np.float64)):
        got = apply(target, lambda v, k=kind: v.to(k), kind, x, types=(source,), dtype=dtype)
        np.testing.assert_array_equal(got, x.astype(dtype))
        got = apply(
            target, lambda v, k=kind: v.to(k, signed=False), kind, x, types=(source,), dtype=dtype
        )
        np.testing.assert_array_equal(got, x.view(unsigned).astype(dtype))


@pytest.mark.parametrize("kind", [f32, f64], ids=str)
@pytest.mark.parametrize("wanted", INTS, ids=str)
def test_floats_to_integers(target, kind, wanted):
    dtype = np.float32 if kind is f32 else np.float64
    x = np.array([0, -0.0, 0.9, -0.9, 1.5, -1.5, 2.5, 100.99, -100.99, 127, -128, 33.3], dtype)
    got = apply(target, lambda v: v.to(wanted), wanted, x, types=(kind,), dtype=INTS[wanted])
    np.testing.assert_array_equal(got, np.trunc(x).astype(INTS[wanted]))
    wild = np.array([1e30, -1e30, np.inf, -np.inf, np.nan, 300, -300, 5e9, -5e9, 0.5], dtype)
    for signed in (True, False):
        out = (
            np.dtype(INTS[wanted])
            if signed
            else np.dtype(INTS[wanted].__name__.replace("int", "uint"))
        )
        info = np.iinfo(out)
        got = apply(
            target,
            lambda v, s=signed: v.fn.convert_saturating(v, wanted, s),
            wanted,
            wild,
            types=(kind,),
            dtype=out,
        )
        expected = []
        for v in wild.astype(np.float64).tolist():
            expected.append(
                0 if v != v else info.max if v > info.max else info.min if v < info.min else int(v)
            )
        assert got.tolist() == expected


def test_to_bool_and_back(target):
    x = np.array([0, -0.0, 1e-45, -3, np.nan, np.inf, 5, 0], np.float32)
    got = apply(target, lambda v: v.to(i1).to(f32), f32, x, types=(f32,))
    np.testing.assert_array_equal(got, [0, 0, 1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize("name", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64"])
def test_no_library_is_called(name):
    target = Target.named(name)
    m = Module(target)
    f = m.kernel()
    p = f.arg(f["args"], 0)
    at = 0
    dtypes = (f16, bf16, f32, f64, i8, i16, i32, i64)
    for lanes in (1, 8):
        for source in dtypes:
            x = f.load(p, source.with_lanes(lanes), at)
            for wanted in dtypes:
                f.store(x.to(wanted), p, at)
                f.store(x.to(wanted, signed=False), p, at)
                at += 64
                if source.is_float and wanted.is_int:
                    f.store(f.convert_saturating(x, wanted), p, at)
    assert ObjectFile(Unit(m.text(), target).compile()).externals() == []


def test_wrong_conversions_raise():
    f = Module().kernel()
    with pytest.raises(CodegenError, match="convert to"):
        f["args"].to(i64)
    with pytest.raises(CodegenError, match="saturating"):
        f.convert_saturating(f.i64(1), i8)
    with pytest.raises(CodegenError, match="bitcast"):
        f.i64(1).bits(f32)
