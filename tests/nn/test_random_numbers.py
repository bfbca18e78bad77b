"""Random numbers: distributions, keys, and equal bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, exp, lgamma, log, sqrt
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.numpy as rnp
from rlx import random
from rlx.ir.philox import philox4x32

N = 40_000
KEY = random.key(2024)
Draw = Callable[..., Any]


def _numbers(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x).astype(np.float64)


def _distance(sample: np.ndarray[Any, Any], cdf: Callable[[float], float]) -> float:
    """The statistic of Kolmogorov and Smirnov: the greatest distance of distribution functions."""
    ordered = np.sort(sample.reshape(-1))
    expected = np.array([cdf(float(x)) for x in ordered])
    n = len(ordered)
    steps = np.arange(n + 1) / n
    return float(max((expected - steps[:-1]).max(), (steps[1:] - expected).max()))


# sqrt(n) · distance exceeds 1.95 with probability 1e-3 (2 · exp(-2 · 1.95²)); seeds are fixed, so
# a pass stays a pass
_BOUND = 1.95 / sqrt(N)


def _phi(x: float) -> float:
    return (1 + erf(x / sqrt(2))) / 2


CONTINUOUS: dict[str, tuple[Draw, Callable[[float], float]]] = {
    "uniform": (random.uniform, lambda x: x),
    "between": (lambda k, s, t: random.uniform(k, s, t, -3, 5), lambda x: (x + 3) / 8),
    "normal": (random.normal, _phi),
    "exponential": (random.exponential, lambda x: 1 - exp(-x)),
    "gumbel": (random.gumbel, lambda x: exp(-exp(-x))),
    "laplace": (random.laplace, lambda x: exp(x) / 2 if x < 0 else 1 - exp(-x) / 2),
    "truncated": (
        lambda k, s, t: random.truncated_normal(k, -1.0, 2.5, s, t),
        lambda x: (_phi(x) - _phi(-1)) / (_phi(2.5) - _phi(-1)),
    ),
    "gamma 2": (lambda k, s, t: random.gamma(k, 2.0, s, t), lambda x: 1 - exp(-x) * (1 + x)),
    "gamma 1/2": (lambda k, s, t: random.gamma(k, 0.5, s, t), lambda x: erf(sqrt(x))),
    "beta 2 3": (
        lambda k, s, t: random.beta(k, 2.0, 3.0, s, t),
        lambda x: x * x * (6 - 8 * x + 3 * x * x),
    ),
}


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_numbers_follow_their_distribution(name: str, dtype: str) -> None:
    draw, cdf = CONTINUOUS[name]
    sample = draw(KEY, (N,), dtype)
    assert str(sample.dtype) == dtype
    assert _distance(_numbers(sample), cdf) < _BOUND


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["uniform", "normal", "exponential", "gamma 2"])
def test_short_types_are_drawn_in_f32_and_rounded(name: str, dtype: str) -> None:
    draw, _ = CONTINUOUS[name]
    short, wide = _numbers(draw(KEY, (999,), dtype)), _numbers(draw(KEY, (999,), "f32"))
    # uniform numbers have the leading bits, others are rounded: one unit in the last place
    digits = 8 if dtype == "bf16" else 11
    if name == "uniform":
        assert np.array_equal(short, np.floor(wide * 2**digits) / 2**digits)
    else:
        assert np.all(np.abs(short - wide) <= np.maximum(np.abs(wide) * 2.0**-digits, 2.0**-25))


def test_uniform_numbers_stay_below_the_upper_bound() -> None:
    for dtype in ("f16", "bf16", "f32", "f64"):
        x = _numbers(random.uniform(KEY, (N,), dtype, 1.0, 1.5))
        assert x.min() >= 1 and x.max() < 1.5


def test_moments_of_normals_in_many_dimensions() -> None:
    x = _numbers(random.normal(KEY, (100, 20, 200)))
    n = x.size
    # five standard deviations of the estimates: 1/√n of the mean, √(2/n) of the variance, √(96/n)
    # of the fourth moment
    assert abs(x.mean()) < 5 / sqrt(n)
    assert abs(x.var() - 1) < 5 * sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * sqrt(96 / n)
    for axis in range(3):  # neighbours are not correlated
        a, b = np.moveaxis(x, axis, 0)[:-1], np.moveaxis(x, axis, 0)[1:]
        assert abs((a * b).mean()) < 5 / sqrt(a.size)


@pytest.mark.parametrize("mean", [0.3, 4.0, 11.0, 60.0])
def test_poisson_counts(mean: float) -> None:
    x = np.asarray(random.poisson(KEY, mean, (N,)))
    values = np.arange(x.max() + 1)
    p = np.exp([v * log(mean) - mean - lgamma(v + 1) for v in values])
    common = p * N > 20
    off = (np.bincount(x)[common] - N * p[common]) ** 2 / (N * p[common])
    k = common.sum()
    assert off.sum() < k + 4 * sqrt(2 * k)  # chi-squared: mean k, variance 2 k


def test_counts_and_shapes_without_sense() -> None:
    assert np.asarray(random.poisson(KEY, np.array([0.0, -1.0, np.nan, np.inf]))).tolist() == [
        0, -1, -1, -1,
    ]  # fmt: skip
    shapes = _numbers(random.gamma(KEY, np.array([2.0, 0.0, -1.0, np.nan, np.inf])))
    assert np.isnan(shapes).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"])
def test_integers_fill_their_interval(dtype: str) -> None:
    limits = np.iinfo(rlx.DType.of(dtype).numpy)
    low = -3 if limits.min < 0 else 2
    x = np.asarray(random.randint(KEY, (N,), low, low + 7, dtype))
    counts = np.bincount((x.astype(np.int64) - low), minlength=7)
    assert len(counts) == 7
    assert np.abs(counts - N / 7).max() < 5 * sqrt(N / 7)
    whole = np.asarray(random.randint(KEY, (N,), int(limits.min), int(limits.max) + 1, dtype))
    assert whole.dtype == limits.dtype
    share = np.mean(whole.astype(np.float64) < (float(limits.min) + float(limits.max)) / 2)
    assert abs(share - 0.5) < 5 * 0.5 / sqrt(N)


def test_bounds_of_integers_may_be_arrays() -> None:
    low, high = np.array([0, -5, 7]), np.array([[3], [100]])
    for dtype in ("i32", "i64"):
        x = np.asarray(random.randint(KEY, None, low, high, dtype))
        assert x.shape == (2, 3) and (x >= low).all() and (x < np.maximum(high, low + 1)).all()
    plain = np.asarray(random.randint(KEY, (1000,), -5, 100))
    assert np.array_equal(np.asarray(random.randint(KEY, (1000,), np.array(-5), 100)), plain)
    up_to = rlx.jit(lambda k, x: random.randint(k, (50,), 0, x.shape[0]))
    for n in (3, 9, 1000):
        found = np.asarray(up_to(KEY, np.zeros(n, np.float32)))
        assert np.array_equal(found, np.asarray(random.randint(KEY, (50,), 0, n)))
    assert len(up_to.variants()) == 1
    with pytest.raises(rlx.InputError, match="not integers"):
        random.randint(KEY, (2,), 0.5, 3)  # type: ignore[arg-type]


def test_wide_intervals_take_the_high_part_of_128_bits() -> None:
    span = 3 * 2**62 + 12345
    x = np.asarray(random.randint(KEY, (50,), 0, span, "u64"))
    counter = np.zeros((50, 4), np.uint64)
    counter[:, 0] = np.arange(50)
    words = philox4x32(counter, np.tile(np.asarray(KEY), (50, 1)))
    for found, w in zip(x, words.tolist(), strict=True):
        bits = w[0] << 96 | w[1] << 64 | w[2] << 32 | w[3]
        assert int(found) == bits * span >> 128


def test_bits_are_words_of_philox() -> None:
    counter = np.zeros((6, 4), np.uint64)
    counter[:, 0] = np.arange(6)
    words = philox4x32(counter, np.tile(np.asarray(KEY), (6, 1)))
    assert np.array_equal(np.asarray(random.bits(KEY, (2, 3))), words[:, 0].reshape(2, 3))
    assert np.array_equal(np.asarray(random.bits(KEY, 6, "u8")), words[:, 0].astype(np.uint8))
    wide = words[:, 0].astype(np.uint64) << np.uint64(32) | words[:, 1]
    assert np.array_equal(np.asarray(random.bits(KEY, (6,), "u64")), wide)
    assert np.array_equal(np.asarray(random.bits(KEY, (3,))), words[:3, 0])


# -- keys -------------------------------------------------------------------------------------


def test_keys_are_made_of_seeds() -> None:
    assert np.asarray(random.key(2**40 + 7)).tolist() == [7, 2**8]
    assert np.asarray(random.key(-1)).tolist() == [2**32 - 1] * 2
    assert np.array_equal(np.asarray(random.key(rnp.asarray(5))), np.asarray(random.key(5)))
    with pytest.raises(rlx.InputError, match="not a seed"):
        random.key(2**64)
    with pytest.raises(rlx.InputError, match="not an integer"):
        random.key(rnp.asarray(0.5))
    with pytest.raises(rlx.InputError, match="not a key"):
        random.normal(np.zeros(3, np.uint32))


def test_split_and_folded_keys_draw_independent_numbers() -> None:
    keys = [KEY, *random.split(KEY, 3), random.fold_in(KEY, 0), random.fold_in(KEY, 1)]
    assert len({tuple(np.asarray(k).tolist()) for k in keys}) == len(keys)
    drawn = np.stack([_numbers(random.normal(k, (N,))) for k in keys])
    off = np.corrcoef(drawn) - np.eye(len(keys))
    assert np.abs(off).max() < 5 / sqrt(N)


# -- choices ----------------------------------------------------------------------------------


def test_bernoulli_categorical_and_choice() -> None:
    p = np.array([0.1, 0.2, 0.7], np.float32)
    assert abs(np.asarray(random.bernoulli(KEY, 0.3, (N,))).mean() - 0.3) < 5 * sqrt(0.21 / N)
    assert random.bernoulli(KEY, p).shape == (3,)
    kept = np.asarray(random.dropout_mask(KEY, 0.25, (N,))).mean()
    assert abs(kept - 0.75) < 5 * sqrt(0.1875 / N)
    signs = np.asarray(random.rademacher(KEY, (N,)))
    assert set(signs.tolist()) == {-1, 1} and abs(signs.mean()) < 5 / sqrt(N)
    for drawn in (
        random.categorical(KEY, np.log(p), shape=(N,)),
        random.choice(KEY, 3, (N,), p=p),
        random.choice(KEY, np.arange(3), (N,), p=p),
    ):
        share = np.bincount(np.asarray(drawn), minlength=3) / N
        assert np.abs(share - p).max() < 5 * 0.5 / sqrt(N)
    rows = random.categorical(KEY, np.log(np.tile(p, (5, 1)).T), axis=0)
    assert rows.shape == (5,)
    assert random.categorical(KEY, np.zeros((5, 4), np.float32), shape=(7, 5)).shape == (7, 5)


def test_permutations_hold_everything_once() -> None:
    assert sorted(np.asarray(random.permutation(KEY, 100)).tolist()) == list(range(100))
    x = np.arange(24).reshape(4, 6)
    moved = np.asarray(random.permutation(KEY, x, axis=1))
    assert sorted(map(tuple, moved.T)) == sorted(map(tuple, x.T))
    lanes = np.asarray(random.permutation(KEY, x, axis=1, independent=True))
    assert np.array_equal(np.sort(lanes, axis=1), x)
    first = [int(random.permutation(random.fold_in(KEY, i), 4)[0]) for i in range(400)]
    assert np.abs(np.bincount(first) - 100).max() < 5 * sqrt(100)


def test_choice_without_replacement() -> None:
    drawn = np.asarray(random.choice(KEY, 10, (2, 4), replace=False))
    assert drawn.shape == (2, 4) and len(set(drawn.reshape(-1).tolist())) == 8
    p = np.array([0.0, 0.5, 0.5, 0.0], np.float32)
    some = np.asarray(random.choice(KEY, 4, (2,), replace=False, p=p))
    assert sorted(some.tolist()) == [1, 2]
    with pytest.raises(rlx.InputError, match="more than there are"):
        random.choice(KEY, 3, (4,), replace=False)
    rows = random.choice(KEY, np.arange(12).reshape(4, 3), (2, 5), axis=1)
    assert rows.shape == (4, 2, 5)


# -- everywhere the same ----------------------------------------------------------------------

DRAWS: dict[str, Draw] = {
    "bits": lambda k, n: random.bits(k, (n, 3)),
    "wide bits": lambda k, n: random.bits(k, (n,), "u64"),
    "uniform": lambda k, n: random.uniform(k, (n, 3)),
    "randint": lambda k, n: random.randint(k, (n,), -5, 1000),
    "bernoulli": lambda k, n: random.bernoulli(k, 0.4, (n,)),
    "split": lambda k, n: random.split(k, n),
    "folded": lambda k, n: random.bits(random.fold_in(k, 9), (n,)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_bits_are_equal_at_once_in_jit_and_on_the_reference(name: str) -> None:
    draw = DRAWS[name]
    on_cpu = rlx.jit(lambda k, x: draw(k, x.shape[0]))
    on_reference = rlx.jit(lambda k, x: draw(k, x.shape[0]), device="reference")
    for n in (1, 2, 5, 130):
        x = np.zeros(n, np.float32)
        expected = np.asarray(draw(KEY, n))
        assert np.array_equal(np.asarray(on_cpu(KEY, x)), expected)
        assert np.array_equal(np.asarray(on_reference(KEY, x)), expected)
    assert len(on_cpu.variants()) == 2  # a size of 1, and all others


def test_a_captured_key_and_a_symbolic_shape() -> None:
    noisy = rlx.jit(lambda x: x + random.normal(KEY, x.shape))
    for shape in ((4, 6), (9, 2)):
        x = np.ones(shape, np.float32)
        # equal words; the two kernels may order the sum differently, one rounding
        expected = 1 + np.asarray(random.normal(KEY, shape))
        np.testing.assert_allclose(np.asarray(noisy(x)), expected, rtol=3e-7, atol=3e-7)


def test_loops_run_inside_jit() -> None:
    f = rlx.jit(lambda k, a: (random.gamma(k, a), random.poisson(k, a * 10)))
    a = np.array([0.5, 2.0, 9.0])
    drawn, counted = f(KEY, a)
    np.testing.assert_allclose(_numbers(drawn), _numbers(random.gamma(KEY, a)), rtol=1e-6)
    assert np.array_equal(np.asarray(counted), np.asarray(random.poisson(KEY, a * 10)))


def test_wrong_requests_are_typed_errors() -> None:
    for wrong in (
        lambda: random.normal(KEY, (-1,)),
        lambda: random.normal(KEY, "ab"),
        lambda: random.normal(KEY, (2,), "i32"),
        lambda: random.bits(KEY, (2,), "f32"),
        lambda: random.randint(KEY, (2,), 5, 5),
        lambda: random.randint(KEY, (2,), 0, 300, "u8"),
        lambda: random.uniform(KEY, (2,), "f32", 2.0, 1.0),
        lambda: random.categorical(KEY, np.arange(3)),
        lambda: random.dropout_mask(KEY, 1.5, (2,)),
    ):
        with pytest.raises(rlx.RlxError):
            wrong()
