"""Reductions natively: every kind on every element type, along all axes; norms, softmax and
quantisation, which are made of them; long rows and tall columns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from program_support import HOST, Native, compare
from region_support import BOTH, ONE, assert_close, fused, graph_for, named, plain

from rlx.ir.dtype import ALL, DType

AXES = [
    ((7, 33), None),
    ((7, 33), (0,)),
    ((7, 33), (1,)),
    ((3, 5, 18), (1,)),
    ((3, 5, 18), (0, 2)),
    ((3, 5, 18), (0, 1)),
    ((2, 3, 1), (2,)),
    ((1, 1), (0,)),
    ((), None),
    ((4, 0), (1,)),
    ((0, 4), (1,)),
    ((3, 1000), (1,)),
]
EPS = {
    "f64": 2.0**-52,
    "f32": 2.0**-23,
    "c64": 2.0**-23,
    "c128": 2.0**-52,
    "f16": 2.0**-10,
    "bf16": 2.0**-7,
}
EPS |= {"f8e4m3": 2.0**-3, "f8e5m2": 2.0**-2}


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "any", "all"])
def test_reductions(name: str) -> None:
    for dtype in ALL:
        for shape, axes in AXES if dtype.name in ("f32", "i8") else AXES[1:5]:
            x = plain(dtype, *shape)
            # sums cancel, and round at each of their log2(n) levels; products round n times
            within = 0.0 if name in ("max", "min") else EPS.get(dtype.name, 0.0) * 16
            for keep in (False, True) if dtype.name == "f32" else (False,):
                how = {"axis": axes, "keepdims": keep}
                graph = graph_for(lambda g, x, h=how: g.apply(name, x, **h), [x])
                if graph is not None:
                    compare(graph, named([x]), within, setups=BOTH if dtype.bits == 32 else ONE)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions(name: str) -> None:
    for dtype in ALL:
        for shape, axis in [((7, 33), 1), ((7, 33), 0), ((3, 5, 18), 1), ((1,), 0)]:
            x = plain(dtype, *shape)
            if dtype.is_float and x.size > 40:
                x.flat[[5, 12]] = np.nan
            assert_close(lambda g, x, a=axis: g.apply(name, x, axis=a), [x], setups=ONE)
    for value in (-np.inf, np.inf):
        same = np.full((3, 40), value, np.float32)
        assert assert_close(lambda g, x: g.apply(name, x), [same])


def test_long_sums_lose_little() -> None:
    # 3·10⁶ terms in f32: one f32 accumulator would be off by some 10⁻³
    x = np.random.default_rng(0).random((3, 1_000_003), np.float32)
    for axes in ((1,), None):
        graph = graph_for(lambda g, x, a=axes: g.sum(x, axis=a), [x])
        compare(graph, named([x]), 3e-7, setups=BOTH)


def test_tall_columns() -> None:
    """Reductions over leading axes: column tiles, states in memory, sums in f64."""
    tall = np.random.default_rng(0).random((100_003, 5), np.float32)
    compare(graph_for(lambda g, x: g.sum(x, axis=(0,)), [tall]), named([tall]), 2e-7)
    wide = plain("f32", 3, 100, 1500)
    for build in (
        lambda g, x: g.sum(x, axis=(1,)),
        lambda g, x: g.softmax(x, axis=1),
        lambda g, x: g.argmax(x, axis=1),
        lambda g, x: g.sub(x, g.mean(x, axis=(0, 1), keepdims=True)),
        lambda g, x: g.any(g.gt(x, 3.0), axis=(1,)),
        lambda g, x: g.l2_norm(x, axis=0),
    ):
        compare(graph_for(build, [wide]), named([wide]), 1e-6)
    for dtype in ("f16", "i8", "c64", "f64"):
        x = plain(dtype, 90, 33)
        graph = graph_for(lambda g, x: (g.sum(x, axis=(0,)), g.prod(x, axis=(0,))), [x])
        compare(graph, named([x]), EPS.get(dtype, 0.0) * 90, setups=BOTH)


LONG = {
    "softmax": lambda g, x: g.softmax(x),
    "log_softmax": lambda g, x: g.log_softmax(x),
    "argmax": lambda g, x: g.argmax(x),
    "layer norm": lambda g, x: fused(g, lambda h, x: _standardized(h, x), x),
    "all": lambda g, x: (g.sum(x), g.max(x), g.mean(x, axis=(1,))),
    "columns": lambda g, x: g.softmax(g.reshape(x, shape=(-1, 3)), axis=0),
    "transposed": lambda g, x: g.sum(g.reshape(x, shape=(-1, 3)).transpose(1, 0), axis=(1,)),
}


def _standardized(h, x):
    centred = h.sub(x, h.mean(x, axis=(-1,), keepdims=True))
    scale = h.rsqrt(h.mean(h.square(centred), axis=(-1,), keepdims=True))
    return h.mul(centred, scale), scale


@pytest.mark.parametrize("name", LONG)
def test_few_long_rows_are_cut_into_parts(name: str) -> None:
    for rows in (1, 3):
        x = plain("f32", rows, 150_001 * 3)
        x[0, 77_777] = 9.0
        graph = graph_for(LONG[name], [x])
        compare(graph, named([x]), 1e-6)
        steps = Native(graph, HOST, 2, {}).launches
        assert any(getattr(step.spec, "split", None) for step in steps)


def test_parts_of_a_size_that_comes_with_a_run() -> None:
    dims, bounds = [[2, "seq"]], {"seq": 300_000}
    for seq in (1, 70_000, 300_000):
        x = plain("f32", 2, seq)
        graph = graph_for(lambda g, x: (g.softmax(x), g.sum(x)), [x], dims)
        compare(graph, named([x]), 1e-6, {"seq": seq}, bounds=bounds)


def test_extremes_and_nan() -> None:
    x = plain("f32", 5, 70)
    x[0, 3], x[1, 0], x[2, 69], x[3] = np.nan, np.inf, -np.inf, -np.inf
    for name, axis in itertools.product(("max", "min", "sum"), (0, 1)):
        assert assert_close(lambda g, x, n=name, a=axis: g.apply(n, x, axis=(a,)), [x], 8)
    assert assert_close(lambda g, x: g.softmax(x), [x], 8)


def weights(g, x):
    peak = g.max(x, axis=(1,), keepdims=True)
    return peak, g.exp(g.sub(x, peak))


PEAKS = {
    "softmax": lambda g, x: g.softmax(x),
    "log_softmax": lambda g, x: g.log_softmax(x),
    "weights": lambda g, x: weights(g, x)[1],
    "weights and sum": lambda g, x: (weights(g, x)[1], g.sum(weights(g, x)[1], axis=(1,))),
    "peak and softmax": lambda g, x: (g.max(x, axis=(1,)), g.softmax(x)),
    "chosen": lambda g, x: g.where(g.gt(g.sum(weights(g, x)[1], axis=(1,)), 0.0), 1.0, 0.0),
    "of a peak": lambda g, x: g.mul(weights(g, x)[0], g.sum(weights(g, x)[1])),
}


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.parametrize("size", [70, 1024, 40_000])
def test_nan_reaches_all_that_is_made_of_a_peak(name: str, size: int) -> None:
    """A maximum may pass over NaN only where their weights tell of them."""
    x = plain("f32", 6, size)
    x[0, 3], x[1, 0], x[2, 69], x[3], x[4, :9] = np.nan, np.inf, -np.inf, -np.inf, np.nan
    x[5, 1:] = np.finfo(np.float32).min
    # sums of so many weights differ from the reference's by their order
    assert assert_close(PEAKS[name], [x], 8 if size < 1024 else 64)


# -- norms and others that are written out ------------------------------------------------------

NORMS = {
    "softmax": lambda g, x, y, a, b: g.softmax(x),
    "log_softmax": lambda g, x, y, a, b: g.log_softmax(x),
    "layer_norm": lambda g, x, y, a, b: g.layer_norm(x, a, b),
    "layer_norm without beta": lambda g, x, y, a, b: g.layer_norm(x, a),
    "rms_norm": lambda g, x, y, a, b: g.rms_norm(x, a),
    "l2_norm": lambda g, x, y, a, b: g.l2_norm(x),
    "residual rms_norm": lambda g, x, y, a, b: g.fused_residual_rms_norm(x, y, a),
    "residual layer_norm": lambda g, x, y, a, b: g.fused_residual_layer_norm(x, y, a, b),
    "gated": lambda g, x, y, a, b: g.fused_gated_act(x, activation="silu"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    for dtype in ("f32", "f16", "bf16", "f64", "f8e4m3"):
        shapes = ((5, 37), (2, 3, 1000), (3, 128), (1, 5), (4, 1), (0, 8))
        for shape in shapes if dtype == "f32" else shapes[:2]:
            size = shape[-1]
            arrays = [plain(dtype, *shape), plain(dtype, *shape, seed=1)]
            arrays += [plain(dtype, size, seed=2), plain(dtype, size, seed=3)]
            graph = graph_for(NORMS[name], arrays)
            if graph is not None:
                compare(graph, named(arrays), EPS[dtype] * 16, setups=BOTH)


def test_softmax_over_any_axis_and_a_long_one() -> None:
    for shape, axis in [((7, 10, 30), 0), ((7, 10, 30), 1), ((3, 20000), 1), ((1, 151_936), -1)]:
        x = plain("f32", *shape)
        graph = graph_for(lambda g, x, a=axis: g.softmax(x, axis=a), [x])
        compare(graph, named([x]), 1e-6, setups=BOTH)
    x = plain("f16", 2, 40000)  # exponentials are spilled in f32, to scratch memory
    compare(graph_for(lambda g, x: g.softmax(x), [x]), named([x]), 1e-3, setups=BOTH)


def test_group_norm_cuts_an_axis() -> None:
    for shape, groups in [((2, 8, 5, 7), 4), ((1, 6, 9), 1), ((2, 4, 3, 3), 4)]:
        arrays = [plain("f32", *shape), plain("f32", shape[1]), plain("f32", shape[1], seed=1)]
        graph = graph_for(lambda g, x, a, b, n=groups: g.group_norm(x, a, b, groups=n), arrays)
        compare(graph, named(arrays), 2e-6, setups=BOTH)


@pytest.mark.parametrize("name", ["i8", "u8", "i16", "u16", "i32", "f8e4m3", "f8e5m2"])
def test_quantisation(name: str) -> None:
    stored = DType.of(name)
    x = plain("f32", 4, 6, 10) * np.float32(20)
    x.flat[:3] = [np.nan, np.inf, -np.inf]
    for axis, dims in ((None, ()), (1, (6,)), (-1, (10,))):
        scale = np.abs(plain("f32", *dims)) + np.float32(0.1)
        for zp in [[]] if stored.is_float else [[], [plain(stored, *dims, seed=3)]]:
            both = {"dtype": stored, "axis": axis}
            operands = [x, scale, *zp]
            assert assert_close(lambda g, *v, a=both: g.quantize(*v, **a), operands, 0, ONE)
            assert assert_close(lambda g, *v, a=both: g.fake_quantize(*v, **a), operands, 1, ONE)
            codes = [plain(stored, 4, 6, 10), scale, *zp]
            assert assert_close(lambda g, *v, a=axis: g.dequantize(*v, axis=a), codes, 1, ONE)
