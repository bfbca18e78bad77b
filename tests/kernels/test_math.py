"""Errors of the generated functions, measured against wider arithmetic over the whole range."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_support import apply

from rlx.errors import CodegenError
from rlx.llvm import math as native
from rlx.llvm.builder import Module, f16, f32, f64
from rlx.llvm.jit import Unit
from rlx.llvm.target import Target

NARROW, WIDE = np.float32, np.float64


def each(function):
    """A function of `math` over an array, with NaN where it has no value."""

    def over(x):
        return np.array([function(v) for v in np.asarray(x, np.float64)])

    return over


def sigmoid(x):
    e = np.exp(-abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


def gelu(x):
    return 0.5 * x * each(math.erfc)(x * -math.sqrt(0.5))


def gelu_tanh(x):
    inner = np.sqrt(x.dtype.type(2) / np.pi) * (x + x.dtype.type(0.044715) * x**3)
    return x * sigmoid(2 * inner)


# name: reference, bound in ulp for f32, for f64. Bounds are those of the docstrings.
FUNCTIONS = {
    "exp": (np.exp, 1.2, 1.2),
    "exp2": (np.exp2, 1.2, 1.2),
    "expm1": (np.expm1, 2.2, 2.2),
    "log": (np.log, 1.5, 1.5),
    "log1p": (np.log1p, 2.0, 2.0),
    "log2": (np.log2, 2.5, 2.5),
    "sqrt": (np.sqrt, 0.5, 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5, 1.5),
    "sin": (np.sin, 1.8, 1.8),
    "cos": (np.cos, 1.8, 1.8),
    "tan": (np.tan, 3.5, 3.5),
    "atan": (np.arctan, 3.0, 3.0),
    "tanh": (np.tanh, 3.0, 3.0),
    "sigmoid": (sigmoid, 2.5, 2.5),
    "silu": (lambda x: x * sigmoid(x), 3.0, 3.0),
    "softplus": (softplus, 2.5, 2.5),
    # The C library's erf and erfc serve as references: themselves good to an ulp of f64.
    "erf": (each(math.erf), 2.2, 2.2 + 1),
    "erfc": (each(math.erfc), 8.0, 8.0 + 1),
}
# Products with a factor that may be denormal: the error is a multiple of that factor's.
LOOSE = {"silu", "gelu", "gelu_tanh"}
EXACT = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint}


def samples(dtype, low=None, high=None):
    """Numbers of every magnitude and kind, and many in the range where functions bend."""
    rng = np.random.default_rng(7)
    if dtype is NARROW:
        spread = np.arange(0, 1 << 32, 40_009, dtype=np.uint64).astype(np.uint32).view(dtype)
    else:
        spread = rng.integers(0, 1 << 64, 30_000, dtype=np.uint64).view(dtype)
    near = np.concatenate([np.linspace(-s, s, 20_001) for s in (0.01, 1.2, 12, 110, 750)])
    tiny = np.finfo(dtype).smallest_subnormal * np.arange(-20, 21)
    edges = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny]
    x = np.concatenate([spread, near.astype(dtype), tiny.astype(dtype), np.array(edges, dtype)])
    return x if low is None else x[(x >= low) & (x <= high)]


def errors(got, expected, least=0.0):
    """Distances in units of the last place (or `least`, if that is more)."""
    kind = got.dtype.type
    with np.errstate(all="ignore"):
        rounded = expected.astype(kind)
        special = ~np.isfinite(rounded) | ~np.isfinite(got)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        unit = np.maximum(np.spacing(np.abs(rounded)).astype(expected.dtype), least)
        distance = np.abs(got.astype(expected.dtype) - expected) / unit
    return np.where(special, np.where(same, 0.0, np.inf), distance)


def measure(target, name, reference, x):
    kind = f32 if x.dtype == NARROW else f64
    wider = np.float64 if x.dtype == NARROW else np.longdouble
    got = apply(target, native.UNARY[name], kind, x, types=(kind,), lanes=target.lanes(kind.bits))
    with np.errstate(all="ignore"):
        expected = reference(x.astype(wider))
        least = np.finfo(x.dtype).smallest_subnormal * np.abs(x).astype(wider)
    return errors(got, expected, np.nan_to_num(least) if name in LOOSE else 0.0)


def worst(error, x):
    at = int(np.argmax(error))
    return f"{error[at]} ulp at {x[at]!r}"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_stated_error(target, name, dtype):
    reference, narrow, wide = FUNCTIONS[name]
    bound = narrow if dtype is NARROW else wide
    x = samples(dtype)
    error = measure(target, name, reference, x)
    assert error.max() <= bound, worst(error, x)


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_angles_of_every_size(target, name, dtype):
    """The stated error also where each reduction works, up to its limit and from there on, and
    near multiples of π/2, where most digits cancel."""
    rng = np.random.default_rng(11)
    reference, *bounds = FUNCTIONS[name]
    large = np.exp(rng.uniform(0, 88, 20_000)) * rng.choice([-1, 1], 20_000)
    near = np.concatenate([rng.uniform(-s, s, 20_000) for s in (1e3, 2.0**17, 1e6)])
    multiples = np.rint(near) * (np.pi / 2)
    x = np.concatenate([large, near, multiples]).astype(dtype)
    error = measure(target, name, reference, x)
    assert error.max() <= bounds[dtype is WIDE], worst(error, x)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_rounding_is_exact(target, name, dtype):
    x = np.concatenate([samples(dtype), np.arange(-9, 9, 0.5).astype(dtype)])
    kind = f32 if dtype is NARROW else f64
    got = apply(target, native.UNARY[name], kind, x, types=(kind,))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = EXACT[name](x)
    np.testing.assert_array_equal(got, expected)
    signs = ~np.isnan(x)
    np.testing.assert_array_equal(np.signbit(got[signs]), np.signbit(expected[signs]))


@pytest.mark.parametrize("lanes", [1, 8, 0])
def test_gelu(target, lanes):
    """Against erfc in f64. By tables the polynomials cost less than rounding down to x = -2, and
    8 ulp by -3; the fourth power of a polynomial that is good to 2 ulp is so to 8, and some for
    the polynomial's own rounding where it nears its end."""
    x = samples(NARROW)
    got = apply(target, native.gelu, f32, x, types=(f32,), lanes=lanes or target.lanes(32))
    with np.errstate(all="ignore"):
        expected = gelu(x.astype(np.float64))
        error = errors(got, expected, np.nan_to_num(np.abs(x)) * 2.0**-149)
    near = x > -2
    assert error[near].max() <= (2 if target.avx512 else 16), worst(error[near], x[near])
    near = x > -3
    assert error[near].max() <= 16, worst(error[near], x[near])
    assert np.isnan(got[np.isnan(x) | (x == -np.inf)]).all()  # as the op's formula
    finite = np.isfinite(x)
    distance = np.abs(got[finite] - expected[finite]) / np.maximum(np.abs(x[finite]), 1)
    assert distance.max() <= 1.5e-7
    assert (got[finite & (x <= -6.75)] == 0).all()


def test_gelu_falls_from_its_end_to_its_minimum(target):
    """Also where intervals of the fit meet, and where it ends."""
    x = np.linspace(-8, -0.8, 100_001).astype(NARROW)
    got = apply(target, native.gelu, f32, x, types=(f32,), lanes=target.lanes(32))
    rise = np.diff(got)
    assert rise[x[1:] < -4].max() <= 0
    assert rise.max() <= 2.0**-23  # the last bits of larger results tremble
    assert (got <= 0).all()


def test_gelu_in_f64(target):
    """The argument's rounding costs z² ulp, so f64 itself gets a relative bound."""
    x = samples(WIDE, -6, 40)
    got = apply(target, native.gelu, f64, x, types=(f64,))
    np.testing.assert_allclose(got, gelu(x), rtol=1e-14, atol=1e-322)


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_normal_cdf(target, dtype):
    """In f32 by the polynomials of GELU, which are absolute beyond -3."""
    x = samples(dtype, -8, 40)
    kind = f32 if dtype is NARROW else f64
    got = apply(target, native.normal_cdf, kind, x, types=(kind,))
    expected = each(lambda a: math.erfc(-a * math.sqrt(0.5)) / 2)(x.astype(np.float64))
    near = x > -3
    error = errors(got[near], expected[near], 0.0)
    assert error.max() <= 16, worst(error, x[near])
    limit = 1.2e-7 if target.avx512 else 4e-7
    assert np.nanmax(np.abs(got - expected)) <= limit
    assert np.isnan(got[np.isnan(x)]).all()
    assert (got[x == -np.inf] == 0).all()


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_gelu_tanh(target, dtype):
    x = samples(dtype, -1e4, 1e4)
    error = measure(target, "gelu_tanh", gelu_tanh, x)
    assert error[x > -4].max() <= 25, worst(error[x > -4], x[x > -4])
    assert error.max() <= (250 if dtype is NARROW else 2000), worst(error, x)


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
@pytest.mark.parametrize("lanes", [1, 4, 0])
def test_falling_exponential(target, dtype, lanes):
    """As exp where x <= 0, but what would be denormal may be 0."""
    kind = f32 if dtype is NARROW else f64
    x = samples(dtype)
    x = x[~(x > 0)]
    got = apply(
        target, native.exp_down, kind, x, types=(kind,), lanes=lanes or target.lanes(kind.bits)
    )
    wider = np.float64 if dtype is NARROW else np.longdouble
    with np.errstate(all="ignore"):
        expected = np.exp(x.astype(wider))
    tiny = expected < np.finfo(dtype).tiny
    assert (got[tiny] >= 0).all()
    assert (got[tiny] <= np.finfo(dtype).tiny).all()
    assert (got[x == -np.inf] == 0).all()
    assert (got[x == 0] == 1).all()
    error = errors(got, expected)[~tiny]
    # ln 2 rounded once, see `_exp_by_table`: an ulp is 2^-24 of the result or more, and
    # 2.75e-9 |x| / 2^-24 = |x| / 21.7
    with np.errstate(all="ignore"):  # NaN among them
        bound = 1.2 + (np.abs(x[~tiny]) / 21 if dtype is NARROW else 0)
    assert not (error > bound).any(), worst(error, x[~tiny])
    assert np.isnan(got[np.isnan(x)]).all()


def pairs(dtype):
    """Bases and exponents: all sizes and signs, special values against each other."""
    rng = np.random.default_rng(3)
    n = 40_000
    x = np.exp(rng.uniform(-12, 12, n)) * rng.choice([1, 1, -1], n)
    y = np.where(rng.random(n) < 0.3, rng.integers(-9, 10, n), rng.normal(size=n) * 9)
    near_one = 1 + rng.normal(size=n // 8) * 1e-3
    large = rng.normal(size=n // 8) * 3e4
    edge = [0, -0.0, 1, -1, 2, -2, 3, -3, 0.5, -0.5, np.inf, -np.inf, np.nan, 1e-40, 1e30, -1e30]
    a, b = np.meshgrid(edge, edge)
    return (
        np.concatenate([x, near_one, a.ravel()]).astype(dtype),
        np.concatenate([y, large, b.ravel()]).astype(dtype),
    )


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_pow(target, dtype):
    x, y = pairs(dtype)
    kind, wider = (f32, np.float64) if dtype is NARROW else (f64, np.longdouble)
    got = apply(target, native.pow, kind, x, y, types=(kind, kind))
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(wider), y.astype(wider))
    error = errors(got, expected)
    assert error.max() <= (1.0 if dtype is NARROW else 2.0), (
        worst(error, x) + f", {y[error.argmax()]!r}"
    )
    assert (np.signbit(got) == np.signbit(expected))[~np.isnan(got)].all()


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_atan2(target, dtype):
    x, y = pairs(dtype)
    kind, wider = (f32, np.float64) if dtype is NARROW else (f64, np.longdouble)
    got = apply(target, native.atan2, kind, y, x, types=(kind, kind))
    expected = np.arctan2(y.astype(wider), x.astype(wider))
    error = errors(got, expected)
    assert error.max() <= 3.5, worst(error, x) + f", {y[error.argmax()]!r}"


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_remainders(target, dtype):
    """fmod is exact at any ratio; mod and floor_div agree with NumPy, which builds on fmod too."""
    rng = np.random.default_rng(5)
    x, y = pairs(dtype)
    bits = np.uint32 if dtype is NARROW else np.uint64
    wild = rng.integers(0, np.iinfo(bits).max, (2, 2000), bits).view(dtype)
    x, y = np.concatenate([x, wild[0]]), np.concatenate([y, wild[1]])
    kind = f32 if dtype is NARROW else f64
    for function, reference in (
        (native.fmod, np.fmod),
        (native.mod, np.mod),
        (native.floor_div, np.floor_divide),
    ):
        got = apply(target, function, kind, x, y, types=(kind, kind))
        with np.errstate(all="ignore"):
            expected = reference(x, y)
        np.testing.assert_array_equal(got, expected, err_msg=reference.__name__)


@pytest.mark.parametrize("lanes", [1, 2, 4, 32])
def test_any_number_of_lanes(target, lanes):
    x = samples(NARROW, -1e30, 1e30)[::97]
    for name in ("exp", "log", "sin", "tanh", "erf"):
        wide = apply(target, native.UNARY[name], f32, x, types=(f32,), lanes=lanes)
        plain = apply(target, native.UNARY[name], f32, x, types=(f32,))
        np.testing.assert_array_equal(wide, plain, err_msg=name)


@pytest.mark.parametrize(
    "name", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "aarch64", "neoverse-n1"]
)
def test_no_library_is_called(name):
    from rlx.llvm.elf import ObjectFile

    target = Target.named(name)
    for kind in (f32, f64):
        m = Module(target)
        f = m.kernel()
        p = f.arg(f["args"], 0)
        x = f.load(p, kind.with_lanes(target.lanes(kind.bits)))
        y = f.load(p, x.type, 64)
        results = [function(x) for function in native.UNARY.values()]
        results += [g(x, y) for g in (native.pow, native.atan2, native.mod, native.floor_div)]
        for i, result in enumerate(results):
            f.store(result, p, 64 * i)
        obj = ObjectFile(Unit(m.text(), target).compile())
        assert obj.externals() == []
        assert obj.machine.arch == target.arch


def test_other_types_are_refused():
    f = Module().kernel()
    half = f.load(f["args"], f16)
    with pytest.raises(CodegenError, match=r"\[exp\] works on f32 and f64; got half"):
        native.exp(half)
