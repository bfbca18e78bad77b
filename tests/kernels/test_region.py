"""Region kernels against the references of the ops: every elementwise op on every element type,
views of all kinds, broadcasting, symbolic sizes, empty and odd shapes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from program_support import HOST, SETUPS, TARGETS, Native, compare, kernels_for, reference
from region_support import BOTH, ONE, assert_close, awkward, fused, graph_for, named, plain

from rlx.ir.dtype import ALL, DType, bool_
from rlx.ir.graph import Graph
from rlx.ir.op import REGISTRY
from rlx.llvm import jit
from rlx.llvm.nest.elements import NAMES

UNARY = sorted(n for n in NAMES if n in REGISTRY and REGISTRY[n].num_required == 1)
BINARY = sorted(n for n in NAMES if n in REGISTRY and REGISTRY[n].num_required == 2)
SIZE = 77  # whole vectors and a rest, for every width

# The mathematical functions state their own bounds; these are of what is made of them. Negative
# arguments of the gelus and of silu give results that vanish, where relative errors grow with |x|;
# gelu and normal_cdf are stated to lose digits where they are small, from x = -3 down: the latter
# has an absolute error of 4e-7 there, 16 ulp of 1/4 (tests/kernels/test_math.py has the rest).
LOOSE = {
    "gelu": 16, "normal_cdf": 16, "gelu_tanh": 250, "gelu_quick": 250, "silu": 100, "elu": 4,
    "tan": 4,
}  # fmt: skip
SMALL = {"gelu": 2.0**-7, "normal_cdf": 2.0**-2}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    taken = 0
    for dtype in ALL:
        within = LOOSE.get(name, 3) if dtype.bits >= 32 or not dtype.is_float else 1
        x = awkward(dtype, SIZE)
        if name == "signbit" and dtype.name == "f8e4m3":
            x = x[~np.isnan(x)]  # its NaN loses the sign on the way to f32
        both = ("f32",) if name == "cast" else ("f32", "f16", "i32", "bool")
        setups = BOTH if dtype.name in both else ONE
        for attributes in _attributes(name):
            taken += assert_close(
                lambda g, x, a=attributes: g.apply(name, x, **a),
                [x],
                within,
                setups,
                floor=SMALL.get(name, 0.0),
            )
    assert taken


def _attributes(name: str) -> list[dict]:
    if name == "cast":
        return [{"dtype": d} for d in ALL]
    return [{}, {"low": 1.0, "high": 3.0}] if name == "clamp" else [{}]


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    taken = 0
    pairs = [(d, d) for d in ALL]
    if name in ("add", "div", "maximum", "lt", "floor_div"):
        mixed = itertools.permutations(("f16", "i8", "u32", "bool"), 2)
        pairs += [(DType.of(a), DType.of(b)) for a, b in mixed]
    for a, b in pairs:
        within = 4 if name in ("atan2", "pow", "div") else 1
        if name == "pow" and a.is_complex:
            within = 16  # e^(b·ln a): an error of the logarithm counts |b·ln a| times, up to 9 here
        arrays = [awkward(a, SIZE), awkward(b, SIZE, seed=1)]
        setups = BOTH if a is b and a.name in ("f32", "i32", "u8") else ONE
        taken += assert_close(lambda g, x, y: g.apply(name, x, y), arrays, within, setups)
    assert taken


def test_where_takes_every_type_and_broadcasts() -> None:
    for dtype in ALL:
        arrays = [plain("bool", 7, 1), awkward(dtype, SIZE), plain(dtype, 7, 1)]
        assert assert_close(lambda g, c, a, b: g.where(c, a, b), arrays)


def test_sums_and_products_of_f32_are_rounded_as_the_reference_rounds_them() -> None:
    # a·b + c with one rounding would differ where it nearly cancels
    a, b = plain("f32", 1000), plain("f32", 1000, seed=1)
    c = -(a * b)
    assert assert_close(
        lambda g, a, b, c: fused(g, lambda h, a, b, c: h.add(h.mul(a, b), c), a, b, c), [a, b, c]
    )


SHAPES = [
    ((5, 7), (5, 7)),
    ((5, 7), (7,)),
    ((5, 7), (5, 1)),
    ((4, 1, 7), (5, 1)),
    ((3, 1, 33), (1, 2, 1)),
    ((1,), (1,)),
    ((), (40,)),
    ((), ()),
    ((0, 4), (4,)),
    ((2, 0), (2, 1)),
    ((2, 3, 4, 5, 2), (3, 1, 5, 1)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcasting(shapes) -> None:
    for dtype in ("f32", "f16", "i8", "c64"):
        arrays = [plain(dtype, *s, seed=i) for i, s in enumerate(shapes)]
        assert assert_close(lambda g, x, y: g.add(x, y), arrays, 1)


VIEWS = {
    "transpose": lambda g, x: g.transpose(x, axes=(2, 1, 0)),
    "swap": lambda g, x: g.transpose(x, axes=(0, 2, 1)),
    "narrow": lambda g, x: g.narrow(x, axis=2, start=3, length=5),
    "steps": lambda g, x: g.slice(x, (0, 1, None), (None, 5, None), (1, 2, -1)),
    "flip": lambda g, x: g.flip(x, axis=(0, 2)),
    "expand": lambda g, x: g.expand(g.narrow(x, axis=0, start=1, length=1), shape=(7, 6, 10)),
    "flat": lambda g, x: g.reshape(x, shape=(-1,)),
    "merged": lambda g, x: g.reshape(x, shape=(24, 10)),
    "moved": lambda g, x: g.reshape(g.transpose(x, axes=(2, 1, 0)), shape=(15, 16)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str) -> None:
    look = VIEWS[view]
    for dtype in ("f32", "f16", "i8", "c64"):
        x = plain(dtype, 4, 6, 10)
        assert assert_close(lambda g, x: g.contiguous(look(g, x)), [x])
    x = plain("f32", 4, 6, 10)
    assert assert_close(lambda g, x: g.exp(look(g, x)), [x], 2)
    for build in (
        lambda g, x: g.sum(look(g, x), axis=(-1,)),
        lambda g, x: g.max(look(g, x), axis=(0,)),
        lambda g, x: g.sum(look(g, x)),
        lambda g, x: g.softmax(look(g, x)),
        lambda g, x: g.softmax(look(g, x), axis=0),
    ):
        graph = graph_for(build, [x])
        assert graph is not None
        compare(graph, named([x]), 3e-6, setups=BOTH)  # sums of some 200 terms


@pytest.mark.parametrize("view", VIEWS)
def test_views_inside_a_region(view: str) -> None:
    """A layout op in the middle of a fused group changes indices, or keeps a value in between."""
    x = plain("f32", 4, 6, 10)

    def build(h, x):
        return h.mul(VIEWS[view](h, h.square(x)), 3.0)

    assert assert_close(lambda g, x: fused(g, build, x), [x])


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8", "c64", "f64", "bool"])
def test_turned_tensors_in_tiles(dtype: str) -> None:
    """Axes longer than a block, and not of whole tiles."""
    x, y = plain(dtype, 3, 70, 133), plain(dtype, 133, 70, seed=1)
    turn = {"axes": (0, 2, 1)}
    assert assert_close(lambda g, x: g.contiguous(g.transpose(x, **turn)), [x], 0, SETUPS)
    assert assert_close(lambda g, x, y: g.eq(g.transpose(x, **turn), y), [x, y])
    if dtype != "bool":
        assert assert_close(lambda g, x, y: g.sub(y, g.transpose(x, **turn)), [x, y], 1)


# -- regions ----------------------------------------------------------------------------------


def _row_scaled(h, x, y, w):
    """Two results of one nest, one of them a value per row, and views of row values."""
    total = h.add(x, y)
    scale = h.rsqrt(h.add(h.mean(h.square(total), axis=(-1,)), 1e-6))
    spread = h.expand(h.reshape(scale, shape=(*scale.shape.dims, 1)), shape=total.shape.dims)
    return h.mul(h.mul(total, spread), w), total, scale


def test_a_region_with_several_results() -> None:
    for shape in ((3, 4, 64), (5, 1000), (2, 7)):
        arrays = [plain("f32", *shape), plain("f32", *shape, seed=1), plain("f32", shape[-1])]
        graph = graph_for(lambda g, *xs: fused(g, _row_scaled, *xs), arrays)
        compare(graph, named(arrays), 2e-6, setups=BOTH)


def test_reductions_over_different_rows_need_memory_in_between() -> None:
    def build(h, x):
        rows = h.sub(x, h.max(x, axis=(1,), keepdims=True))
        return h.mul(rows, h.sum(x, axis=(0,), keepdims=True)), h.add(rows, h.max(x))

    x = plain("f32", 9, 50)
    compare(graph_for(lambda g, x: fused(g, build, x), [x]), named([x]), 2e-6, setups=BOTH)


def test_a_reduction_of_reductions() -> None:
    def build(h, x):
        return h.sub(h.sum(h.max(x, axis=(2,)), axis=(1,)), h.min(x))

    x = plain("f32", 4, 5, 30)
    compare(graph_for(lambda g, x: fused(g, build, x), [x]), named([x]), 2e-6, setups=BOTH)


def test_an_array_inside_a_region() -> None:
    table = plain("f32", 3, 20, seed=7)

    def build(h, x):
        return h.add(h.mul(x, h.constant(table)), h.constant(2.5))

    assert assert_close(lambda g, x: fused(g, build, x), [plain("f32", 3, 20)])


def test_results_twice_and_operands_as_results() -> None:
    def build(h, x):
        y = h.exp(x)
        return y, x, y

    assert assert_close(lambda g, x: fused(g, build, x), [plain("f32", 50)], 2)


# -- sizes that come with a run -----------------------------------------------------------------


@pytest.mark.parametrize("seq", [0, 1, 5, 64])
def test_symbolic_sizes(seq: int) -> None:
    arrays = [plain("f32", 2, seq, 48), plain("f32", 48)]
    dims = [["batch", "seq", 48], [48]]
    sizes, bounds = {"batch": 2, "seq": seq}, {"batch": 3, "seq": 64}

    def build(g, x, w):
        turned = g.transpose(x, axes=(1, 0, 2))
        part = g.narrow(x, axis=1, start=0, length="seq")
        return (
            g.rms_norm(x, w),
            g.add(turned, w),
            g.mul(part, 2.0),
            g.softmax(g.sum(x, axis=(2,))),
            g.mean(x, axis=(0, 1)),
        )

    if seq == 0:
        return _nothing(build, arrays, dims, sizes, bounds)
    graph = graph_for(build, arrays, dims)
    native = Native(graph, HOST, 2, bounds)
    found = native.run(named(arrays), sizes)
    for got, want in zip(found, reference(graph, named(arrays), sizes), strict=True):
        np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-6)
    return None


def _nothing(build, arrays, dims, sizes, bounds) -> None:
    """Nothing but means of nothing, which are NaN."""
    native = Native(graph_for(build, arrays, dims), HOST, 2, bounds)
    *empty, means = native.run(named(arrays), sizes)
    assert all(a.size == 0 for a in empty)
    assert np.isnan(means).all()


def test_counting_and_sizes() -> None:
    for dtype in ("i32", "f32", "u8", "i64", "f16"):
        assert assert_close(lambda g, d=dtype: g.iota(shape=(4, 30), axis=1, dtype=d, start=3), [])
        assert assert_close(lambda g, d=dtype: g.iota(shape=(70, 2), axis=0, dtype=d), [])
    x = plain("f32", 5, 3)
    dims = [["seq", 3]]

    def build(g, x):
        count = g.iota(shape=("seq", 3), axis=0, dtype="f32", start="seq + 1")
        return g.add(x, count), g.dim_value(dim="2 * seq")

    assert assert_close(build, [x], dims=dims, sizes={"seq": 5}, bounds={"seq": 9})


# -- how kernels are shared ---------------------------------------------------------------------


def _kernels(build, *arrays) -> set[str]:
    native = Native(graph_for(build, arrays), HOST, 1, {})
    return {step.spec for step in native.launches}


def test_one_kernel_for_all_outer_sizes_and_layers() -> None:
    def layer(g, x, w):
        for _ in range(4):
            x = g.rms_norm(x, w)
        return x

    first = _kernels(layer, plain("f32", 3, 64), plain("f32", 64))
    assert len(first) == 1
    assert first == _kernels(layer, plain("f32", 2, 9, 64), plain("f32", 64))
    assert _kernels(lambda g, x: g.exp(x), plain("f32", 5, 6)) == _kernels(
        lambda g, x: g.exp(x), plain("f32", 1000)
    )


def test_compiles_each_distinct_kernel_once() -> None:
    x = plain("f32", 3, 21)
    before = jit.counters.compilations
    native = Native(graph_for(lambda g, x: g.tan(g.tan(g.tan(x))), [x]), HOST, 1, {})
    assert len(native.launches) == 3
    assert jit.counters.compilations - before <= 1


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "aarch64"])
def test_other_targets(target: str) -> None:
    """Machine code of that target for elementwise ops, norms, reductions and strided copies."""
    g = Graph()
    x, w = g.input("x", (6, 50)), g.input("w", (50,))
    half = g.cast(x, "f16")
    results = [
        g.gelu(g.add(x, w)),
        g.layer_norm(x, w, w),
        g.sum(g.transpose(x, axes=(1, 0)), axis=(1,)),
        g.argmax(half),
        g.mul(half, half),
        g.cast(g.lt(x, w), bool_),
        g.contiguous(g.transpose(half, axes=(1, 0))),
    ]
    assert kernels_for(g.set_outputs(results), target) >= 6


def test_every_target_that_runs_here_agrees() -> None:
    x = plain("f32", 20, 300)
    graph = graph_for(lambda g, x: (g.softmax(x), g.gelu(x), g.sum(x, axis=(0,))), [x])
    first, *others = [Native(graph, t, 1, {}).run(named([x])) for t in TARGETS]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
