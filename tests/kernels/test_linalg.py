"""Native Fourier transforms and linear systems against the ops' references."""

from __future__ import annotations

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, check, compare, kernels_for, reference

from rlx.ir.dtype import DType
from rlx.ir.graph import Graph

# A transform adds log n times; with factors rounded to f32 every level adds some 6e-8 of the norm,
# and a chirp makes three transforms of one. The reference is rounded from f64.
# In f64 both sides round at every level.
NORM = {"f32": 5e-7, "f64": 4e-15}


def transform(kind, dims, axis=-1, dtype="c64", sizes=None, seed=0, **attributes):
    g = Graph()
    g.set_outputs(getattr(g, kind)(g.input("x", dims, dtype), axis=axis, **attributes))
    rng = np.random.default_rng(seed)
    shape = [(sizes or {}).get(d, d) for d in dims]
    x = rng.standard_normal(shape)
    if dtype in ("c64", "c128"):
        x = x + 1j * rng.standard_normal(shape)
    return g, {"x": x.astype(DType.of(dtype).numpy)}


def compare_norms(g, arrays, axis, sizes=None, bounds=None, setups=SETUPS):
    """Signal by signal, so that a small one beside a large one counts too."""
    [want] = reference(g, arrays, sizes)
    scale = np.linalg.norm(want.astype(np.complex128), axis=axis)
    for target, workers in setups:
        [got] = Native(g, target, workers, bounds or sizes or {}).run(arrays, sizes)
        assert got.shape == want.shape and got.dtype == want.dtype
        error = np.linalg.norm(got.astype(np.complex128) - want, axis=axis)
        norm = NORM[DType.of(want.dtype).part.name]
        assert (error <= norm * scale).all(), f"off by {(error / scale).max():.2g}"


LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 13, 15, 16, 30, 49, 61, 64, 67, 100, 128, 131, 134, 400, 1009]


@pytest.mark.parametrize("n", LENGTHS)
def test_every_length(n):
    few = SETUPS[1::3]
    compare_norms(*transform("fft", (5, n)), -1, setups=few)
    compare_norms(*transform("fft", (19, n), inverse=True), -1, setups=few)
    compare_norms(*transform("fft", (3, n), dtype="f32"), -1, setups=few)
    compare_norms(*transform("rfft", (3, n), dtype="f32"), -1, setups=few)
    compare_norms(*transform("irfft", (3, n // 2 + 1), n=n), -1, setups=few)
    compare_norms(*transform("fft", (19, n), dtype="c128", inverse=True), -1, setups=few)
    compare_norms(*transform("fft", (3, n), dtype="f64"), -1, setups=few)
    compare_norms(*transform("rfft", (3, n), dtype="f64"), -1, setups=few)
    compare_norms(*transform("irfft", (3, n // 2 + 1), dtype="c128", n=n), -1, setups=few)


@pytest.mark.parametrize("n", [12, 15, 67])
@pytest.mark.parametrize(("dims", "axis"), [((3, 0, 20), 1), ((0, 37), 0), ((2, 3, 0, 2, 5), 2)])
def test_every_axis(n, dims, axis):
    def sized(points):
        return tuple(points if i == axis else d for i, d in enumerate(dims))

    compare_norms(*transform("fft", sized(n), axis), axis)
    compare_norms(*transform("rfft", sized(n), axis, "f32"), axis)
    compare_norms(*transform("irfft", sized(n // 2 + 1), axis, n=n), axis)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_signals(dtype):
    compare_norms(*transform("rfft", (3, 24), dtype=dtype), -1, setups=SETUPS[1::3])
    compare_norms(*transform("fft", (4, 15, 3), 1, dtype), 1, setups=SETUPS[1::3])


def test_no_signals():
    for kind, dtype, attributes in (("fft", "c64", {}), ("rfft", "f32", {}),
                                    ("irfft", "c64", {"n": 6})):  # fmt: skip
        compare(*transform(kind, (0, 4), dtype=dtype, **attributes), 0, setups=SETUPS[1::3])


def test_a_small_signal_beside_a_large_one():
    g, arrays = transform("rfft", (17, 48), dtype="f32")
    arrays["x"][3] *= 1e12
    arrays["x"][4] *= 1e-12
    compare_norms(g, arrays, -1)
    arrays["x"][5, 7] = np.nan
    [got] = Native(g, HOST, 2, {}).run(arrays)
    assert np.isnan(got[5]).all() and np.isfinite(np.delete(got, 5, 0)).all()


def test_imaginary_parts_that_do_not_count():
    for n in (8, 9):
        g, arrays = transform("irfft", (3, n // 2 + 1), n=n)
        arrays["x"][:, 0] = 1 + 1e6j
        if n % 2 == 0:
            arrays["x"][:, -1] = 2 - 1e6j
        compare_norms(g, arrays, -1)


@pytest.mark.parametrize(("batch", "seq"), [(1, 6), (3, 1), (2, 25)])
def test_dynamic_dims(batch, seq):
    sizes, bounds = {"batch": batch, "seq": seq}, {"batch": 4, "seq": 30}
    for made, axis in (
        (transform("fft", ("batch", 12), sizes=sizes), -1),
        (transform("fft", ("batch", "seq", 3), 1, sizes=sizes), 1),
        (transform("fft", ("batch", "seq"), dtype="f32", sizes=sizes, inverse=True), -1),
        (transform("rfft", ("batch", "seq", 3), 1, "f32", sizes), 1),
    ):
        used = {s: n for s, n in sizes.items() if s in made[0].symbols()}
        most = {s: bounds[s] for s in used}
        compare_norms(*made, axis, used, most, SETUPS[1::3])


def test_dynamic_inverse():
    for points in (6, 7):
        g = Graph()
        x = g.input("x", ("batch", "seq"), "f32")
        g.set_outputs(g.irfft(g.rfft(x), n="seq"))
        sizes = {"batch": 3, "seq": points}
        arrays = {"x": np.random.default_rng(0).standard_normal((3, points)).astype(np.float32)}
        for target in TARGETS:
            [got] = Native(g, target, 2, {"batch": 4, "seq": 9}).run(arrays, sizes)
            check(got, arrays["x"], NORM["f32"])


# -- linear systems -------------------------------------------------------------------------------


def system(a, b, dtypes=("f32", "f32"), sizes=None, seed=0):
    g = Graph()
    g.set_outputs(g.solve(g.input("a", a, dtypes[0]), g.input("b", b, dtypes[1])))
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, dims, dtype in (("a", a, dtypes[0]), ("b", b, dtypes[1])):
        shape = [(sizes or {}).get(d, d) for d in dims]
        arrays[name] = rng.standard_normal(shape).astype(DType.of(dtype).numpy)
    return g, arrays


SYSTEMS = [
    ((1, 1), (1, 1)),
    ((2, 2), (2, 3)),
    ((3, 5, 5), (3, 5, 2)),
    ((7, 7), (4, 7, 9)),
    ((2, 1, 9, 9), (3, 9, 1)),
    ((33, 33), (33, 200)),
    ((64, 64), (64, 5)),
    ((6, 4, 4), (4, 4)),
    ((0, 3, 3), (0, 3, 2)),
    ((2, 0, 0), (2, 0, 3)),
    ((3, 3), (3, 0)),
]


@pytest.mark.parametrize(("a", "b"), SYSTEMS)
def test_solve(a, b):
    # Both sides eliminate in f64 and round once; conditions here stay far below 1e8.
    compare(*system(a, b), 2e-7)
    compare(*system(a, b, ("f64", "f64")), 1e-11, setups=SETUPS[1::3])


@pytest.mark.parametrize(("dtypes", "tolerance"), [
    (("f16", "f16"), 2**-10), (("bf16", "bf16"), 2**-7), (("f16", "f32"), 2e-7),
    (("f64", "f32"), 1e-11),
])  # fmt: skip
def test_solve_other_types(dtypes, tolerance):
    compare(*system((2, 9, 9), (2, 9, 3), dtypes), tolerance, setups=SETUPS[1::3])


def test_singular_matrices_give_nan_and_leave_others_alone():
    g, arrays = system((4, 5, 5), (4, 5, 2))
    arrays["a"][1] = 0
    arrays["a"][2] = np.outer([1, 2, 4, 8, 16], [1, 3, 5, 7, 9])  # exact in f64
    arrays["a"][3, :, 0] = [0, 0, 0, 1, 0]  # needs a row from below
    compare(g, arrays, 2e-7)
    [got] = Native(g, HOST, 1, {}).run(arrays)
    assert np.isnan(got[1:3]).all() and np.isfinite(got[[0, 3]]).all()


def test_dynamic_systems():
    sizes, bounds = {"batch": 2, "seq": 7}, {"batch": 3, "seq": 9}
    made = system(("batch", "seq", "seq"), ("batch", "seq", 4), sizes=sizes)
    compare(*made, 2e-7, sizes, SETUPS[1::3], bounds)


def test_a_program_in_the_pool():
    from rlx.backends.cpu.thread_pool import ThreadPool

    g = Graph()
    x = g.input("x", (33, 48), "f32")
    g.set_outputs(g.irfft(g.rfft(x), n=48), g.solve(g.input("a", (3, 9, 9), "f32"), x.graph.input(
        "b", (3, 9, 4), "f32")))  # fmt: skip
    rng = np.random.default_rng(1)
    arrays = {
        n.name: rng.standard_normal(n.output.shape.static_dims).astype(np.float32)
        for n in g.nodes if n.op.is_source
    }  # fmt: skip
    expected = reference(g, arrays)
    pool, native = ThreadPool(2, oversubscribe=True), Native(g, HOST, 2, {})
    for _ in range(3):
        for got, want in zip(native.run(arrays, pool=pool.run), expected, strict=True):
            check(got, want, NORM["f32"])


@pytest.mark.parametrize("name", ["aarch64", "x86-64"])
def test_other_targets(name):
    for g, _ in (
        transform("fft", (4, 30)),
        transform("irfft", (4, 8), n=14),
        transform("rfft", (4, 67, 3), 1, "f16"),
        system((2, 4, 4), (2, 4, 1)),
    ):
        assert kernels_for(g, name)
