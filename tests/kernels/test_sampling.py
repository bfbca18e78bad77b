"""top_k and sample, natively: the same elements and the same tokens as the references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from program_support import HOST, SETUPS, Native, kernels_for, reference
from region_support import BOTH, assert_close, graph_for, named, plain

from rlx.ir.dtype import ALL, DType
from rlx.ir.graph import Graph

CASES = [((7, 33), 5, -1), ((7, 33), 3, 0), ((3, 5, 18), 18, 2), ((4, 1), 1, 1), ((3, 6, 4), 2, 1)]


@pytest.mark.parametrize("dtype", [d.name for d in ALL if d.kind != "complex"])
def test_top_k(dtype: str) -> None:
    for (shape, k, axis), largest in itertools.product(CASES, (True, False)):
        x = plain(dtype, *shape)
        if DType.of(dtype).is_float and x.size > 40:
            x.flat[[5, 9, 20, 30, 31]] = [np.nan, np.nan, np.inf, 0.0, -0.0]
        how = {"k": k, "axis": axis, "largest": largest}
        assert assert_close(lambda g, x, h=how: g.top_k(x, **h), [x], setups=BOTH)


def test_top_k_of_long_rows() -> None:
    x = plain("f32", 3, 20_000)
    for k in (1, 50, 20_000):
        assert assert_close(lambda g, x, k=k: g.top_k(x, k=k), [x], setups=SETUPS)
    equal = np.zeros((2, 5000), np.float32)
    assert assert_close(lambda g, x: g.top_k(x, k=100), [equal])
    falling = np.arange(5000, 0, -1, dtype=np.int64).reshape(1, -1)
    assert assert_close(lambda g, x: g.top_k(x, k=9, largest=False), [falling])


def test_top_k_with_dynamic_rows() -> None:
    x = plain("f32", 5, 40)
    for rows in (0, 1, 5):
        graph = graph_for(lambda g, x: g.top_k(x, k=4), [x], [["seq", 40]])
        native = Native(graph, HOST, 2, {"seq": 8})
        got = native.run(named([x[:rows]]), {"seq": rows})
        for a, b in zip(got, reference(graph, named([x[:rows]]), {"seq": rows}), strict=True):
            np.testing.assert_array_equal(a, b)


# temperature, top_k, top_p, min_p
SETTINGS = [
    (1, 0, 1, 0),
    (0, 0, 1, 0),
    (np.nan, 0, 1, 0),
    (0.7, 5, 1, 0),
    (1, 1, 1, 0),
    (1.3, 0, 0.9, 0),
    (1, 0, 0.999, 0),
    (100, 0, 0.95, 0),
    (1, 20, 0.5, 0.01),
    (1, 0, 1, 0.05),
    (2, 5000, 0.99, 0),
    (1, 3.7, 0.0, 0),
    (1, 0.5, 1, 1),
]


def _logits(dtype: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    x = (rng.standard_normal((40, size)) * 3).astype(DType.of(dtype).numpy)
    if size >= 100:
        x[0, 3], x[1], x[2], x[3], x[4, 7], x[5, :50] = np.nan, -np.inf, np.nan, 0, np.inf, -np.inf
    return x


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64", "bf16"])
def test_sample_draws_the_reference_s_tokens(dtype: str) -> None:
    for size in (1, 5, 100, 3000):
        x = _logits(dtype, size)
        g = Graph()
        drawn = g.sample(
            g.input("x", x.shape, x.dtype), g.input("rng", (2,), "u64"), g.input("settings", (4,))
        )
        g.set_outputs(drawn)
        natives = [Native(g, t, n, {}) for t, n in BOTH]
        for i, settings in enumerate(SETTINGS):
            rng = np.array([2**60 + 7 * i, 2**40 - i], np.uint64)
            given = {"x": x, "rng": rng, "settings": np.array(settings, np.float32)}
            expected = reference(g, given)
            for native in natives:
                for got, want in zip(native.run(given), expected, strict=True):
                    np.testing.assert_array_equal(got, want)


def test_rows_with_an_rng_and_settings_of_their_own_draw_as_alone() -> None:
    x = _logits("f32", 3000)
    rows = len(x)
    rng = np.array([[2**60 + 7 * i, 2**64 - 1 - i % 5] for i in range(rows)], np.uint64)
    settings = np.array([SETTINGS[i % len(SETTINGS)] for i in range(rows)], np.float32)
    alone, together = Graph(), Graph()
    for g, count, each in ((alone, 1, ()), (together, rows, (rows,))):
        inputs = g.input("x", (count, 3000)), g.input("rng", (*each, 2), "u64")
        g.set_outputs(g.sample(*inputs, g.input("settings", (*each, 4))))
    given = {"x": x, "rng": rng, "settings": settings}
    one = [{name: array[i] for name, array in given.items()} for i in range(rows)]
    drawn = [reference(alone, {**row, "x": row["x"][None]}) for row in one]
    expected = np.concatenate([t for t, _ in drawn]), np.stack([after for _, after in drawn])
    found = [reference(together, given)]
    found += [Native(together, target, workers, {}).run(given) for target, workers in BOTH]
    for outputs in found:
        for got, want in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(got, want)


def test_constant_settings_and_a_whole_vocabulary() -> None:
    x = (np.random.default_rng(0).standard_normal((3, 151_936)) * 4).astype(np.float32)
    for how in (
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"top_p": 0.9, "min_p": 0.01},
        {},
        {"temperature": 0.0},
    ):
        g = Graph()
        g.set_outputs(g.sample(g.input("x", x.shape), g.input("rng", (2,), "u64"), **how))
        given = {"x": x, "rng": np.array([1, 2**64 - 1], np.uint64)}
        expected = reference(g, given)
        for target, workers in BOTH:
            for got, want in zip(Native(g, target, workers, {}).run(given), expected, strict=True):
                np.testing.assert_array_equal(got, want)


def test_draws_follow_the_weights() -> None:
    # 20,000 draws of 4 tokens: each share within 5 standard deviations of its probability
    x = np.tile(np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)), (20_000, 1))
    g = Graph()
    tokens, _ = g.sample(g.input("x", x.shape), g.input("rng", (2,), "u64"))
    g.set_outputs(tokens)
    [drawn] = Native(g, HOST, 2, {}).run({"x": x, "rng": np.array([5, 6], np.uint64)})
    shares = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=5 * 0.5 / len(drawn) ** 0.5)


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "aarch64"])
def test_other_targets(target: str) -> None:
    g = Graph()
    x = g.input("x", (4, 100))
    rng = g.input("rng", (2,), "u64")
    outputs = [*g.top_k(x, k=3), *g.top_k(g.cast(x, "i64"), k=3), *g.sample(x, rng)]
    assert kernels_for(g.set_outputs(outputs), target) >= 3
